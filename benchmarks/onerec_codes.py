"""Why OneRec stays just under first-order Markov on the two small Amazon sets: the same model, data and schedule, with items spelled otherwise.

    python benchmarks/onerec_codes.py --root FOLDER --data amazon-2018-scientific --seeds 3 --device cpu --out onerec_codes.json

FOLDER holds the compact data of benchmarks/quality_data.py, as for benchmarks/quality.py, whose recipe every arm has. Arms differ in the id that the model is asked to spell:

    semantic   the codes of residual k-means over the items' texts, as in quality.py: three or four tokens an item, shared by items that are alike
    shuffled   the same codes given to other items at random: the same lengths and sizes, and sharing that means nothing
    items      the number of the item, one token: the decoder, the history and the loss stay, and nothing is spelled

A history says which item it was in all arms (codes and number). HR@10 and NDCG@10 on the test split at the best validation step, leave-last-out over the whole catalogue, beside popularity and Markov.
Finished runs are kept in the record and not repeated.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import quality_sequences as sequences
import torch
from evidence import describe_run


def spell(events: sequences.Events, arm: str, seed: int) -> sequences.Events:
    """The events with the ids of an arm; row 0 is no item."""
    codes = events.codes
    if arm == "items":
        return replace(events, codes=torch.arange(len(codes), device=codes.device)[:, None])
    if arm == "shuffled":
        order = torch.randperm(len(codes) - 1, generator=torch.Generator().manual_seed(seed)).to(codes.device) + 1
        return replace(events, codes=torch.cat([codes[:1], codes[order]]))
    return events


def run(root: Path, data: str, arm: str, seed: int, device: str, deadline: float) -> dict[str, Any]:
    """Train one model and score it on the test split."""
    recipe = sequences.RECIPES["onerec", data][0]
    events = spell(sequences.read_events(root, data, device), arm, seed)
    return sequences.run(root, "onerec", data, seed, device, deadline=deadline, recipe=recipe, events=events)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--data", default="amazon-2018-scientific")
    parser.add_argument("--arms", default="semantic,items,shuffled")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--seconds", type=float, default=7200.0, help="runs that are under way then are cut short, and not kept"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    stored: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"runs": []}
    stored["baselines"] = stored.get("baselines", {}) | {
        options.data: sequences.measure_baselines(options.root, options.data, options.device)
    }
    deadline = time.time() + options.seconds
    done = {(r["data"], r["arm"], r["seed"]) for r in stored["runs"]}
    for seed in range(options.seeds):
        for arm in options.arms.split(","):
            if (options.data, arm, seed) in done or time.time() > deadline:
                continue
            found = run(options.root, options.data, arm, seed, options.device, deadline)
            if found["cut_short"]:
                print(f"{arm} {seed}: cut short, not kept", file=sys.stderr)
                break
            stored["runs"].append({"data": options.data, "arm": arm, "seed": seed, **found})
            stored["environment"] = describe_run(options.device)
            options.out.write_text(json.dumps(stored, indent=1) + "\n")
            print(f"{options.data} {arm} {seed}: HR@10 {found['hr10']:.4f}, NDCG@10 {found['ndcg10']:.4f}, {found['train_seconds']:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
    for name, value in stored["baselines"][options.data].items():
        print(f"{name:12} HR@10 {value:.4f}")
    for arm in options.arms.split(","):
        hits = [r["hr10"] for r in stored["runs"] if (r["data"], r["arm"]) == (options.data, arm)]
        if hits:
            print(f"{arm:12} HR@10 {sum(hits) / len(hits):.4f} over {len(hits)} seeds: {', '.join(f'{h:.4f}' for h in hits)}")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
