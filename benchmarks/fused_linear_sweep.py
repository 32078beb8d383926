"""fused_linear and its dgrad on a GPU: right first, then every launch worth trying over random shapes, beside the bare FP8 GEMM.

    PYTHONPATH=src python benchmarks/fused_linear_sweep.py --out DIR --shapes 40 --seed 1 --named --seconds 55

Needs torch and triton alone. Three parts, each in its own time:

    1. children compile all launches at once (Triton compiles on one core; its cache is on disk) and check their share of the cases against the reference
    2. every shape, every form, every launch: CUDA graphs over operands that rotate beyond the L2 cache, median of replays
    3. a table: best and chosen launch over the best bare FP8 GEMM, and the worst of them

Shapes: M 64 to 32768 (even in its logarithm), K and N 256 to 8192 in steps of 16.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from evidence import describe_run
from fused_linear_cases import FORMS, Operands, call_of, checks, compare, launches_for

from loka.kernels.fused_linear import Launch, choose_launch, properties_of
from loka.kernels.fused_linear.launch import predicted_time, work_of

FEW = ("relu padded", "train relu", "train gelu", "train norm", "dgrad relu", "dgrad gelu")  # on every fourth shape
L2_BYTES = 120 * 2**20


def child(index: int, count: int, device: torch.device) -> None:
    for place, (form, shape, launch) in enumerate(checks(device)):
        if place % count == index:
            try:
                wrong = compare(form, shape, launch, device)
                if launch.bm * launch.bn == 32768 and not wrong:
                    wrong = compare(form, shape, launch, device, special=True)
            except Exception as error:
                wrong = f"{type(error).__name__}: {str(error)[:300]}"
            print(json.dumps({"form": form, "shape": shape, "launch": str(launch), "wrong": wrong}), flush=True)


def check_all(children: int, limit: float) -> list[dict]:
    command = [sys.executable, __file__, "--child"]
    running = [subprocess.Popen([*command, f"{i}/{children}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for i in range(children)]  # fmt: skip
    results, until = [], time.monotonic() + limit
    for process in running:
        try:
            output, _ = process.communicate(timeout=max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            results.append({"form": "", "shape": (), "launch": "", "wrong": "a child ran out of time"})
        results += [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return results


def graph_time(thunks: list[Callable[[], object]], budget_us: float = 4000.0) -> float:
    """Microseconds a call: a CUDA graph over all operand sets, replayed; the median."""
    for thunk in thunks[:2]:
        thunk()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for thunk in thunks:
            thunk()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times: list[float] = []
    graph.replay()
    while len(times) < 3 or (sum(times) * 1000 < budget_us and len(times) < 15):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) * 1000 / len(thunks)


@dataclass
class Row:
    form: str
    m: int
    k: int
    n: int
    bare: dict[str, float]
    launches: list[dict] = field(default_factory=list)


def bare_times(sets: list[Operands]) -> dict[str, float]:
    def torch_tensor(o: Operands):
        return lambda: torch._scaled_mm(
            o.a.data, o.b.data.T, o.a.scale, o.b.scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def torch_row(o: Operands):
        sa, sb = o.a.scale.expand(o.a.shape[0], 1).contiguous(), o.b.scale.expand(1, o.b.shape[0]).contiguous()
        return lambda: torch._scaled_mm(o.a.data, o.b.data.T, sa, sb, out_dtype=torch.bfloat16, use_fast_accum=True)

    return {"tensor": graph_time([torch_tensor(o) for o in sets]), "row": graph_time([torch_row(o) for o in sets])}


NAMED = [
    (3072, 1280, 1792),
    (6144, 2560, 3072),
    (4096, 5120, 1536),
    (12288, 768, 2304),
    (1536, 3584, 4096),
    (10000, 2048, 2560),
]


def random_shapes(count: int, seed: int) -> list[tuple[int, int, int]]:
    draw = random.Random(seed)
    return [
        (
            max(64, int(2 ** draw.uniform(6, 15)) // 16 * 16),
            256 + 16 * draw.randrange((8192 - 256) // 16 + 1),
            256 + 16 * draw.randrange((8192 - 256) // 16 + 1),
        )
        for _ in range(count)
    ]


def measure(
    shape: tuple[int, int, int], forms: list[str], device: torch.device, splits: int, chosen_only: bool
) -> list[Row]:
    m, k, n = shape
    copies = max(1, min(16, math.ceil(L2_BYTES / (m * k + n * k + m * n))))
    rows, bare = [], None
    for form in forms:
        sets = [Operands.make(form, m, k, n, device, seed) for seed in range(copies)]
        repeated = sets * max(1, 8 // copies)
        bare = bare or bare_times(repeated)  # of the first form, whose operands have no gaps
        row = Row(form, m, k, n, bare)
        call = call_of(form, m, k, n)
        tried = launches_for(form, m, k, n, device, splits)
        chosen = next(launch for launch in choose_launch(call, properties_of(device)) if launch in tried)
        for launch in [chosen] if chosen_only else tried:
            try:
                time_us = graph_time([partial(o.run, form, launch) for o in repeated])
            except Exception as error:
                time_us = math.nan
                print(f"{form} {shape} {launch}: {type(error).__name__} {str(error)[:200]}")
            predicted = predicted_time(launch, work_of(call), properties_of(device))
            row.launches.append(
                {"launch": launch.numbers, "us": time_us, "predicted": predicted, "chosen": launch == chosen}
            )
        rows.append(row)
        del sets, repeated
    return rows


def table(rows: list[Row]) -> str:
    lines, ratios = [], {}
    for row in rows:
        best_bare = min(row.bare.values())
        valid = [x for x in row.launches if x["us"] == x["us"]]
        best = min(valid, key=lambda x: x["us"])
        chosen = next((x for x in row.launches if x["chosen"]), best)
        ratios.setdefault(row.form, []).append((chosen["us"] / best_bare, best["us"] / best_bare))
        lines.append(f"{row.form:10} {row.m:6}x{row.k:5}x{row.n:5} bare {best_bare:8.1f} best {best['us']:8.1f} {best['us'] / best_bare:5.2f} {Launch(*best['launch'])!s:48} chosen {chosen['us'] / best_bare:5.2f} {Launch(*chosen['launch'])}")  # fmt: skip
    for form, pairs in ratios.items():
        for name, values in (("chosen", [p[0] for p in pairs]), ("best", [p[1] for p in pairs])):
            mean = math.exp(statistics.fmean(map(math.log, values)))
            lines.append(
                f"{form:10} {name:6} over {len(values)} shapes: geometric mean {mean:.3f}, worst {max(values):.3f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--name", default="fused_linear_sweep")
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--check-seconds", type=float, default=60.0)
    parser.add_argument("--children", type=int, default=14)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--chosen-only", action="store_true")
    parser.add_argument("--named", action="store_true", help="also shapes that one fixed tile was seen to be slow at")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device("cuda")
    if options.child:
        child(*map(int, options.child.split("/")), device)
        return
    started = time.monotonic()
    results = check_all(options.children, options.check_seconds)
    wrong = [result for result in results if result["wrong"]]
    print(f"{len(results)} checks, {len(wrong)} wrong, {time.monotonic() - started:.0f} s", flush=True)
    for result in wrong:
        print("WRONG", result)
    started, rows = time.monotonic(), []
    forms = options.forms.split(",")
    shapes = random_shapes(options.shapes, options.seed)
    for index, shape in enumerate([*shapes, *(NAMED if options.named else [])]):
        if time.monotonic() - started > options.seconds:
            print(f"out of time after {index} shapes")
            break
        here = (
            [form for form in forms if form not in FEW or index % 4 == 0] if index < len(shapes) else ["relu", "norm"]
        )
        rows += measure(shape, here, device, options.splits, options.chosen_only)
        torch.cuda.empty_cache()
    print(table(rows[: len(rows) - 2 * len(NAMED)] if options.named and len(rows) > 2 * len(NAMED) else rows))
    if options.named:
        print(table(rows[-2 * len(NAMED) :]))
    record = {
        "environment": describe_run("cuda"), "device": torch.cuda.get_device_name(), "torch": torch.__version__, "command": " ".join(sys.argv), "seconds": time.monotonic() - started,
        "checks": results, "rows": [vars(row) for row in rows],
    }  # fmt: skip
    (options.out / f"{options.name}.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
