"""What FP8 costs a trained OneRec: recall, NDCG, likelihood and the overlap of beam sets, against bf16, on three data sets.

    python benchmarks/onerec_quality.py --root FOLDER --out onerec_quality.json --seconds 500
    python benchmarks/onerec_quality.py --combine A.json B.json --out onerec_quality.json
    python benchmarks/onerec_quality.py --root FOLDER --out x.json --device cpu --only amazon-2018-scientific --shorten 100 --users 60 --beams 32    dry run

FOLDER holds the compact data of benchmarks/quality_data.py; training is that of benchmarks/quality_sequences.py. Each model is trained once (early stopping on
the validation split), then run through the engine on the test users in bf16, in fp16 and in FP8 (loka.quantize, recipe onerec, no calibration, nothing chosen
on test data), constrained to valid ids.

    quality       recall@10, NDCG@10, log-likelihood per user; FP8 against bf16, paired, equivalence within 1 %
    overlap       of the first n beams with bf16's, n = 10, 50, 512: FP8's beside fp16's, since two 16-bit formats disagree as well
    sensitivity   change of the validation likelihood with one site at a time in FP8, also for the sites the recipe keeps

`moe` is the same model with a mixture of experts from its second block on. Rows are written as they come; a failing part is a row with its error.
"""

import argparse
import json
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import quality_sequences as sequences
import torch
import torch.nn.functional as F
from onerec_synthetic import share_weights
from torch import Tensor

from loka.data.batch import Jagged
from loka.inference import Engine, EngineConfig, Request
from loka.metrics import BeamOverlap, compare_paired
from loka.models.onerec import Experts, OneRec
from loka.ptq import quantize
from loka.records import capture_environment
from loka.training import TrainConfig

MARGIN = 1.0  # percent
Z975 = 1.959964
DATA = ("amazon-2018-scientific", "ml-1m", "amazon-2014-beauty")
KINDS = {"dense": {}, "moe": {"experts": Experts(routed=8, top=2, hidden=128, shared=1, dense_blocks=1)}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default=",".join(DATA), help="data sets")
    parser.add_argument("--models", default="dense,moe")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--users", type=int, default=8000, help="test users, at most")
    parser.add_argument("--beams", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32, help="requests per batch of the engine")
    parser.add_argument("--shorten", type=float, default=1.0, help="divide the length of training, to test the script")
    parser.add_argument(
        "--combine", type=Path, nargs="+", help="run nothing: write the rows of these files, and what they say together"
    )
    a = parser.parse_args()
    if a.combine:
        a.out.write_text(json.dumps(combine([json.loads(file.read_text()) for file in a.combine]), indent=1) + "\n")
        return 0
    if a.root is None:
        parser.error("--root FOLDER is needed to run something")
    started = time.monotonic()
    name = torch.cuda.get_device_name() if a.device == "cuda" else "cpu"
    environment = capture_environment(command="python benchmarks/onerec_quality.py", device=name)
    report: dict[str, Any] = {
        "environment": {n: getattr(environment, n) for n in environment.__struct_fields__},
        "settings": {k: str(v) for k, v in vars(a).items() if k not in ("root", "out")},
        "rows": [],
        "failed": [],
        "skipped": [],
    }
    cells = [(data, kind) for kind in a.models.split(",") for data in a.only.split(",")]
    for number, (data, kind) in enumerate(cells):
        left = a.seconds - (time.monotonic() - started)
        if left < 5:
            report["skipped"].append(f"{kind}:{data}")
            continue
        try:  # a fair share of what is left; half of it for training
            share = left / (len(cells) - number)
            report["rows"].append(run(a, data, kind, deadline=time.time() + 0.6 * share))
        except Exception as error:
            traceback.print_exc()
            report["failed"].append({"cell": f"{kind}:{data}", "error": f"{type(error).__name__}: {error}"[:800]})
        report["seconds"] = time.monotonic() - started
        a.out.write_text(json.dumps(report, indent=1))
    a.out.write_text(json.dumps(report, indent=1))
    print(describe(report))
    return 1 if report["failed"] else 0


def combine(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows of several runs, and every metric over all of them: the mean of the changes weighted by their precision (users of different rows are different)."""
    rows = [row for report in reports for row in report["rows"]]
    pooled = {}
    for metric in dict.fromkeys(name for row in rows for name in row["fp8 against bf16"]):
        found = [row["fp8 against bf16"][metric] for row in rows]
        found = [f for f in found if "percent" in f]
        errors = [(f["high"] - f["low"]) / (2 * Z975) for f in found]
        weights = [1 / e**2 for e in errors]
        mean = sum(w * f["percent"] for w, f in zip(weights, found, strict=True)) / sum(weights)
        half = Z975 / sum(weights) ** 0.5
        verdict = "equivalent" if abs(mean) + half < MARGIN else "worse" if mean + half < 0 else "inconclusive"
        pooled[metric] = {
            "percent": mean,
            "low": mean - half,
            "high": mean + half,
            "verdict": verdict,
            "rows": len(found),
        }
    joined = {name: [x for report in reports for x in report[name]] for name in ("failed", "skipped")}
    settings = [report["settings"] for report in reports]
    return {"environment": reports[-1]["environment"], "settings": settings, "rows": rows, **joined, "pooled": pooled}


def run(a: argparse.Namespace, data: str, kind: str, *, deadline: float) -> dict[str, Any]:
    begin = time.monotonic()
    task, trained = train(a, data, kind, deadline)
    row: dict[str, Any] = {"data": data, "model": kind, **trained}
    users, target = (t[: a.users] for t in task.events.held_out("test"))
    arms: dict[str, Any] = {}
    for name, dtype, low in (("bf16", "bf16", False), ("fp16", "fp16", False), ("fp8", "bf16", True)):
        model = share_weights(task.model)
        if low:
            summary = quantize(model, "onerec")
            row["quantised"], row["bytes ratio"] = (
                f"{len(summary.quantized)} of {len(summary.record.sites)}",
                summary.record.ratio,
            )
        arms[name] = answer(task, model, users, target, dtype, a)
    row["arms"] = {name: {k: float(v.double().mean()) for k, v in arm["values"].items()} for name, arm in arms.items()}
    row["fp8 against bf16"] = {k: compare(arms["fp8"]["values"][k], v, k) for k, v in arms["bf16"]["values"].items()}
    ns = [n for n in (10, 50, 512) if n <= arms["bf16"]["items"].shape[1]]
    row["overlap with bf16"] = {
        name: overlap(arms["bf16"]["items"], arms[name]["items"], ns) for name in ("fp16", "fp8")
    }
    row["sensitivity"] = sensitivity(task, a)
    row["seconds"] = time.monotonic() - begin
    print(f"{kind}:{data} {row['seconds']:.0f} s {row['arms']} {row['overlap with bf16']}", file=sys.stderr, flush=True)
    return row


def train(a: argparse.Namespace, data: str, kind: str, deadline: float) -> tuple[Any, dict[str, Any]]:
    events = sequences.read_events(a.root, data, a.device)
    recipe = sequences.RECIPES["onerec", data][0]
    recipe = replace(recipe, steps=max(2, round(recipe.steps / a.shorten)), model=recipe.model | KINDS[kind])
    if a.shorten > 1:
        recipe = replace(recipe, batch=min(recipe.batch, 64), evaluations=1)
    torch.manual_seed(a.seed)
    task = sequences.NextId(events, recipe)
    task.model.to(a.device)
    config = TrainConfig(
        steps=recipe.steps,
        warmup_steps=min(100, recipe.steps),
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        schedule="cosine",
        final_fraction=0.02,
    )
    best = sequences.train(task, recipe, config, a.device, deadline)
    task.model.load_state_dict(best.pop("state"))
    task.model.eval()
    return task, {"training": {k: v for k, v in best.items() if isinstance(v, int | float | str)}}


def histories(task: Any, users: Tensor, target: Tensor) -> list[Tensor]:
    """What each user did before the target, as the model reads it."""
    e = task.events
    first = torch.maximum(e.first[users], target - task.recipe.length)
    return [task.described[e.items[a:b]] for a, b in zip(first.tolist(), target.tolist(), strict=True)]


@torch.no_grad()
def answer(
    task: Any, model: OneRec, users: Tensor, target: Tensor, dtype: str, a: argparse.Namespace
) -> dict[str, Any]:
    """Items and per-user metrics of one arm."""
    config = EngineConfig(beams=a.beams, requests=(a.batch,), dtype=dtype, normalize="valid", fuse=False)
    engine = Engine(model, config, valid=task.trie, device=a.device)
    rows, goals = histories(task, users, target), task.events.items[target].cpu()
    items = torch.full((len(rows), a.beams), -1, dtype=torch.int64)
    for start in range(0, len(rows), a.batch):
        for place, found in enumerate(engine.generate([Request(r) for r in rows[start : start + a.batch]]), start):
            items[place, : len(found.items)] = found.items
    hit = items[:, :10] == goals[:, None]
    gain = 1.0 / torch.log2(torch.arange(2, 12).double())
    values = {"recall@10": hit.any(1).double(), "ndcg@10": (hit * gain).sum(1)}
    wide = torch.bfloat16 if dtype == "bf16" else torch.float16
    with torch.autocast(a.device, dtype=wide):
        values["log-likelihood"] = likelihood(task, model, users, target)
    return {"items": items, "values": values}


@torch.no_grad()
def likelihood(task: Any, model: OneRec, users: Tensor, target: Tensor) -> Tensor:
    """Log-probability of the held-out item among valid ids."""
    out = []
    for some, goal in zip(users.split(512), target.split(512), strict=True):
        rows = histories(task, some, goal)
        offsets = torch.tensor([0, *(len(r) for r in rows)], device=goal.device).cumsum(0)
        codes = task.events.codes[task.events.items[goal]]
        logits = model(Jagged(torch.cat(rows), offsets), codes)
        masks = task.trie.follow(codes)
        levels = [
            -F.cross_entropy(part.double().masked_fill(~mask, -torch.inf), codes[:, i], reduction="none")
            for i, (part, mask) in enumerate(zip(logits, masks, strict=True))
        ]
        out.append(torch.stack(levels).sum(0).cpu())
    return torch.cat(out)


def compare(candidate: Tensor, baseline: Tensor, metric: str) -> dict[str, Any]:
    sign = -1.0 if float(baseline.sum()) < 0 else 1.0
    if float(baseline.abs().sum()) == 0:
        return {"verdict": "no baseline: the metric is 0 for every user"}
    found = compare_paired(
        sign * candidate, sign * baseline, margin=MARGIN, metric=metric, lower_is_better=sign < 0, relative=True
    )
    ends = sorted((sign * found.low, sign * found.high))
    return {
        "percent": sign * found.estimate,
        "low": ends[0],
        "high": ends[1],
        "mde": found.mde,
        "verdict": found.verdict,
        "users": found.units,
    }


def overlap(reference: Tensor, candidate: Tensor, ns: list[int]) -> dict[str, float]:
    metric = BeamOverlap(ns)
    metric.update(reference, candidate)
    return {f"@{n}": value for n, value in metric.compute().overlap.items()}


def sensitivity(task: Any, a: argparse.Namespace) -> list[dict[str, Any]]:
    """Each site alone on the validation likelihood; `kept` sites are those the recipe leaves in 16 bits."""
    users, target = (t[: min(a.users, 1024)] for t in task.events.held_out("valid"))
    low = share_weights(task.model)
    by_recipe = set(quantize(share_weights(task.model), "onerec").quantized)
    done = quantize(low, "onerec", score=lambda m: (-likelihood(task, m, users, target), None), widen=True)
    found = {site.name: site.metric_change for site in done.record.sites if site.metric_change is not None}
    kept = set(found) - by_recipe
    return [
        {"site": name, "kept": name in kept, "percent": 100 * c.value, "low": 100 * c.low, "high": 100 * c.high}
        for name, c in sorted(found.items(), key=lambda pair: -pair[1].value)
    ]


def describe(report: dict[str, Any]) -> str:
    lines = []
    for row in report["rows"]:
        lines.append(f"{row['model']} {row['data']} ({row['seconds']:.0f} s)")
        for metric, found in row["fp8 against bf16"].items():
            means = " ".join(f"{name} {arm[metric]:.5f}" for name, arm in row["arms"].items())
            change = (
                f"{found['percent']:+.3f} % [{found['low']:+.3f}, {found['high']:+.3f}]" if "percent" in found else ""
            )
            lines.append(f"  {metric:16} {means}  {change} {found['verdict']}")
        lines += [f"  overlap {name:5} {found}" for name, found in row["overlap with bf16"].items()]
        lines += [f"  most sensitive {s['site']} {s['percent']:+.3f} %" for s in row["sensitivity"][:3]]
    return "\n".join([*lines, *(f"failed {f}" for f in report["failed"]), *(f"skipped {s}" for s in report["skipped"])])


if __name__ == "__main__":
    sys.exit(main())
