"""Quantisers at random shapes on one GPU: the share of a copy's bandwidth that each reaches, a copy that moves the bytes the maths needs.

    PYTHONPATH=src python benchmarks/quantizers_sweep.py --out quantizers.json
    PYTHONPATH=src python benchmarks/quantizers_sweep.py --device cpu --shapes 2 --largest 64 --backend reference --out quantizers.json      does it run?

M is drawn from 64 to 32768, log-uniformly; K from 256 to 8192, a third of them any integer, a third multiples of 8, a third multiples of 16. Bytes the maths needs: x read once, each
output written once, and x read once more where a scale depends on all of it (a dynamic scale of the tensor, a dynamic scale a row of the transpose): no chip holds
an x of that size between its maximum and its cast. Scales are left out. Kernel and copy are timed together (CUDA graphs, interleaved repeats, operands rotated
through more than the L2 cache), every kernel after it was proved equal to the law at that shape. The record is rewritten after every shape.
"""

import argparse
import json
import math
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loka.formats import ROW, TENSOR
from loka.kernels import registry
from loka.kernels.quantize.call import QuantizeCall
from loka.measure.adapter import adapter_for
from loka.measure.conformance import Conformance
from loka.measure.device import snapshot
from loka.measure.timing import Contender, Thunk, sets_needed, time_together
from loka.records import write_atomically

VARIANTS = (
    "e4m3:tensor:static", "e4m3:tensor", "e4m3:row", "e4m3:1x128", "e4m3:128x128",
    "e4m3:tensor:static+e4m3:tensor:static", "e4m3:tensor+e4m3:tensor", "e4m3:row+e4m3:row", "e4m3:1x128+e4m3:1x128", "e4m3:128x128+e4m3:128x128",
)  # fmt: skip
BAR = 75.0  # percent


def draw_shapes(count: int, seed: int, largest: int) -> list[tuple[int, int]]:
    """(M, K); `largest` bounds both, for a machine without a GPU."""
    source = random.Random(seed)
    shapes = []
    for index in range(count):
        m = round(math.exp(source.uniform(math.log(64), math.log(32768))))
        step = (1, 8, 16)[index % 3]
        shapes.append((min(m, largest), min(source.randint(256 // step, 8192 // step) * step, largest)))
    return shapes


def bytes_needed(call: QuantizeCall) -> int:
    """Inputs and outputs once; x once more for a scale that depends on all of it."""
    twice = any(
        spec is not None and spec.mode == "dynamic" and spec.block == TENSOR for spec in (call.spec, call.transpose)
    )
    columns = call.transpose is not None and call.transpose.mode == "dynamic" and call.transpose.block == ROW
    reads = 2 if twice or columns else 1
    outputs = (call.spec is not None) + (call.transpose is not None)
    return call.m * call.k * (reads * call.in_dtype.itemsize + outputs)


def copier(count: int, device: torch.device) -> Thunk:
    """A kernel that reads and writes `count` bytes in all. `copy_` in a CUDA graph is no kernel, and a third slower."""
    source = torch.randint(0, 2**31 - 1, (max(count // 8, 1),), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return lambda: torch.bitwise_not(source, out=target)


def measure(shape: tuple[int, int], variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the record."""
    device, adapter = torch.device(options.device), adapter_for("quantize")
    (call,) = adapter.calls([(*shape, 0)], [variant])
    backend = registry.backend("quantize", options.backend)
    row: dict[str, Any] = {"m": call.m, "k": call.k, "variant": variant, "bytes": bytes_needed(call)}
    verdict = backend.supports(call, device)
    if not verdict:
        return {**row, "refusal": verdict.reason}
    count = sets_needed(row["bytes"], device)
    sets: list[Tensor] = [adapter.operands(call, seed=s, distribution="normal", device=device) for s in range(count)]
    proved = adapter.check(backend, call, sets[0])
    if not proved:
        return {**row, "wrong": proved.reason}
    candidates = [
        Contender("kernel", [adapter.thunk(backend, call, x) for x in sets], proved),
        Contender("copy", [copier(row["bytes"], device) for _ in sets], Conformance(True, 0.0, 0.0)),
    ]
    kernel, copy = time_together(candidates, device, repeats=options.repeats)
    share = kernel.speedup_over(copy)
    return {
        **row,
        "microseconds": kernel.microseconds().value,
        "copy_microseconds": copy.microseconds().value,
        "percent": 100 * share.value,
        "percent_low": 100 * share.low,
        "percent_high": 100 * share.high,
        "method": kernel.method,
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per variant: worst, median, and how many shapes reach the bar."""
    found = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        shares = [row["percent"] for row in rows if row["variant"] == variant and "percent" in row]
        if shares:
            reached = sum(share >= BAR for share in shares)
            found.append({"variant": variant, "shapes": len(shares), "worst": min(shares), "median": statistics.median(shares), "reached": reached})  # fmt: skip
    return found


def main() -> int:
    """Measure, print, write; exit status 1 where a kernel is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--largest", type=int, default=1 << 30)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=540.0)
    options = parser.parse_args()
    end, rows, skipped = time.monotonic() + options.seconds, [], []
    for shape in draw_shapes(options.shapes, options.seed, options.largest):
        for variant in options.variants.split(","):
            if time.monotonic() > end:
                skipped.append({"m": shape[0], "k": shape[1], "variant": variant})
                continue
            rows.append(measure(shape, variant, options))
            print(json.dumps(rows[-1]), flush=True)
        record = {
            "environment": {k: str(v) for k, v in vars_of(snapshot()).items()}, "backend": options.backend, "bar_percent": BAR, "rows": rows,
            "summary": summary(rows), "out_of_time": skipped,
        }  # fmt: skip
        write_atomically(options.out, json.dumps(record, indent=1).encode())
    for line in summary(rows):
        print(f"{line['variant']:42} worst {line['worst']:5.1f} %  median {line['median']:5.1f} %  {line['reached']} of {line['shapes']} reach {BAR:.0f} %")  # fmt: skip
    return int(any("wrong" in row for row in rows))


def vars_of(record: Any) -> dict[str, Any]:
    """The fields of a record."""
    return {name: getattr(record, name) for name in record.__struct_fields__}


if __name__ == "__main__":
    sys.exit(main())
