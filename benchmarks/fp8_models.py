"""FP8 against everything else, whole models on one GPU: training step and inference, time and peak memory.

    python benchmarks/fp8_models.py --out fp8_models.json                       all of it
    python benchmarks/fp8_models.py --out fp8_models.json --only wukong-train   the cases that start so

A case is model-mode-precision. Both sides have the same Mods (BlockNorm-256, hard swish, no biases), the same layout and the same weights, and are compiled
with static shapes and replayed as CUDA graphs; training is forward and backward without the optimiser, inference has 16-bit weights and inputs.

    fp32, tf32                              the float32 model
    bf16                                    autocast in training, bf16 weights in inference: the baseline
    torchao-tensorwise, torchao-rowwise     torchao's float8 training, or its post-training quantisation, on every linear whose widths are multiples of 16
    loka                                    loka.mods.Fuse: chains of linears in FP8 from one layer to the next; other linears of 256 or more both ways too
    loka-convert                            loka.convert(recipe="tensorwise") on the same linears, nothing fused: what a model gets that nobody rewrites

HSTU is its layers over embedded events (ragged, static lengths) and one logit an event; tables and softmax over items are left out, as tables are in the others.

Every case is a process of its own; all compile at the same time, then take turns on the idle GPU (benchmarks/models.py). Each FP8 case first compares what its prediction
layer reads, and in training all gradients, with the float32 model on the same weights, and the gradients of the compiled model with those of the eager one; the
differences are in the record, and so is the share of all multiplied FLOPs that runs in FP8 (`fp8_share`), counted on the modules as they are. The peak of memory is that of
a step.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models

PRECISIONS = ("fp32", "tf32", "bf16", "torchao-tensorwise", "torchao-rowwise", "loka")
MODELS = ("wukong", "wukong8k", "wukong8k4k", "dlrm", "elfm", "interformer", "hstu", "dcn", "dhen")
BRIEF = ("wukong8k4k", "dcn", "dhen")  # these in bf16 and ours, the others in every precision
EXTRA = {"hstu": ("loka-convert",), "interformer": ("loka-convert",), "elfm": ("loka-convert",)}
CASES = tuple(
    f"{model}-{mode}-{precision}"
    for model in MODELS
    for mode in ("train", "infer")
    for precision in (("bf16", "loka") if model in BRIEF else PRECISIONS) + EXTRA.get(model, ())
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--only", default="", help="comma-separated beginnings of case names; a name of a case is that case alone"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--scale", type=int, default=1, help="divide batches by this, and use tiny models: to test the script"
    )
    parser.add_argument("--limit-seconds", type=float, default=240)
    parser.add_argument("--start-when", type=Path)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.script = __file__
    if arguments.case:
        models.run_case(arguments.case, arguments, build_case)
        return 0
    wanted = [word for word in arguments.only.split(",") if word]
    cases = select(wanted)
    if not cases:
        parser.error(f"--only {arguments.only} matches none of {', '.join(CASES)}")
    report = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"cases": {}}
    models.run_cases(cases, arguments, report)
    report["speedup"] = compare(report["cases"])
    arguments.out.write_text(json.dumps(report, indent=1))
    print(describe(report))
    return 1 if any("error" in report["cases"][case] for case in cases) else 0


def select(wanted: list[str]) -> list[str]:
    """Cases by the beginnings of their names; a whole name means that case, not the longer names that begin so."""
    return [c for c in CASES if not wanted or any(c == w or (w not in CASES and c.startswith(w)) for w in wanted)]


def compare(cases: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Speed and memory of every case over bf16's."""
    found = {}
    for name, result in cases.items():
        model, mode, _ = name.split("-", 2)
        base = cases.get(f"{model}-{mode}-bf16", {})
        if "ms" in result and "ms" in base:
            found[name] = {"speedup": base["ms"] / result["ms"]}
            if "memory_gib" in result:
                found[name]["memory"] = result["memory_gib"] / base["memory_gib"]
    return found


def describe(report: dict[str, Any]) -> str:
    lines = [f"{'case':34} {'ms':>8} {'over bf16':>9} {'GiB':>7} {'memory':>7} {'in FP8':>7} {'difference':>10}"]
    for case, result in report["cases"].items():
        if "error" in result:
            lines.append(f"{case:34} failed: {result['error']}")
            continue
        gain = report["speedup"].get(case, {})
        lines.append(
            f"{case:34} {result['ms']:8.3f} {gain.get('speedup', math.nan):8.2f}x {result.get('memory_gib', math.nan):7.2f} "
            f"{gain.get('memory', math.nan):6.2f}x {result.get('fp8_share', math.nan):7.1%} {result.get('difference', math.nan):10.4f}"
        )
    return "\n".join(lines)


def build_case(case: str, arguments: argparse.Namespace) -> tuple[Callable[[], Any], dict[str, Any]]:
    import fp8_models_cases

    return fp8_models_cases.build(case, arguments.device, scale=arguments.scale, compiled=not arguments.eager)


if __name__ == "__main__":
    sys.exit(main())
