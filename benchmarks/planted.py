"""Broken kernels at the gates: which gate finds each, and which of them the usual test would have let through.

    python benchmarks/planted.py --out benchmarks/results/cpu/planted.json

The site is a linear of K = 320, N = 192 fed with the stress mode of the synthetic data (rows of very different size, a few large channels,
a bias that grows), trained for a few steps with a Probe attached. The kernels are those of planted_kernels; each is evaluated as any
engine would be. Exit 1 when one of them survives both gates, or when the right one does not pass.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from planted_kernels import PLANTED, Inspection, inspect, make_hard_site

from loka.records import capture_environment, write_atomically


def describe(found: Inspection) -> dict[str, object]:
    return {
        "kernel": found.planted.name,
        "mistake": found.planted.mistake,
        "recipe": found.planted.recipe,
        "conformance": found.conformance,
        "learned": found.learned,
        "learned_error": found.learned_error,
        "normal_error_256": finite(found.usual_error),
        "normal_error_site": finite(found.site_error),
        "passes_normal_256": found.looks_fine,
        "rejected_by": list(found.rejected_by),
    }


def finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None


def spell(found: Inspection) -> str:
    cells = [
        found.planted.name,
        "rejects" if found.conformance else "passes",
        found.learned or f"passes ({found.learned_error:.3g})",
        f"{found.usual_error:.3g}, {'passes' if found.looks_fine else 'rejects'}",
        f"{found.site_error:.3g}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--samples", type=int, default=50)
    arguments = parser.parse_args()
    watch = make_hard_site()
    print(
        "| kernel | conformance | learned distributions | N(0, 1) at 256^3, bound 0.2 | N(0, 1) at the site's shape |"
    )
    print("|---|---|---|---|---|")
    found = []
    for planted in PLANTED:
        found.append(inspect(planted, watch, samples=arguments.samples))
        print(spell(found[-1]), flush=True)
    if arguments.out is not None:
        environment = capture_environment(command="python benchmarks/planted.py", threads=torch.get_num_threads())
        content = {
            "site": {"k": watch.k, "n": watch.n, "rows": watch.largest, "samples": arguments.samples},
            "kernels": [describe(f) for f in found],
            "environment": {name: getattr(environment, name) for name in environment.__struct_fields__},
        }
        write_atomically(arguments.out, json.dumps(content, indent=1).encode() + b"\n")
    survivors = [f.planted.name for f in found if f.planted.name != "none" and not f.rejected_by]
    false_alarms = [f.planted.name for f in found if f.planted.name == "none" and f.rejected_by]
    for name in (*survivors, *false_alarms):
        print(f"wrong verdict: {name}", file=sys.stderr)
    return 1 if survivors or false_alarms else 0


if __name__ == "__main__":
    sys.exit(main())
