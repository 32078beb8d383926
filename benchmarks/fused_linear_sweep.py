"""fused_linear and its dgrad on a GPU: right first, then every launch worth trying over random shapes, beside the bare FP8 GEMM.

    PYTHONPATH=src python benchmarks/fused_linear_sweep.py --out DIR --shapes 40 --seed 0 --seconds 100

Needs torch and triton alone. Three parts, each in its own time:

    1. children compile all launches at once (Triton compiles on one core; its cache is on disk) and check their share of the cases against float64
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from loka.formats import QTensor, Spec, quantize
from loka.kernels.fused_linear import (
    DgradCall,
    FusedCall,
    Launch,
    choose_launch,
    fused_linear,
    fused_linear_dgrad,
    properties_of,
)
from loka.kernels.fused_linear.launch import predicted_time, problems, work_of

TENSOR, STATIC = Spec.parse("e4m3:tensor"), Spec.parse("e4m3:tensor:static")
FORMS = {
    "relu": {"norm_block": 0, "activation": "relu", "bias": True},
    "norm": {"norm_block": 256, "activation": "hard_swish", "bias": False},
    "train relu": {"norm_block": 0, "activation": "relu", "bias": True, "keep": True, "transpose": True, "amax": True},
    "train gelu": {"norm_block": 0, "activation": "gelu", "bias": True, "keep": True, "transpose": True, "amax": True},
    "train norm": {"norm_block": 256, "activation": "hard_swish", "bias": False, "keep": True, "transpose": True},
    "dgrad relu": {"activation": "relu", "bias": True, "amax": True},
    "dgrad gelu": {"activation": "gelu", "bias": True, "amax": True},
}
FEW = ("train relu", "train gelu", "train norm", "dgrad relu", "dgrad gelu")  # on every fourth shape
EXTRAS = [
    Launch(128, 256, 128, 8, 3),
    Launch(128, 256, 128, 8, 4, 4),
    Launch(128, 256, 128, 8, 4, 16),
    Launch(64, 128, 128, 4, 4),
]
SPLIT = ("relu", "norm", "train relu")  # forms whose launches are tried with a cut K too
L2_BYTES = 120 * 2**20


def call_of(form: str, m: int, k: int, n: int) -> FusedCall | DgradCall:
    options = FORMS[form]
    if form.startswith("dgrad"):
        kept = "y" if options["activation"] == "relu" else "scaled"
        return DgradCall(m, k, n, TENSOR, TENSOR, STATIC, options["activation"], kept, True, True)
    flags = [options.get(name, False) for name in ("bias", "keep", "transpose", "amax")]
    return FusedCall(m, k, n, TENSOR, TENSOR, STATIC, options["norm_block"], options["activation"], *flags)


def launches_for(form: str, m: int, k: int, n: int, device: torch.device, splits: int) -> list[Launch]:
    """Every unsplit candidate, the extras that fit, and the splits the model likes best."""
    call, properties = call_of(form, m, k, n), properties_of(device)
    ranked = choose_launch(call, properties)
    whole = [launch for launch in ranked if launch.split == 1]
    whole += [launch for launch in EXTRAS if not problems(launch, work_of(call), properties)]
    if "gelu" in form:  # slow to compile
        whole = [launch for launch in whole if launch.bm * launch.bn >= 16384]
    splits = splits if form in SPLIT else 0
    return list(dict.fromkeys([*whole, *[launch for launch in ranked if launch.split > 1][:splits]]))


@dataclass
class Operands:
    """One set for a layer, and for the step back through it."""

    a: QTensor
    b: QTensor
    bias: Tensor
    scale: Tensor
    amax: Tensor
    z: QTensor | None = None

    @classmethod
    def make(cls, form: str, m: int, k: int, n: int, device: torch.device, seed: int) -> "Operands":
        maker = torch.Generator(device=device).manual_seed(seed)
        a = torch.randn(m, k, device=device, generator=maker)
        b = torch.randn(n, k, device=device, generator=maker) / math.sqrt(k)
        bias = 0.5 * torch.randn(n, device=device, generator=maker)
        z = torch.randn(m, n, device=device, generator=maker) if form.startswith("dgrad") else None
        one = torch.full((), 2.0**-6, device=device)
        kept = None if z is None else quantize(torch.relu(z) if "relu" in form else z, STATIC, scale=one)
        scale = torch.full((), 1 / 16 if "norm" in form else 2.0**-6, device=device)
        return cls(quantize(a, TENSOR), quantize(b, TENSOR), bias, scale, torch.zeros((), device=device), kept)

    def run(self, form: str, launch: Launch | None, backend: str = "triton"):
        options = dict(FORMS[form])
        amax = self.amax if options.pop("amax", False) else None
        if form.startswith("dgrad"):
            return fused_linear_dgrad(
                self.a,
                self.b,
                self.z,
                spec=STATIC,
                scale=self.scale,
                amax=amax,
                launch=launch,
                backend=backend,
                **options,
            )
        bias = self.bias if options.pop("bias") else None
        return fused_linear(
            self.a,
            self.b,
            out=STATIC,
            out_scale=self.scale,
            bias=bias,
            amax=amax,
            launch=launch,
            backend=backend,
            **options,
        )


def poison(o: Operands) -> None:
    """A row of NaN, a column of Inf and one far beyond the scale: they stay what they are, or saturate, and nothing else changes."""
    data = o.a.data.float()
    data[5] = math.nan
    o.a = QTensor(data.to(o.a.data.dtype), o.a.scale, o.a.spec)
    o.bias[3], o.bias[7] = math.inf, 1e6


def compare(form: str, shape: tuple[int, int, int], launch: Launch, device: torch.device, special: bool = False) -> str:
    """What is wrong with a result, against the reference in float32 on the same operands; "" where nothing is."""
    o = Operands.make(form, *shape, device, 1)
    if special:
        poison(o)
    law_amax = torch.zeros((), device=device)
    found = o.run(form, launch)
    ours, o.amax = o.amax, law_amax
    law = o.run(form, None, "reference")
    for name in ("y", "y_t", "z", "g", "g_t"):
        left, right = getattr(found, name, None), getattr(law, name, None)
        if right is None:
            continue
        mine, theirs = left.dequantize(), right.dequantize()
        if not torch.equal(mine.isnan(), theirs.isnan()) or bool(theirs.isnan().any()) != special:
            return f"{name}: {int(mine.isnan().sum())} NaN, {int(theirs.isnan().sum())} expected"
        mine, theirs = mine.nan_to_num(), theirs.nan_to_num()
        # A code away, and what tensor cores lose of a sum, which counts where the sum is near zero.
        far = (mine - theirs).abs() > 0.13 * theirs.abs() + 0.02 * theirs.square().mean().sqrt()
        error = float((mine - theirs).norm() / theirs.norm())
        if not error < 0.02 or int(far.sum()) > 1e-5 * far.numel():
            return (
                f"{name}: relative error {error:.4f}, {int(far.sum())} of {far.numel()} elements more than a code away"
            )
    if (
        not special
        and getattr(law, "bias", None) is not None
        and not float((found.bias - law.bias).norm() / law.bias.norm()) < 0.02
    ):
        return "bias gradient"
    if FORMS[form].get("amax") and not abs(float(ours) / float(law_amax) - 1) < 0.02:
        return f"amax {float(ours)} against {float(law_amax)}"
    return ""


def checks(device: torch.device) -> Iterator[tuple[str, tuple[int, int, int], Launch]]:
    """Every launch of the sweep on the sizes of a real layer, and odd shapes. Compiled here, so that the sweep compiles nothing."""
    large, few, odd = (2560, 4096, 1536), (64, 4096, 1024), (205, 1000, 301)
    for form in FORMS:
        for launch in launches_for(form, *large, device, 0):
            yield form, large, launch
        yield form, odd, choose_launch(call_of(form, *odd), properties_of(device))[0]
        if form in SPLIT:
            yield from split_checks(form, few, large, device)


def split_checks(
    form: str, few: tuple[int, int, int], large: tuple[int, int, int], device: torch.device
) -> Iterator[tuple]:
    """Every tile that is split, and every way to finish one."""
    seen: dict[tuple[int, ...], tuple] = {}
    for shape in (few, large):
        for launch in choose_launch(call_of(form, *shape), properties_of(device)):
            if launch.split > 1:
                seen.setdefault(tuple(launch.numbers[:7]), (form, shape, launch))
                seen.setdefault((launch.bn, launch.split), (form, shape, launch))
    yield from dict.fromkeys(seen.values())


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
        bare = bare or bare_times(repeated)
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
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "command": " ".join(sys.argv), "seconds": time.monotonic() - started,
        "checks": results, "rows": [vars(row) for row in rows],
    }  # fmt: skip
    (options.out / f"{options.name}.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
