"""Whether planned FP8 kept its word in the demo on every seed that has a record.

    python benchmarks/demo_seeds.py                                             the table; exit 1 where it does not hold
    python benchmarks/evidence.py --only demo                                   makes the records: `loka demo --seed N --json`, as a user runs it

Held to: planned FP8 is never called worse at 0.1 %, and the mean of its changes is within 0.02 % of the control's (float32 again, from weights nudged once by a bf16 rounding).
Naive FP8 stands beside it.
"""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

RESULTS = Path(__file__).parent / "results" / "cpu"
SEEDS = range(8)
WITHIN = 0.0002


def main() -> int:
    paths = {seed: RESULTS / ("demo.json" if seed == 0 else f"demo_seed{seed}.json") for seed in SEEDS}
    found = {seed: json.loads(path.read_text()) for seed, path in paths.items() if path.exists()}
    print(describe(found))
    missing = [str(seed) for seed in SEEDS if seed not in found]
    if missing:
        print(f"no record of seed {', '.join(missing)}", file=sys.stderr)
    return int(bool(missing) or not all_hold(found))


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
