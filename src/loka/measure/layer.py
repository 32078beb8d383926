"""Benchmark adapter of fused_linear: the layer for inference and training, and its gradient. Rival: the bare FP8 GEMM.

    e4m3:tensor@e4m3:tensor>e4m3:tensor:static                  inference; BlockNorm-256 and hard swish by default
    e4m3:tensor@e4m3:tensor>e4m3:tensor:static|keep|transpose   training; options: an activation, nonorm, bias, amax
    gradient>e4m3:tensor:delayed+e4m3:tensor:delayed            from dy to the quantized gradient and its transpose
    dgrad e4m3:tensor@e4m3:tensor>e4m3:tensor:delayed|relu      from a layer's gradient to that of the layer before it

Compared with float64 (`rounding`), not with the float32 reference: a tensor core sum may differ from that by more than
half an FP8 step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import QTensor, Spec, quantize, scale_from_amax
from loka.kernels import registry
from loka.kernels.activation import activate
from loka.kernels.dropout import Dropout
from loka.kernels.fused_linear.call import (
    NORM_BLOCK,
    NORM_EPS,
    NORMALIZED,
    NORMALIZED_SCALE,
    DgradCall,
    FusedCall,
    GradientCall,
    GradientResult,
    Kept,
    kept_form,
)
from loka.kernels.scaled_mm.call import MatmulCall
from loka.measure import conformance, inputs
from loka.measure.conformance import Conformance, Law, worst_of
from loka.measure.fused import (
    FLOAT32,
    STEEPEST,
    bf16_gradient,
    bf16_layer,
    block_norm,
    compiled,
    draw_dropout,
    dropped_share,
    judge_twice,
    option,
    split_variant,
)
from loka.measure.inputs import Shape
from loka.measure.layer_check import LayerOperands, check_layer, layer_law, run_layer
from loka.measure.layer_dgrad import (
    DgradOperands,
    bf16_dgrad,
    check_bf16_dgrad,
    check_dgrad,
    dgrad_law,
    draw_dgrad,
    run_dgrad,
)
from loka.measure.op import DTYPES, Op
from loka.measure.rounding import judge_rounded
from loka.measure.timing import Rival, Thunk


@dataclass(frozen=True)
class GradientOperands:
    """Operands of the gradient: dy, what forward saved, the delayed scale; p in bf16 for the baseline."""

    dy: Tensor
    z: QTensor | Tensor
    rstd: Tensor | None
    scale: Tensor | None
    p: Tensor
    dropout: Dropout | None = None


Call = FusedCall | GradientCall | DgradCall


class FusedLinear(Op[Call]):
    """The fused layer [M, K] x [N, K], its gradient [M, N], and the step of backward to the layer before it."""

    op = "fused_linear"
    VARIANTS = (
        "e4m3:tensor@e4m3:tensor>e4m3:tensor:static",
        "e4m3:tensor@e4m3:tensor>e4m3:tensor:static|keep|transpose",
        "e4m3:tensor@e4m3:tensor>e4m3:tensor:static|relu|nonorm|bias|keep|transpose|amax",
        "gradient>e4m3:tensor:delayed+e4m3:tensor:delayed",
        "dgrad e4m3:tensor@e4m3:tensor>e4m3:tensor:delayed|relu|bias|amax",
    )
    DIMENSIONS = ("m", "k", "n")
    OPTIONS = frozenset({"nonorm", "bias", "keep", "transpose", "amax", "wide"})  # wide: backward reads z in bf16

    def parse(self, shape: Shape, variant: str) -> Call:
        """See `Op.parse`. A gradient has no K, so shapes that differ only in K are one call."""
        head, output, options, activation = split_variant(variant, set(self.OPTIONS))
        m, k, n = shape
        block, chosen = 0 if "nonorm" in options else NORM_BLOCK, activation or "hard_swish"
        if head == "gradient":
            spec, _, spec_t = output.partition("+")
            if options & {"keep", "transpose"}:
                raise ValueError(f"variant {variant!r}: keep and transpose belong to forward")
            return GradientCall(m, n, Spec.parse(spec), Spec.parse(spec_t or spec), block, chosen, "bias" in options)
        back, left, at, right = head.startswith("dgrad "), *head.removeprefix("dgrad ").partition("@")
        if not at:
            raise ValueError(f"variant {variant!r}: expected SPEC@SPEC, dgrad SPEC@SPEC or gradient before >, got {head!r}")  # fmt: skip
        if back:
            if options & {"keep", "transpose", "nonorm"}:
                raise ValueError(f"variant {variant!r}: keep, transpose and nonorm belong to forward")
            chosen = activation or "relu"
            form: Kept = "nothing" if chosen == "none" else "bf16" if "wide" in options else "scaled"
            extras = [name in options for name in ("bias", "amax")]
            return DgradCall(m, k, n, Spec.parse(left), Spec.parse(right), Spec.parse(output), chosen, form, *extras)
        out = DTYPES[output] if output in DTYPES else Spec.parse(output)
        extras = [name in options for name in ("bias", "keep", "transpose", "amax")]
        return FusedCall(m, k, n, Spec.parse(left), Spec.parse(right), out, block, chosen, *extras)

    def spell(self, call: Call) -> str:
        """See `Op.spell`."""
        if isinstance(call, DgradCall):
            flags = {"bias": call.bias, "amax": call.amax, "wide": call.z == "bf16"}
            return "|".join([f"dgrad {call.g}@{call.w_t}>{call.spec}", call.activation, *(f for f, on in flags.items() if on)])  # fmt: skip
        options = [call.activation, *(["nonorm"] if not call.norm_block else [])]
        options += [name for name in ("bias", "keep", "transpose", "amax") if getattr(call, name, False) is True]
        if isinstance(call, GradientCall):
            head = f"gradient>{call.spec}+{call.spec_t}"
        else:
            out = call.out if isinstance(call.out, Spec) else str(call.out).removeprefix("torch.")
            head = f"{call.a}@{call.b}>{out}"
        return "|".join([head, *options])

    def adopt(self, call: Call) -> Call:
        """See `Op.adopt`. Where the scales of operands came from makes no difference to a layer."""
        if not isinstance(call, FusedCall):
            return call
        return replace(call, a=replace(call.a, mode="dynamic"), b=replace(call.b, mode="dynamic"))

    def shape(self, call: Call) -> dict[str, int]:
        """Return M, K and N; a gradient has no K."""
        return {"m": call.m, **({} if isinstance(call, GradientCall) else {"k": call.k}), "n": call.n}

    def operands(
        self, call: Call, *, seed: int, distribution: str, device: torch.device
    ) -> LayerOperands | GradientOperands | DgradOperands:
        """Draw quantized operands with their bf16 values; for backward, the gradient and what forward saves."""
        if isinstance(call, DgradCall):
            return draw_dgrad(call, seed=seed, distribution=distribution, device=device)
        if isinstance(call, GradientCall):
            return _gradient_operands(call, seed, distribution, device)
        matmul = MatmulCall(call.m, call.k, call.n, call.a, call.b)
        a, b = inputs.matmul_operands(matmul, seed=seed, distribution=distribution, device=device)
        bias = inputs.draw(1, call.n, seed=seed, device=device)[0] if call.bias else None
        scale = None
        if isinstance(call.out, Spec) and call.out.mode != "dynamic":
            scale = torch.full((), NORMALIZED_SCALE, device=device)
            if not call.norm_block:
                # z is saved with the same scale; max |z| bounds |y|, except for tanh and sigmoid
                law = layer_law(call, a, b, bias)
                largest = torch.maximum(*(x.abs().nan_to_num(0.0).max() for x in (law.z, law.y)))
                scale = scale_from_amax(largest, call.out)
        dropout = draw_dropout(call, seed=seed, device=device)
        return LayerOperands(a, b, bias, scale, a.dequantize(torch.bfloat16), b.dequantize(torch.bfloat16), dropout)

    def thunk(self, backend: Any, call: Call, operands: Any) -> Thunk:
        """Return the layer, its gradient, or the step to the layer before."""
        if isinstance(call, DgradCall):
            return partial(run_dgrad, backend, call, operands)
        if isinstance(call, GradientCall):
            o: GradientOperands = operands
            return lambda: backend.gradient(o.dy, o.z, o.rstd, call, scale=o.scale, **option(o.dropout))
        p: LayerOperands = operands
        return partial(run_layer, backend, call, p)

    def exact(self, call: Call, operands: Any) -> Any:
        """See `Op.exact`."""
        if isinstance(call, DgradCall):
            return dgrad_law(call, operands)
        if isinstance(call, GradientCall):
            return _gradient_law(call, operands)
        o: LayerOperands = operands
        return layer_law(call, o.a, o.b, o.bias, o.dropout)

    def compare(self, backend: Any, call: Call, operands: Any, exact: Callable[[], Any]) -> Conformance:
        """Check all outputs against float64, plain and with poisoned allocations."""
        if isinstance(call, DgradCall):
            return check_dgrad(backend, call, operands, exact)
        if isinstance(call, GradientCall):
            return judge_twice(self.thunk(backend, call, operands), lambda result: _judge_gradient(result, exact()))
        return check_layer(backend, call, operands, exact)

    def shows_nan(self, call: Call) -> bool:
        """See `Op.shows_nan`. Of a gradient, a mask may take a NaN away."""
        return isinstance(call, FusedCall) and not call.dropout

    def baseline(self, call: Call, operands: Any) -> Thunk:
        """Return linear + RMSNorm + SiLU in bf16, or a part of their backward; compiled on a GPU."""
        if isinstance(call, DgradCall):
            return bf16_dgrad(call, operands)
        if isinstance(call, GradientCall):
            backward = compiled(bf16_gradient, operands.dy.device)
            return lambda: backward(operands.dy, operands.p)
        forward = compiled(bf16_layer, operands.x.device)
        return lambda: forward(operands.x, operands.w)

    def check_baseline(self, call: Call, operands: Any) -> Conformance:
        """Check against float64, allowing the linear's output to be rounded to bf16 before the norm."""
        if isinstance(call, DgradCall):
            return check_bf16_dgrad(self.baseline(call, operands), call, operands)
        if isinstance(call, GradientCall):
            expected = bf16_gradient(operands.dy.double(), operands.p.double())
            size = expected.abs().amax(1, keepdim=True).expand_as(expected) if expected.numel() else expected
            return judge_rounded(self.baseline(call, operands)(), expected, 1e-4 * size)
        x, w = operands.x.double(), operands.w.double()
        p = x @ w.T
        factor = torch.rsqrt(p.square().mean(1, keepdim=True) + NORM_EPS)
        terms = (x.square() @ w.square().T + p.square()).sqrt() * factor
        allowed = STEEPEST * 2 * conformance.baseline_tolerance(torch.bfloat16, call.k)
        law = Law(F.silu(p * factor), terms)
        # not poisoned: torch's deterministic mode would cause a recompilation
        return conformance.judge_runs(self.baseline(call, operands), law, allowed, torch.bfloat16, poison=False)

    def rivals(self, call: Call, sets: Sequence[Any]) -> list[Rival]:
        """Return the bare FP8 GEMM of the same operands with bf16 output, by torch and by the Triton kernel."""
        if isinstance(call, GradientCall):
            return []
        back = isinstance(call, DgradCall)
        specs = (call.g, call.w_t) if isinstance(call, DgradCall) else (call.a, call.b)
        pairs = [(o.g, o.w_t) if back else (o.a, o.b) for o in sets]
        described = MatmulCall(call.m, call.k, call.n, *specs, fast_accum=True)
        rivals: list[Rival] = []
        for name in ("torch", "triton"):
            backend = registry.backend("scaled_mm", name)
            if backend.supports(described, pairs[0][0].device):
                thunks: list[Thunk] = [
                    partial(backend.run, a, b, out_dtype=torch.bfloat16, fast_accum=True) for a, b in pairs
                ]
                checked = conformance.check_scaled_mm(backend, described, *pairs[0], poison=False)
                rivals.append((f"gemm {name}", thunks, checked))
        return rivals

    def bytes_moved(self, call: Call) -> int:
        """Count operands and results. Scales and rstd are left out, so it is a lower bound."""
        if isinstance(call, DgradCall):
            return (call.m + call.n) * call.k + call.m * call.n * (2 + call.z_bytes)
        if isinstance(call, GradientCall):
            return call.m * call.n * (call.in_dtype.itemsize + (1 if call.norm_block else 2) + 2)
        out = 1 if isinstance(call.out, Spec) else call.out.itemsize
        form = kept_form(call.norm_block, call.activation, call.out) if call.keep else "nothing"
        kept = {"nothing": 0, "y": 0, "normalized": 1, "scaled": 1, "bf16": 2}[form] + call.transpose
        return (call.m + call.n) * call.k + call.m * call.n * (out + kept)

    def flops(self, call: Call) -> int:
        """Return 2 M K N for a layer, either way; 0 for the gradient, whose GEMMs are not included."""
        return 0 if isinstance(call, GradientCall) else 2 * call.m * call.k * call.n


def _gradient_operands(call: GradientCall, seed: int, distribution: str, device: torch.device) -> GradientOperands:
    p = inputs.draw(call.m, call.n, distribution=distribution, seed=2 * seed, device=device)
    dy = inputs.draw(call.m, call.n, seed=2 * seed + 1, device=device, dtype=call.in_dtype)
    scale = torch.full((), 2.0**-5, device=device) if call.spec.mode != "dynamic" else None
    dropout = draw_dropout(call, seed=seed, device=device)
    if not call.norm_block:
        return GradientOperands(dy, p.to(torch.bfloat16), None, scale, p.to(torch.bfloat16), dropout)
    z, factor = block_norm(p.double(), NORM_EPS)
    kept = quantize(z.float(), NORMALIZED, scale=torch.full((), NORMALIZED_SCALE, device=device))
    rstd = factor[:, ::NORM_BLOCK].float().contiguous()
    return GradientOperands(dy, kept, rstd, scale, p.to(torch.bfloat16), dropout)


def _gradient_law(call: GradientCall, operands: GradientOperands) -> Tensor:
    """Compute g in float64 from what forward saved."""
    z = (operands.z.dequantize() if isinstance(operands.z, QTensor) else operands.z).double().requires_grad_()
    (slope,) = torch.autograd.grad(activate(z, call.activation, call.slope).sum(), z)
    g, z = operands.dy.double() * slope * dropped_share(operands.dropout, call.m, call.n), z.detach()
    if not call.norm_block:
        return g
    assert operands.rstd is not None
    parts = zip(
        torch.split(g, NORM_BLOCK, 1),
        torch.split(z, NORM_BLOCK, 1),
        torch.split(operands.rstd.double(), 1, 1),
        strict=True,
    )
    return torch.cat([rstd * (d - v * (d * v).mean(1, keepdim=True)) for d, v, rstd in parts], 1)


def _judge_gradient(result: GradientResult, g: Tensor) -> Conformance:
    error = FLOAT32 * g.abs().amax(1, keepdim=True).expand_as(g) if g.numel() else g
    verdicts = [judge_rounded(result.g, g, error, what="g"), judge_rounded(result.g_t, g.T, error.T, what="g_t")]
    if result.bias is not None:
        slack = FLOAT32 * g.abs().sum(0, keepdim=True) + 1e-30
        verdicts.append(
            judge_rounded(result.bias[None].float(), g.sum(0, keepdim=True), slack, what="the bias gradient")
        )
    if g.numel() and abs(float(result.amax) / float(g.abs().max()) - 1) > FLOAT32:
        reason = f"amax is {float(result.amax)}, expected {float(g.abs().max())}"
        verdicts.append(Conformance.failed(reason, 1.0))
    return worst_of(verdicts)
