"""Embedding tables on one GPU: pooled lookups and fused updates, proved right and then timed, beside torch's embedding_bag and the bandwidth of a copy.

    PYTHONPATH=src python benchmarks/tables_h200.py --seconds 60 --out tables.json
    PYTHONPATH=src TRITON_INTERPRET=1 python benchmarks/tables_h200.py --smoke --out tables.json       CPU, tiny: does it run?

10 M rows, 65,536 bags of 20 uniformly drawn items, widths 32 to 256. Each kernel is checked on a smaller table against the law first (loka.measure.tables); one that is red is named and
not timed. Then all formats of a width are timed together with CUDA graphs, three sets of items in turn so that the cache helps no one.

    lookup   bytes count in sectors of 32: items x (sectors of a row + one for its scale) + indices + result
    bars     bf16 >= 80 % of the copy's bandwidth from width 128 on; 8 bits >= 65 % at 256; >= 2x F.embedding_bag everywhere;
             8 bits over our bf16 >= 1.25x at 128, >= 1.5x at 256; an 8-bit update no slower than float32's

What does not fit into the time is listed as skipped. The file is written again after every width. Exit 0 whatever the bars say: they are in the file.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import Draw
from loka.kernels.embedding_bag import Rows, triton
from loka.kernels.embedding_update import Rule
from loka.kernels.embedding_update import triton as update
from loka.measure import Candidate, Conformance, snapshot, time_together
from loka.measure.adapter import adapter_for
from loka.records import write_atomically

LOOKUPS = ("bfloat16", "int8:row", "e4m3:row", "int4:row")
UPDATES = ("float32", "bfloat16", "int8:row", "e4m3:row:pow2")
SETS = 3
SECTOR = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--bags", type=int, default=65_536)
    parser.add_argument("--items", type=int, default=20)
    parser.add_argument("--widths", default="256,128,64,32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU, in Triton's interpreter")
    o = parser.parse_args()
    if o.smoke:
        o.rows, o.bags, o.items, o.widths, o.repeats = 200, 6, 3, "32", 3
    deadline = time.monotonic() + o.seconds
    device = torch.device("cpu" if o.smoke else "cuda")
    result: dict[str, Any] = {
        "environment": json.loads(msgspec.json.encode(snapshot())), "rows": o.rows, "bags": o.bags, "items": o.items,
        "copy_bytes_per_second": copy_bandwidth(device, o.smoke), "lookups": [], "updates": [], "refused": [], "skipped": [],
    }  # fmt: skip
    for width in map(int, o.widths.split(",")):
        for name, measure in (("lookups", time_lookups), ("updates", time_updates)):
            if time.monotonic() > deadline:
                result["skipped"].append(f"{name} of width {width}")
                continue
            result[name] += measure(width, o, device, result)
            result["bars"] = judge(result)
            write_atomically(o.out, (json.dumps(result, indent=1) + "\n").encode())
            print(f"{name} {width}: {time.monotonic() - deadline + o.seconds:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps(result["bars"], indent=1))
    return 0


def copy_bandwidth(device: torch.device, smoke: bool) -> float:
    """Bytes read and written by a copy of 1 GiB, per second."""
    source = torch.zeros(2**16 if smoke else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (timing,) = time_together(
        [Candidate("copy", [lambda: target.copy_(source)], Conformance(True, 0.0, 0.0))], device, repeats=5
    )
    return 2 * source.numel() / min(timing.seconds)


def proved(
    op: str, backend: Any, width: int, variant: str, device: torch.device, result: dict[str, Any], smoke: bool
) -> Conformance | None:
    adapter = adapter_for(op)
    (call,) = adapter.calls([(6, width, 50) if smoke else (512, width, 5000)], [variant])
    verdict: Conformance = adapter.check(
        backend, call, adapter.operands(call, seed=1, distribution="normal", device=device)
    )
    if not verdict:
        result["refused"].append(f"{op} {variant} width {width}: {verdict.reason}")
        return None
    return verdict


def draw(o: argparse.Namespace, device: torch.device) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator(device=device).manual_seed(0)
    sets = [torch.randint(0, o.rows, (o.bags * o.items,), generator=generator, device=device) for _ in range(SETS)]
    return sets, torch.arange(0, o.bags * o.items + 1, o.items, device=device)


def make_rows(kind: str, width: int, o: argparse.Namespace, device: torch.device) -> Rows:
    """Made piece by piece: a float32 table of 10 M x 256 is 10 GB, and quantising it whole would take several times that."""
    pieces, generator = [], torch.Generator(device=device).manual_seed(1)
    for start in range(0, o.rows, 1_000_000):
        piece = torch.randn(min(1_000_000, o.rows - start), width, generator=generator, device=device) * 0.1
        pieces.append(Rows.of(piece, kind))
    scales = [piece.scale for piece in pieces if piece.scale is not None]
    return Rows(torch.cat([p.data for p in pieces]), torch.cat(scales) if scales else None, pieces[0].spec)


def time_lookups(
    width: int, o: argparse.Namespace, device: torch.device, result: dict[str, Any]
) -> list[dict[str, Any]]:
    sets, offsets = draw(o, device)
    candidates, sizes = [], {}
    for kind in LOOKUPS:
        verdict = proved("embedding_bag", triton, width, f"{kind}|sum|items={o.items}", device, result, o.smoke)
        if verdict is None:
            continue
        rows = make_rows(kind, width, o, device)
        thunks = [lambda i=i, rows=rows: triton.run(rows, i, offsets, out_dtype=torch.bfloat16) for i in sets]
        candidates.append(Candidate(kind, thunks, verdict))
        row = rows.data.shape[1] * rows.data.element_size()
        sectors = math.ceil(row / SECTOR) + (rows.scale is not None)
        sizes[kind] = o.bags * o.items * (sectors * SECTOR + 8) + o.bags * width * 2
        if kind == "bfloat16":
            weight = rows.data
            baseline = [
                lambda i=i, weight=weight: F.embedding_bag(i, weight, offsets, mode="sum", include_last_offset=True)
                for i in sets
            ]
            candidates.append(Candidate("F.embedding_bag", baseline, verdict))
            sizes["F.embedding_bag"] = sizes[kind]
    return rows_of(candidates, sizes, width, o, device, result)


def time_updates(
    width: int, o: argparse.Namespace, device: torch.device, result: dict[str, Any]
) -> list[dict[str, Any]]:
    sets, offsets = draw(o, device)
    grad = torch.randn(o.bags, width, device=device)
    candidates, sizes, rule = [], {}, Rule("rowwise_adagrad", lr=0.01)
    for kind in UPDATES:
        verdict = proved(
            "embedding_update", update, width, f"{kind}|rowwise_adagrad|items={o.items}", device, result, o.smoke
        )
        if verdict is None:
            continue
        rows = make_rows(kind, width, o, device)
        state = rule.state(rows)
        thunks = [
            lambda i=i, rows=rows, state=state: update.run(rows, i, offsets, grad, rule, state, Draw(1, 2, 3))
            for i in sets
        ]
        candidates.append(Candidate(kind, thunks, verdict))
        row = width * rows.data.element_size()
        sectors = math.ceil(row / SECTOR) + (rows.scale is not None) + 1
        sizes[kind] = o.bags * o.items * (2 * sectors * SECTOR + 24) + o.bags * width * 4
    return rows_of(candidates, sizes, width, o, device, result)


def rows_of(
    candidates: list[Candidate],
    sizes: dict[str, int],
    width: int,
    o: argparse.Namespace,
    device: torch.device,
    result: dict[str, Any],
) -> list[dict[str, Any]]:
    if not candidates:
        return []
    timings = time_together(candidates, device, repeats=o.repeats)
    found = []
    for timing in timings:
        interval = timing.microseconds()
        share = sizes[timing.name] / (1e-6 * interval.value) / result["copy_bytes_per_second"]
        found.append({
            "width": width, "rows": timing.name, "microseconds": interval.value, "low": interval.low, "high": interval.high,
            "bytes": sizes[timing.name], "share_of_copy": share,
        })  # fmt: skip
    return found


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Every bar that was measured: what was seen, what was wanted, whether it holds."""
    look = {(r["width"], r["rows"]): r for r in result["lookups"]}
    move = {(r["width"], r["rows"]): r for r in result["updates"]}
    bars: list[dict[str, Any]] = []

    def bar(what: str, seen: float, least: float) -> None:
        bars.append({"bar": what, "seen": round(seen, 3), "least": least, "holds": seen >= least})

    for (width, kind), row in look.items():
        if kind == "bfloat16" and width >= 128:
            bar(f"bf16 lookup of width {width}, share of copy", row["share_of_copy"], 0.8)
        if kind in ("int8:row", "e4m3:row") and width == 256:
            bar(f"{kind} lookup of width 256, share of copy", row["share_of_copy"], 0.65)
        if kind != "F.embedding_bag" and (width, "F.embedding_bag") in look:
            bar(
                f"{kind} lookup of width {width} over F.embedding_bag",
                look[width, "F.embedding_bag"]["microseconds"] / row["microseconds"],
                2.0,
            )
        if kind in ("int8:row", "e4m3:row") and width in (128, 256) and (width, "bfloat16") in look:
            least = 1.25 if width == 128 else 1.5
            bar(
                f"{kind} lookup of width {width} over our bf16",
                look[width, "bfloat16"]["microseconds"] / row["microseconds"],
                least,
            )
    for (width, kind), row in move.items():
        if kind in ("int8:row", "e4m3:row:pow2") and (width, "float32") in move:
            bar(
                f"{kind} update of width {width} over float32",
                move[width, "float32"]["microseconds"] / row["microseconds"],
                1.0,
            )
    return bars


if __name__ == "__main__":
    raise SystemExit(main())
