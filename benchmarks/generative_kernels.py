"""The kernels of generative inference on one GPU: grouped GEMM, the layer around it, selection, attention of beams. Every tile, then the bars.

    python benchmarks/generative_kernels.py --seconds 150 --out generative.json
    python benchmarks/generative_kernels.py --smoke --out generative.json          CPU, emulation, tiny shapes: walks every section

Order: (1) every configuration is proved right on ragged groups with an idle expert, several processes at a time (which also fills Triton's cache), (2) what is
green is timed section by section with CUDA graphs, rotated operands and interleaved repeats, (3) the bars are held against the best configuration. The record is
rewritten after every section; a row that fails says why and stops nothing; sections that no longer fit into the time are named.
"""

import argparse
import sys
import time
import traceback
from pathlib import Path

import torch
from generative_kernels_beams import section_attention, section_topk
from generative_kernels_gemm import section_gemm, section_swiglu
from generative_kernels_layer import section_layer
from generative_kernels_plan import h200, say, smoke, write
from generative_kernels_tiles import prove

SECTIONS = {
    "gemm": section_gemm, "topk": section_topk, "swiglu": section_swiglu, "attention": section_attention, "layer": section_layer,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the record, JSON")
    parser.add_argument("--seconds", type=float, default=150.0, help="stop starting new work after this long")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"comma-separated: {', '.join(SECTIONS)}")
    parser.add_argument("--processes", type=int, default=12, help="configurations compiled and checked at a time")
    parser.add_argument("--smoke", action="store_true", help="CPU, emulation, tiny shapes")
    options = parser.parse_args()
    chosen = options.only.split(",")
    unknown = [name for name in chosen if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    plan = smoke() if options.smoke else h200()
    if plan.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no usable GPU; hint: --smoke")
    plan.end, plan.out = time.monotonic() + options.seconds, options.out
    if plan.device.type == "cuda":
        prove(plan, options.processes)
        write(plan)
    for name in chosen:
        if plan.left < 8:
            say(plan, f"out of time: {name} was not measured")
            continue
        begin = time.monotonic()
        try:
            SECTIONS[name](plan)
        except Exception as error:
            traceback.print_exc()
            say(plan, f"section {name} stopped: {type(error).__name__}: {str(error)[:300]}")
        say(plan, f"section {name}: {time.monotonic() - begin:.0f} s")
        write(plan)
    missed = [note for note in plan.notes if note.startswith("MISSED")]
    print(*[note for note in plan.notes if note[:6] in ("met   ", "MISSED")], sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
