"""Our kernels against their bars on one GPU: quantisers, fused norms, the GEMM, the fused layer, and training through it. About 200 seconds.

    PYTHONPATH=src python benchmarks/kernels_h200.py --out benchmarks/results/h200
    PYTHONPATH=src python benchmarks/kernels_h200.py --only quantize,training --out /tmp/records
    PYTHONPATH=src python benchmarks/kernels_h200.py --smoke --out /tmp/records      CPU, emulation, tiny shapes: does the script run?

Needs torch, triton, numpy and msgspec. Every number comes from loka.measure: conformance first (a wrong kernel is listed, not timed), then CUDA graphs on
rotated operands, interleaved with what it is compared with; bf16 is compiled for static shapes. Prints each bar with what was measured and writes one
KernelBench record per section. Exit 0: all bars met. 1: one was missed, or a kernel is wrong.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F

from loka.formats import QTensor, Spec, scale_from_amax
from loka.kernels import registry
from loka.kernels.fused_linear.call import NORMALIZED_SCALE, FusedCall, GradientCall
from loka.kernels.scaled_mm.call import MatmulCall
from loka.measure import bench, conformance, inputs
from loka.measure.adapter import ADAPTERS
from loka.measure.conformance import Conformance, worst_of
from loka.measure.device import peaks, snapshot
from loka.measure.fused import bf16_layer, compiled
from loka.measure.layer import GradientOperands, LayerOperands
from loka.measure.timing import Contender, sets_needed, time_together
from loka.records import save
from loka.records.performance import KernelBench, KernelRow, Peaks

STATIC, DELAYED = "e4m3:tensor:static", "e4m3:tensor:delayed"
QUANTIZE = [
    "e4m3:row", "e4m3:1x128", "e4m3:128x128", STATIC,
    "e4m3:1x128+e4m3:1x128", "e4m3:128x128+e4m3:128x128", f"{STATIC}+{STATIC}", "e4m3:row+e4m3:row", f"+{STATIC}", "+e4m3:row", "+e4m3:1x128",
]  # fmt: skip
MATMUL = ["e4m3:tensor@e4m3:tensor|fast", "e4m3:row@e4m3:row|fast", "e4m3:1x128@e4m3:128x128"]
LAYER = f"e4m3:tensor@e4m3:tensor>{STATIC}"
EAGER_ERROR = 0.02  # of bf16 gradients, relative L2: 8 mantissa bits three times over, with margin
FP8_ERROR = 0.12  # of FP8 gradients: 3 mantissa bits of dy, z, weights and activations


@dataclass(frozen=True)
class Plan:
    """Where, with which backend, on which shapes."""

    device: torch.device
    ours: str
    library: str
    repeats: int
    tensors: tuple[tuple[int, int, int], ...]
    layers: tuple[tuple[int, int, int], ...]
    training: tuple[tuple[int, int, int], ...]


H200 = Plan(
    torch.device("cuda"), "triton", "torch", 21,
    ((8192, 4096, 1), (32768, 1024, 1)),
    tuple((m, size, size) for size in (1024, 2048, 4096) for m in (2048, 8192)),
    ((8192, 1024, 1024), (8192, 2048, 2048), (8192, 4096, 4096)),
)  # fmt: skip
SMOKE = Plan(torch.device("cpu"), "reference", "reference", 3, ((64, 256, 1),), ((64, 128, 256),), ((64, 128, 256),))


@dataclass(frozen=True)
class Bar:
    """One bar on one shape. `limit` is a floor where higher is better, else a ceiling; `binding` False: reported, not required."""

    name: str
    call: str
    value: float
    limit: float
    higher: bool
    binding: bool = True

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.higher else self.value <= self.limit

    def __str__(self) -> str:
        verdict = ("met   " if self.met else "MISSED") if self.binding else "shown "
        return f"{verdict} {self.value:6.3f} ({'>=' if self.higher else '<='} {self.limit:g})  {self.name}: {self.call}"


def measured(plan: Plan, op: str, shapes, variants, backends, ceilings: Peaks) -> KernelBench:
    config = bench.BenchConfig(
        op=op, shapes=shapes, variants=variants, backends=backends, device=str(plan.device), repeats=plan.repeats,
        isolate=False, distributions=("normal",),
    )  # fmt: skip
    return bench.run(config, ceilings=ceilings)


def by_call(record: KernelBench) -> dict[str, dict[str, KernelRow]]:
    """Only what was timed."""
    table: dict[str, dict[str, KernelRow]] = {}
    for row in record.rows:
        if row.microseconds is not None:
            table.setdefault(row.call, {})[row.backend] = row
    return table


def us(row: KernelRow) -> float:
    assert row.microseconds is not None
    return row.microseconds.value


def run_quantize(plan: Plan, ceilings: Peaks) -> tuple[KernelBench, list[Bar]]:
    record = measured(plan, "quantize", plan.tensors, QUANTIZE, [plan.ours], ceilings)
    bars = []
    for call, rows in by_call(record).items():
        if plan.ours in rows:
            row = rows[plan.ours]
            # Against the bf16 copy of the same tensor, interleaved with it (4 bytes an element): a ceiling measured once, minutes apart, was seen to be
            # 30 % off. Row scales of a transpose need whole columns first: they are made of a second read.
            moved = (4 if "T e4m3:row" in call else 2) + (2 if " + T " in call else 1)
            share = moved / 4 * us(rows["bf16"]) / us(row)
            bars.append(Bar("quantise, share of copy bandwidth", call, share, 0.8, True))
    return record, bars


def run_norm_quantize(plan: Plan, ceilings: Peaks) -> tuple[KernelBench, list[Bar]]:
    record = measured(plan, "norm_quantize", plan.tensors, None, [plan.ours], ceilings)
    bars = [
        Bar("norm_quantize over the quantiser alone", call, us(rows[plan.ours]) / us(rows["quantize"]), 1.15, False)
        for call, rows in by_call(record).items()
        if plan.ours in rows and "quantize" in rows
    ]
    return record, bars


def run_scaled_mm(plan: Plan, ceilings: Peaks) -> tuple[KernelBench, list[Bar]]:
    record = measured(plan, "scaled_mm", plan.layers, MATMUL, sorted({plan.library, plan.ours}), ceilings)
    bars = []
    for call, rows in by_call(record).items():
        libraries = [us(row) for name, row in rows.items() if name not in (plan.ours, bench.BASELINE)]
        if plan.ours in rows and libraries:
            bars.append(Bar("scaled_mm over the best library", call, us(rows[plan.ours]) / min(libraries), 1.10, False))
    return record, bars


def run_fused_linear(plan: Plan, ceilings: Peaks) -> tuple[KernelBench, list[Bar]]:
    record = measured(plan, "fused_linear", plan.layers, [LAYER], [plan.ours], ceilings)
    bars = []
    for call, rows in by_call(record).items():
        if plan.ours not in rows:
            continue
        row = rows[plan.ours]
        bare = [us(other) for name, other in rows.items() if name.startswith("gemm ")]
        if bare:
            bars.append(Bar("fused layer over the best bare FP8 GEMM", call, us(row) / min(bare), 1.05, False))
        if row.speedup is not None:
            bars.append(Bar("fused layer, times faster than bf16", call, row.speedup.value, 1.8, True))
    return record, bars


@dataclass(frozen=True)
class Step:
    """Operands of one training step of a layer: FP8 activations as the layer before wrote them (both ways), bf16 weights, dy."""

    a: QTensor
    a_t: QTensor
    weight: torch.Tensor
    weight_scale: torch.Tensor
    dy: torch.Tensor
    out_scale: torch.Tensor
    dy_scale: torch.Tensor
    x: torch.Tensor  # the same activations in bf16, for the baseline; requires a gradient


def make_step(m: int, k: int, n: int, seed: int, device: torch.device) -> Step:
    spec = Spec.parse(STATIC)
    x = inputs.draw(m, k, seed=3 * seed, device=device)
    weight = (inputs.draw(n, k, seed=3 * seed + 1, device=device) * k**-0.5).to(torch.bfloat16)
    dy = inputs.draw(m, n, seed=3 * seed + 2, device=device, dtype=torch.bfloat16)
    a = inputs.quantized(x, spec)
    fit = scale_from_amax(weight.abs().max(), Spec.parse(DELAYED))
    static = torch.full((), NORMALIZED_SCALE, device=device)
    leaf = a.dequantize(torch.bfloat16).requires_grad_()
    # |g| <= a few times |dy| * rstd: the delayed scale of a step before, with the usual factor of two to spare
    delayed = torch.full((), 2.0**-5, device=device)
    a_t = QTensor(a.data.T.contiguous(), a.scale, spec)
    return Step(a, a_t, weight, fit, dy, static, delayed, leaf.detach().requires_grad_())


class FusedStep:
    """Forward and backward through the fused layer, weights quantised in the step."""

    def __init__(self, plan: Plan, *, exact_wgrad: bool) -> None:
        self.quantize: Any = registry.backend("quantize", plan.ours)
        self.layer: Any = registry.backend("fused_linear", plan.ours)
        self.gemm: Any = registry.backend("scaled_mm", plan.library)
        self.fast_wgrad = not exact_wgrad

    def weights(self, s: Step) -> tuple[QTensor, QTensor]:
        spec, scale = Spec.parse(DELAYED), s.weight_scale
        pair: tuple[QTensor, QTensor] = self.quantize.run(
            s.weight, spec, scale=scale, transpose=spec, transpose_scale=scale
        )
        return pair

    def __call__(self, s: Step) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
        w, w_t = self.weights(s)
        (m, k), n, spec = s.a.shape, s.weight.shape[0], Spec.parse(DELAYED)
        call = FusedCall(m, k, n, s.a.spec, w.spec, Spec.parse(STATIC), keep=True, transpose=True)
        kept = self.layer.run(s.a, w, call, out_scale=s.out_scale)
        g = self.layer.gradient(s.dy, kept.z, kept.rstd, GradientCall(m, n, spec, spec), scale=s.dy_scale)
        dx = self.gemm.run(g.g, w_t, out_dtype=torch.bfloat16, fast_accum=True)
        dw = self.gemm.run(g.g_t, s.a_t, out_dtype=torch.bfloat16, fast_accum=self.fast_wgrad)
        return kept, g, dx, dw

    def check(self, s: Step) -> Conformance:
        """Each kernel of the step against its law on the operands it meets here, then the gradients against float64 autograd."""
        (m, k), n = s.a.shape, s.weight.shape[0]
        w, w_t = self.weights(s)
        adapter: Any = ADAPTERS["fused_linear"]
        call = FusedCall(m, k, n, s.a.spec, w.spec, Spec.parse(STATIC), keep=True, transpose=True)
        layer = adapter.check(self.layer, call, LayerOperands(s.a, w, None, s.out_scale, s.x, s.weight))
        kept, g, dx, dw = self(s)
        back = GradientCall(m, n, Spec.parse(DELAYED), Spec.parse(DELAYED))
        gradient = adapter.check(self.layer, back, GradientOperands(s.dy, kept.z, kept.rstd, s.dy_scale, s.dy))
        gemms = [
            conformance.check_scaled_mm(self.gemm, MatmulCall.of(p, q, out_dtype=torch.bfloat16, fast_accum=fast), p, q)
            for p, q, fast in ((g.g, w_t, True), (g.g_t, s.a_t, self.fast_wgrad))
        ]
        whole = against_autograd(s, block_layer, (dx, dw), FP8_ERROR)
        return worst_of([layer, gradient, *gemms, whole])


def block_layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    p = x @ w.T
    return F.hardswish(torch.cat([F.rms_norm(part, part.shape[1:], eps=1e-6) for part in p.split(256, 1)], 1))


def against_autograd(s: Step, layer: Callable[..., torch.Tensor], found, allowed: float) -> Conformance:
    """Relative L2 error of dx and dw against autograd in float64."""
    x, w = s.x.detach().double().requires_grad_(), s.weight.double().requires_grad_()
    exact = torch.autograd.grad(layer(x, w), (x, w), s.dy.double())
    errors = [float((f.double() - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)]
    if max(errors) <= allowed:
        return Conformance(True, max(errors), allowed)
    return Conformance(False, max(errors), allowed, f"dx, dw are {errors} from float64 autograd, allowed {allowed}")


def bf16_step(device: torch.device) -> Callable[[Step], tuple[torch.Tensor, ...]]:
    """Compiled linear + RMSNorm + SiLU, forward and backward."""
    layer = compiled(bf16_layer, device)

    def step(s: Step) -> tuple[torch.Tensor, ...]:
        w = s.weight.detach().requires_grad_()
        return torch.autograd.grad(layer(s.x, w), (s.x, w), s.dy)

    return step


def run_training(plan: Plan, ceilings: Peaks) -> tuple[KernelBench, list[Bar]]:
    rows, bars, method = [], [], ""
    for m, k, n in plan.training:
        shape = {"m": m, "k": k, "n": n}
        call = f"{m}x{k}x{n} forward + backward, {DELAYED} gradients and weights"
        if plan.device.type == "cuda":
            torch.compiler.reset()
        count = sets_needed(3 * m * k + 4 * m * n + 3 * n * k, plan.device)
        steps = [make_step(m, k, n, seed, plan.device) for seed in range(count)]
        baseline = bf16_step(plan.device)
        ways: dict[str, tuple[Callable[[Step], Any], Conformance]] = {
            bench.BASELINE: (baseline, against_autograd(steps[0], bf16_layer, baseline(steps[0]), EAGER_ERROR))
        }
        for name, exact in ((plan.ours, False), (f"{plan.ours}, exact wgrad", True)):
            step = FusedStep(plan, exact_wgrad=exact)
            ways[name] = step, step.check(steps[0])
        green = {name: way for name, way in ways.items() if way[1]}
        candidates = [
            Contender(name, [lambda s=s, run=run: run(s) for s in steps], verdict)
            for name, (run, verdict) in green.items()
        ]
        timings = {t.name: t for t in time_together(candidates, plan.device, repeats=plan.repeats)}
        base = timings.get(bench.BASELINE)
        for name, (_, verdict) in ways.items():
            timing = timings.get(name)
            method = timing.method if timing else method
            speedup = timing.speedup_over(base) if timing and base and timing is not base else None
            rows.append(
                KernelRow(
                    op="fused_linear", call=call, shape=shape, backend=name, refusal=verdict.reason or None,
                    error=verdict.error if verdict.error < float("inf") else None, tolerance=verdict.tolerance,
                    microseconds=timing.microseconds() if timing else None, speedup=speedup, buffers=count,
                )
            )  # fmt: skip
        fast = next((row for row in rows if row.call == call and row.backend == plan.ours), None)
        if fast is not None and fast.speedup is not None:
            large = min(k, n) >= 2048
            bars.append(Bar("training, times faster than bf16", call, fast.speedup.value, 1.5, True, binding=large))
    return KernelBench(method=method or "nothing was timed", peaks=ceilings, rows=rows, environment=snapshot()), bars


SECTIONS = {
    "quantize": run_quantize,
    "norm_quantize": run_norm_quantize,
    "scaled_mm": run_scaled_mm,
    "fused_linear": run_fused_linear,
    "training": run_training,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"comma-separated: {', '.join(SECTIONS)}")
    parser.add_argument("--smoke", action="store_true", help="CPU, emulation, tiny shapes")
    options = parser.parse_args()
    chosen = options.only.split(",")
    unknown = [name for name in chosen if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    plan = SMOKE if options.smoke else H200
    if plan.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no usable GPU; hint: --smoke")
    ceilings = peaks(plan.device)
    print(f"copy {ceilings.copy_bytes_per_second / 1e12:.2f} TB/s", file=sys.stderr)
    every: list[Bar] = []
    red = False
    for name in chosen:
        begin = time.monotonic()
        record, bars = SECTIONS[name](plan, ceilings)
        record = msgspec.structs.replace(record, notes=[*record.notes, *map(str, bars)])
        save(record, options.out / f"{'fused_linear_' if name == 'training' else ''}{name}.json")
        red |= any(row.red for row in record.rows)
        every += bars
        print(f"== {name}, {time.monotonic() - begin:.0f} s")
        print(bench.table(record), *bars, sep="\n", flush=True)
    missed = [bar for bar in every if bar.binding and not bar.met]
    print(f"== {len(every)} bars measured, {len(missed)} missed", *missed, sep="\n")
    return 1 if missed or red else 0


if __name__ == "__main__":
    sys.exit(main())
