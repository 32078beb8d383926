"""SiLU attention on one GPU: every tile of its four kernels, proved right and then timed. The fastest ones belong into `kernels/attention/triton_launch.py`.

    PYTHONPATH=src python benchmarks/attention_h200.py --seconds 60 --out attention.json
    PYTHONPATH=src TRITON_INTERPRET=1 python benchmarks/attention_h200.py --smoke --out attention.json       CPU, tiny: does it run?

Two cases, 8 heads of 128, bf16, both biases: `short`, HSTU's 256 rows of 64 to 320 positions, and `long`, 16 rows of 410 to 2048. (1) Every tile runs in a process
of its own, several at a time, against the float64 reference on ragged rows with the case's constants, which also fills Triton's cache. (2) What is green is
timed with CUDA graphs at the case's size, the summing of partial gradients included. A tile that fails says why and stops nothing; what does not fit
into the time is named. The record is rewritten after every row.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loka.kernels.attention import reference, triton_launch
from loka.kernels.attention.triton_launch import Problem, Tile
from loka.measure.device import snapshot
from loka.records import write_atomically

ERROR = 1e-2  # relative L2 against float64: weights and their gradients are rounded to bf16 between two products, 1.7e-3 each
TILES: dict[str, list[Tile]] = {
    "forward": [Tile(64, 64), Tile(64, 32, registers=168), Tile(64, 32, stages=3), Tile(64, 32)],
    "backward_kv": [Tile(64, 64, 8), Tile(32, 64), Tile(32, 64, stages=3), Tile(32, 128, 8, 3), Tile(64, 128, 8), Tile(64, 128, 8, 3)],
    "backward_q": [Tile(64, 64, stages=3), Tile(64, 32, stages=4), Tile(128, 64, 8, 3), Tile(64, 64, 8, 3)],
    "backward_biases": [Tile(32, 16, 1), Tile(32, 32, 1), Tile(32, 8, 1), Tile(64, 16, 2)],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """lengths: what is timed; checked: what is proved, with the same compile-time constants."""

    name: str
    lengths: tuple[int, ...]
    checked: tuple[int, ...]
    max_length: int
    heads: int
    d: int
    buckets: int
    gap: int  # seconds between two events, on average


def spread(rows: int, max_length: int) -> tuple[int, ...]:
    """From a fifth of the greatest length to all of it, in pairs that add up: `draw_histories` of fp8_models_cases."""
    low = max_length // 5
    half = torch.randint(low, max_length + 1, (rows // 2,), generator=torch.Generator().manual_seed(0)).tolist()
    return (*half, *(low + max_length - n for n in half))


CASES = {
    "short": Case("short", spread(256, 320), (320, 0, 1, 77, 64, 191), 320, 8, 128, 64, 20),
    "long": Case("long", spread(16, 2048), (2048, 65, 1300), 2048, 8, 128, 64, 3000),
}
SMOKE = {"short": Case("short", (33, 5), (20, 0, 1), 40, 2, 16, 24, 20)}


def draw(case: Case, lengths: tuple[int, ...], device: str, dtype: torch.dtype) -> tuple[Problem, Tensor]:
    """Operands as HSTU passes them: slices of one projection, biases that all heads share. And a gradient of the output."""
    g = torch.Generator().manual_seed(1)
    total, wide = sum(lengths), case.heads * case.d
    projected = (torch.randn(total, 3 * wide, generator=g) * 0.5).to(device, dtype)
    v, q, k = (t.view(total, case.heads, case.d) for t in projected.split(wide, 1))
    biases = [(torch.randn(1, n, generator=g) * 0.1).to(device) for n in (case.max_length, case.buckets)]
    times = torch.randint(0, 2 * case.gap, (total,), generator=g).cumsum(0)
    asked = times + torch.randint(0, 2 * case.gap, (total,), generator=g)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device)
    grad = torch.randn(total, case.heads, case.d, generator=g).to(device, dtype)
    where = (times.to(device), asked.to(device))
    return Problem(q, k, v, offsets, *where, *biases, case.max_length, float(case.max_length), case.d**-0.5), grad


def law(problem: Problem, grad: Tensor) -> dict[str, Tensor]:
    """What the three kernels compute, in float64."""
    operands = (problem.q, problem.k, problem.v, problem.position_bias, problem.time_bias)
    leaves = [t.double().requires_grad_() for t in operands if t is not None]
    out = reference.run(
        *leaves[:3], problem.offsets, max_length=problem.max_length, position_bias=leaves[3], time_bias=leaves[4],
        times=problem.times, query_times=problem.asked, divisor=problem.divisor, alpha=problem.alpha,
    )  # fmt: skip
    names = ("dq", "dk", "dv", "dposition", "dtime")
    return {"out": out.detach(), **dict(zip(names, torch.autograd.grad((out * grad).sum(), leaves), strict=True))}


def compute(kernel: str, problem: Problem, grad: Tensor, tile: Tile, ds: Tensor | None = None) -> dict[str, Tensor]:
    """What a kernel writes. ds: gradients of scores, which two of them read."""
    if kernel == "forward":
        return {"out": triton_launch.run_forward(problem, tile)}
    like = {name: torch.empty_like(t, memory_format=torch.contiguous_format) for name, t in (("dq", problem.q), ("dk", problem.k), ("dv", problem.v))}  # fmt: skip
    if kernel == "backward_kv":
        triton_launch.run_backward_kv(problem, grad, like["dk"], like["dv"], tile)
        return {name: like[name] for name in ("dk", "dv")}
    ds = score_gradients(problem, grad) if ds is None else ds
    if kernel == "backward_q":
        triton_launch.run_backward_q(problem, ds, like["dq"], tile)
        return {"dq": like["dq"]}
    return dict(zip(("dposition", "dtime"), triton_launch.run_backward_biases(problem, ds, tile), strict=True))


def score_gradients(problem: Problem, grad: Tensor) -> Tensor:
    """ds, by the tile that is launched."""
    made = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (problem.k, problem.v)]
    return triton_launch.run_backward_kv(problem, grad, *made, triton_launch.choose("backward_kv", problem.q, problem.v, problem.max_length))  # fmt: skip


def check(case: Case, kernel: str, tile: Tile, device: str) -> dict[str, Any]:
    """Errors against the law, and whether a second run gives the same bits. Runs in a child: a crash is a reason."""
    torch.set_num_threads(1)
    try:
        small = replace(case, heads=2)  # float64 scores of every process share one GPU
        problem, grad = draw(small, case.checked, device, torch.bfloat16 if device == "cuda" else torch.float32)
        expected = law(problem, grad)
        ours, again = (compute(kernel, problem, grad, tile) for _ in range(2))
        errors = {name: float((ours[name].double() - expected[name]).norm() / expected[name].norm()) for name in ours}
        wrong = [f"{name} {error:.1e}" for name, error in errors.items() if not error < ERROR]
        same = all(torch.equal(ours[name], again[name]) for name in ours)
        return {"why": f"wrong: {', '.join(wrong)}" if wrong else "", "errors": errors, "same bits": same}
    except Exception as e:
        return {"why": f"{type(e).__name__}: {str(e)[:300]}"}


def check_all(jobs: list[tuple[Case, str, Tile]], device: str, until: float) -> list[dict[str, Any]]:
    """Every job in one of several processes; a job that is late, or whose process died, is red."""
    if device != "cuda":
        return [check(*job, device) for job in jobs]
    verdicts: list[dict[str, Any]] = [{"why": "not checked: out of time"} for _ in jobs]
    workers = max(1, min(12, len(os.sched_getaffinity(0)) - 2))
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    waiting = {pool.submit(check, *job, device): at for at, job in enumerate(jobs)}
    try:
        for future in as_completed(waiting, timeout=max(1.0, until - time.monotonic())):
            verdicts[waiting[future]] = future.result()
    except (TimeoutError, BrokenProcessPool) as e:
        print(f"checks stopped: {type(e).__name__}", flush=True)
    pool.shutdown(wait=False, cancel_futures=True)
    return verdicts


def time_call(call: Callable[[], Any], device: str) -> tuple[float, float]:
    """Median and fastest microseconds of a call."""
    call()
    if device != "cuda":
        start = time.perf_counter()
        call()
        return ((time.perf_counter() - start) * 1e6,) * 2
    torch.cuda.synchronize()
    calls, repeats = 4, 15
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    spans = [1e3 * a.elapsed_time(b) / calls for a, b in pairwise(events)]
    return statistics.median(spans), min(spans)


def name_of(tile: Tile) -> str:
    return f"{tile.queries}x{tile.keys} warps {tile.warps} stages {tile.stages} registers {tile.registers or 'all'}"


class Record:
    """Rows so far; every change reaches the file at once."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.body: dict[str, Any] = {"environment": asdict_of(snapshot()), "rows": [], "best": {}, "notes": []}

    def add(self, row: dict[str, Any]) -> None:
        self.body["rows"].append(row)
        print(f"{row['case']:6} {row['kernel']:12} {row['name']:45} {row.get('us', row.get('why'))}", flush=True)
        self.write()

    def write(self) -> None:
        write_atomically(self.out, json.dumps(self.body, indent=1).encode())


def asdict_of(environment: Any) -> dict[str, Any]:
    return {name: getattr(environment, name) for name in ("date", "commit", "torch", "triton", "device", "driver")}


def measure(record: Record, cases: dict[str, Case], tiles: dict[str, list[Tile]], device: str, end: float) -> None:
    jobs = [(case, kernel, tile) for case in cases.values() for kernel, some in tiles.items() for tile in some]
    verdicts = check_all(jobs, device, end - 12)
    drawn = {
        c.name: draw(c, c.lengths, device, torch.bfloat16 if device == "cuda" else torch.float32)
        for c in cases.values()
    }
    kept = {name: score_gradients(*operands) for name, operands in drawn.items()}
    for (case, kernel, tile), verdict in zip(jobs, verdicts, strict=True):
        row = {"case": case.name, "kernel": kernel, "name": name_of(tile), "tile": asdict(tile), **verdict}
        if not verdict["why"] and time.monotonic() > end:
            row["why"] = "not timed: out of time"
        if not row["why"]:
            try:
                problem, grad = drawn[case.name]
                run = lambda k=kernel, p=problem, g=grad, t=tile, d=kept[case.name]: compute(k, p, g, t, d)  # noqa: E731
                row["us"], row["fastest us"] = (round(x, 1) for x in time_call(run, device))
            except Exception as e:
                row["why"] = f"{type(e).__name__}: {str(e)[:300]}"
        record.add(row)


def choose(record: Record) -> bool:
    """The fastest tile of every case and kernel. Returns whether each has one."""
    wanted = {(r["case"], r["kernel"]) for r in record.body["rows"]}
    for case, kernel in sorted(wanted):
        rows = [r for r in record.body["rows"] if (r["case"], r["kernel"]) == (case, kernel) and "us" in r]
        if rows:
            best = min(rows, key=lambda r: r["us"])
            record.body["best"][f"{case} {kernel}"] = {
                "tile": best["tile"],
                "us": best["us"],
                "same bits": best["same bits"],
            }
            print(f"best {case} {kernel}: {best['name']}, {best['us']} us", flush=True)
    record.write()
    return len(record.body["best"]) == len(wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU, in Triton's interpreter")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    if not args.smoke and not torch.cuda.is_available():
        parser.error("no CUDA GPU here; --smoke walks through everything in Triton's interpreter")
    tiny = {name: [Tile(16, 16), Tile(32, 16)] for name in TILES}
    record = Record(args.out)
    measure(record, *((SMOKE, tiny, "cpu") if args.smoke else (CASES, TILES, "cuda")), end)
    return 0 if choose(record) else 1


if __name__ == "__main__":
    sys.exit(main())
