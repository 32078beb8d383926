"""Check the forward of fused_linear: y, its transpose, and what backward and the next step's scales depend on.

A chain keeps z, rstd and the outputs of earlier layers until its backward, so no call may return the memory of another
result, and takes its delayed scales from the amax that kernels raise.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from loka.formats import QTensor
from loka.kernels.activation import activate
from loka.kernels.dropout import Dropout, factor_of
from loka.kernels.fused_linear.call import NORM_BLOCK, NORM_EPS, FusedCall, FusedResult, kept_form
from loka.kernels.scaled_mm.call import MatmulCall
from loka.measure import conformance
from loka.measure.conformance import Conformance, poisoned_allocations, worst_of
from loka.measure.fused import FLOAT32, STEEPEST, block_norm, dropped_share, judge_amax, option
from loka.measure.rounding import judge_rounded


@dataclass(frozen=True)
class LayerOperands:
    """Operands of a fused layer, and the same values in bf16 for the baseline."""

    a: QTensor
    b: QTensor
    bias: Tensor | None
    scale: Tensor | None
    x: Tensor
    w: Tensor
    dropout: Dropout | None = None


@dataclass(frozen=True)
class LayerLaw:
    """z, y and the norm's factor in float64, and the largest accumulation error of z and y on this device.

    `share`: what dropout multiplies elements of y by, 0 or `raised`. y and its error have it already.
    """

    z: Tensor
    y: Tensor
    factor: Tensor
    error: Tensor
    share: Tensor | float = 1.0
    raised: float = 1.0


def layer_law(call: FusedCall, a: QTensor, b: QTensor, bias: Tensor | None, dropout: Dropout | None = None) -> LayerLaw:
    """Compute what a call must return.

    Args:
        call: the layer.
        a, b, bias: its operands.
        dropout: the parameters of its mask.
    """
    left, right = a.dequantize().double(), b.dequantize().double()
    law = conformance.law_of_values(left, right)
    p = law.y if bias is None else law.y + bias.double()
    z, factor = block_norm(p, NORM_EPS) if call.norm_block else (p, torch.ones_like(p))
    lost = FLOAT32
    if left.device.type == "cuda":
        matmul = MatmulCall(call.m, call.k, call.n, call.a, call.b, fast_accum=True)
        lost += conformance.ELEMENT_ALLOWANCE * conformance.accumulation_error(matmul)
    share = dropped_share(dropout, call.m, call.n)
    y, error = activate(z, call.activation, call.slope) * share, STEEPEST * lost * (law.terms * factor + z.abs())
    return LayerLaw(z, y, factor, error, share, 1.0 if dropout is None else factor_of(dropout.p))


def run_layer(backend: Any, call: FusedCall, o: LayerOperands, amax: Tensor | None = None) -> FusedResult:
    """Run a backend on a call. If the call collects an amax, it is raised even if the caller does not look at it."""
    if amax is None and call.amax:
        amax = torch.zeros((), device=o.a.device)
    call = replace(call, amax=amax is not None)
    result: FusedResult = backend.run(o.a, o.b, call, out_scale=o.scale, bias=o.bias, amax=amax, **option(o.dropout))
    return result


def check_layer(backend: Any, call: FusedCall, o: LayerOperands, exact: Callable[[], LayerLaw]) -> Conformance:
    """Check all results against float64, plain and with poisoned allocations, and that they are new memory."""
    first = run_layer(backend, call, o)
    law = exact()
    if o.scale is not None and (wrong := _judge_scale(first.y, o.scale * law.raised, what="y")) is not None:
        return wrong
    verdict = _judge(call, first, law)
    if not verdict or not law.y.numel():
        return verdict
    with poisoned_allocations():
        second = run_layer(backend, call, o)
    if shared := _places(first) & _places(second):
        return Conformance.failed(f"{len(shared)} results lie in memory that an earlier result was returned in")
    verdict = worst_of([verdict, _judge(call, second, law)])
    if not verdict or not call.amax:
        return verdict
    largest = law.z.abs().nan_to_num(0.0).max()  # an amax ignores NaN
    slack = law.error.nan_to_num(0.0).max() + FLOAT32 * largest + 1e-30
    return worst_of([verdict, judge_amax(partial(run_layer, backend, call, o), largest, slack)])


def _judge(call: FusedCall, result: FusedResult, law: LayerLaw) -> Conformance:
    error = law.error * law.share
    verdicts = [judge_rounded(result.y, law.y, error, what="y")]
    if result.y_t is not None:
        verdicts.append(judge_rounded(result.y_t, law.y.T, error.T, what="y_t"))
    if result.z is not None and result.z is not result.y:  # y was judged already
        if kept_form(call.norm_block, call.activation, call.out) == "y":  # with dropout: y before it is raised
            verdicts.append(judge_rounded(result.z, law.y / law.raised, error, what="the kept y"))
        else:
            verdicts.append(judge_rounded(result.z, law.z, law.error, what="z"))
    if result.rstd is not None and law.z.numel():
        # its relative error is that of the root mean square of the block's sums
        error = torch.cat([part.square().mean(1, keepdim=True).sqrt() for part in torch.split(law.error, NORM_BLOCK, 1)], 1)  # fmt: skip
        exact = law.factor[:, ::NORM_BLOCK]
        verdicts.append(judge_rounded(result.rstd, exact, (error + FLOAT32) * exact, what="rstd"))
    return worst_of(verdicts)


def _places(result: FusedResult) -> set[int]:
    """Return where the results begin in memory, but for scales, which may be an operand's."""
    parts = (result.y, result.y_t, result.z, result.rstd)
    return {(part.data if isinstance(part, QTensor) else part).data_ptr() for part in parts if part is not None}


def _judge_scale(q: QTensor | Tensor | None, given: Tensor, *, what: str) -> Conformance | None:
    """Return a failed verdict if a result does not have the scale that was given, which later kernels are given too."""
    if not isinstance(q, QTensor) or torch.allclose(q.scale.reshape(()).float(), given.float(), rtol=1e-6, atol=0.0):
        return None
    return Conformance.failed(f"{what}: its scale is {float(q.scale)}, {float(given)} was given")
