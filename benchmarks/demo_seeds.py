"""The demo on several seeds, one after the other, and whether planned FP8 kept its word on all of them.

    python benchmarks/demo_seeds.py --seeds 0-7 --out benchmarks/results/cpu --work runs        runs what has no record yet
    python benchmarks/demo_seeds.py --seeds 0-7 --out benchmarks/results/cpu --work runs --again    runs all
    python benchmarks/demo_seeds.py --out benchmarks/results/cpu                                only the table

Each seed is `loka demo --seed N --json` as a user runs it, its answer in demo_seed<N>.json (demo.json for seed 0). Held to: planned FP8 is never called worse at 0.1 %, and the mean
of its changes is within 0.02 % of the control's (the same training again in float32, from another order of the data). Naive FP8 stands beside it.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

WITHIN = 0.0002


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="where the runs go; without it nothing is run")
    parser.add_argument("--seeds", default="0-7", help="first-last")
    parser.add_argument("--again", action="store_true", help="run seeds that have a record too")
    asked = parser.parse_args()
    first, last = map(int, asked.seeds.split("-"))
    for seed in range(first, last + 1):
        if asked.work is not None and (asked.again or not path_of(asked.out, seed).exists()):
            run(seed, asked.work, asked.out)
    found = {
        s: json.loads(path_of(asked.out, s).read_text())
        for s in range(first, last + 1)
        if path_of(asked.out, s).exists()
    }
    print(describe(found))
    return int(not all_hold(found))


def path_of(out: Path, seed: int) -> Path:
    return out / ("demo.json" if seed == 0 else f"demo_seed{seed}.json")


def run(seed: int, work: Path, out: Path) -> None:
    command = [sys.executable, "-m", "loka", "demo", "--seed", str(seed), "--out", str(work / f"seed{seed}"), "--json"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    json.loads(answer)
    path_of(out, seed).write_text(answer)


def change(record: dict[str, Any], name: str) -> float:
    value: float = record["comparisons"][name]["relative_change"]["value"]
    return value


def all_hold(found: dict[int, dict[str, Any]]) -> bool:
    worse = [seed for seed, r in found.items() if r["comparisons"]["planned"]["outcome"] == "worse"]
    apart = mean(change(r, "planned") for r in found.values()) - mean(change(r, "control") for r in found.values())
    return not worse and abs(apart) <= WITHIN


def describe(found: dict[int, dict[str, Any]]) -> str:
    names = list(next(iter(found.values()))["comparisons"])
    lines = ["| seed | " + " | ".join(names) + " | GEMM FLOPs in FP8 |", "|" + "---|" * (len(names) + 2)]
    for seed, record in found.items():
        cells = [f"{change(record, n):+.3%} {record['comparisons'][n]['outcome']}" for n in names]
        lines.append(f"| {seed} | " + " | ".join(cells) + f" | {record['low_precision_flops_share']:.1%} |")
    means = [f"{mean(change(r, n) for r in found.values()):+.3%}" for n in names]
    lines.append("| mean | " + " | ".join(means) + " | |")
    return "\n".join([*lines, f"{len(found)} seeds: {'holds' if all_hold(found) else 'does not hold'}"])


if __name__ == "__main__":
    sys.exit(main())
