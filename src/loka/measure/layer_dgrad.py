"""Check the step of backward through a chain, `fused_linear_dgrad`, against float64.

    exact  =  (g @ w_t^T) * activation'(z)          z as forward kept it; with dropout, of kept elements, / (1 - p)

It is judged like the forward (`layer_check`): both layouts of the result rounded once, the bias gradient, the amax that
the next step's scale comes from, and that no result lies in memory of an earlier one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import TENSOR, QTensor, block_amax, scale_from_amax
from loka.kernels.activation import activate, activation_slope
from loka.kernels.dropout import Dropout, dropped
from loka.kernels.fused_linear.call import NORMALIZED, DgradCall, DgradResult, derived_from_output, kept_form
from loka.kernels.scaled_mm.call import MatmulCall
from loka.measure import conformance, inputs
from loka.measure.conformance import Conformance, Law, poisoned_allocations, worst_of
from loka.measure.fused import FLOAT32, STEEPEST, compiled, draw_dropout, dropped_share, judge_amax, option
from loka.measure.rounding import judge_rounded
from loka.measure.timing import Thunk


@dataclass(frozen=True)
class DgradOperands:
    """Operands of the step: the gradient, the transposed weight, what forward kept of z, and the result's scale."""

    g: QTensor
    w_t: QTensor
    z: QTensor | Tensor | None
    scale: Tensor
    dropout: Dropout | None = None


@dataclass(frozen=True)
class DgradLaw:
    """The exact result, and the largest error of an element before rounding."""

    g: Tensor
    error: Tensor


def draw_dgrad(call: DgradCall, *, seed: int, distribution: str, device: torch.device) -> DgradOperands:
    """Draw operands, with z kept as the forward of a chain keeps it."""
    matmul = MatmulCall(call.m, call.k, call.n, call.g, call.w_t)
    g, w_t = inputs.matmul_operands(matmul, seed=seed, distribution=distribution, device=device)
    z = inputs.draw(call.m, call.n, seed=3 * seed + 2, device=device)
    dropout = draw_dropout(call, seed=seed, device=device)
    kept: QTensor | Tensor | None = None
    if call.z == "bf16":
        kept = z.to(torch.bfloat16)
    elif call.z != "nothing":
        from_output = kept_form(0, call.activation, NORMALIZED) == "y"
        y = dropped(activate(z, call.activation, call.slope), dropout)  # in which dropped elements are zero
        kept = inputs.quantized(y if from_output else z, NORMALIZED)
    operands = DgradOperands(g, w_t, kept, torch.ones((), device=device), dropout)
    largest = block_amax(dgrad_law(call, operands).g.float(), TENSOR).reshape(())
    return replace(operands, scale=scale_from_amax(largest, call.spec))


def dgrad_law(call: DgradCall, o: DgradOperands) -> DgradLaw:
    """Compute what a call must return."""
    law = conformance.law_of_values(o.g.dequantize(), o.w_t.dequantize())
    share = dropped_share(o.dropout, call.m, call.n)
    exact = law.y * _slope(call, o, o.z.dequantize() if isinstance(o.z, QTensor) else o.z) * share
    lost = FLOAT32
    if exact.is_cuda:
        matmul = MatmulCall(call.m, call.k, call.n, call.g, call.w_t, fast_accum=True)
        lost += conformance.ELEMENT_ALLOWANCE * conformance.accumulation_error(matmul)
    return DgradLaw(exact, STEEPEST * lost * (law.terms + law.y.abs()) * share)


def run_dgrad(backend: Any, call: DgradCall, o: DgradOperands, amax: Tensor | None = None) -> DgradResult:
    """Run a backend on a call. If the call collects an amax, it is raised even if the caller does not look at it."""
    if amax is None and call.amax:
        amax = torch.zeros((), device=o.g.device)
    call = replace(call, amax=amax is not None)
    result: DgradResult = backend.dgrad(o.g, o.w_t, o.z, call, scale=o.scale, amax=amax, **option(o.dropout))
    return result


def check_dgrad(backend: Any, call: DgradCall, o: DgradOperands, exact: Callable[[], DgradLaw]) -> Conformance:
    """Check all results, plain and with poisoned allocations, and that they are new memory."""
    first = run_dgrad(backend, call, o)
    law = exact()
    for what, found in (("g", first.g), ("g_t", first.g_t)):  # later kernels are given this very scale
        if not torch.equal(found.scale.reshape(()), o.scale):
            return Conformance.failed(f"{what}: its scale is {float(found.scale)}, {float(o.scale)} was given")
    verdict = _judge(first, law)
    if not verdict or not law.g.numel():
        return verdict
    with poisoned_allocations():
        second = run_dgrad(backend, call, o)
    earlier, later = ({part.data.data_ptr() for part in (made.g, made.g_t)} for made in (first, second))
    if shared := earlier & later:
        return Conformance.failed(f"{len(shared)} results lie in memory that an earlier result was returned in")
    verdicts = [verdict, _judge(second, law)]
    if call.amax:
        largest = law.g.abs().max()
        slack = law.error.max() + FLOAT32 * largest + 1e-30
        verdicts.append(judge_amax(partial(run_dgrad, backend, call, o), largest, slack))
    return worst_of(verdicts)


def bf16_dgrad(call: DgradCall, o: DgradOperands) -> Thunk:
    """Return the same step in bf16, compiled on a GPU."""
    from_output = derived_from_output(0, call.activation, o.z)

    def step(g: Tensor, w_t: Tensor, z: Tensor | None) -> Tensor:
        dy = F.linear(g, w_t)
        if z is None:
            return dy
        return (dy * activation_slope(z.float(), call.activation, call.slope, from_output=from_output)).to(dy.dtype)

    return partial(compiled(step, o.g.device), *_in_bf16(o))


def check_bf16_dgrad(run: Thunk, call: DgradCall, o: DgradOperands) -> Conformance:
    """Check the step in bf16 against float64, allowing dy to be rounded before the activation's derivative."""
    g, w_t, z = _in_bf16(o)
    law = conformance.law_of_values(g, w_t)
    allowed = STEEPEST * 2 * conformance.baseline_tolerance(torch.bfloat16, call.k)
    exact = law.y * _slope(call, o, z)
    return conformance.judge_runs(run, Law(exact, law.terms), allowed, torch.bfloat16, poison=False)


def _in_bf16(o: DgradOperands) -> tuple[Tensor, Tensor, Tensor | None]:
    z = o.z.dequantize(torch.bfloat16) if isinstance(o.z, QTensor) else o.z
    return o.g.dequantize(torch.bfloat16), o.w_t.dequantize(torch.bfloat16), z


def _slope(call: DgradCall, o: DgradOperands, z: Tensor | None) -> Tensor | float:
    """Return the activation's derivative in float64, from what was kept."""
    if z is None:
        return 1.0
    from_output = derived_from_output(0, call.activation, o.z)
    return activation_slope(z.double(), call.activation, call.slope, from_output=from_output)


def _judge(result: DgradResult, law: DgradLaw) -> Conformance:
    verdicts = [judge_rounded(result.g, law.g, law.error, what="g"), judge_rounded(result.g_t, law.g.T, law.error.T, what="g_t")]  # fmt: skip
    if result.bias is not None:
        sums = law.g.sum(0, keepdim=True)
        # typical errors, and all of one sign: rows may be equal
        spread = law.error.sum(0, keepdim=True) / conformance.ELEMENT_ALLOWANCE + law.error.amax(0, keepdim=True)
        slack = FLOAT32 * law.g.abs().sum(0, keepdim=True) + spread + 1e-30
        verdicts.append(judge_rounded(result.bias[None].float(), sums, slack, what="the bias gradient"))
    return worst_of(verdicts)
