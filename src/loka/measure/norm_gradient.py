"""Benchmark adapter of norm_quantize's gradient: dx (16-bit, or FP8 with its transpose), dweight and dbias from dy.

A variant is `gradient NORM>OUTPUT|option`, where OUTPUT is a Spec or a dtype, e.g.
`gradient layer>e4m3:tensor:delayed|silu|affine` or `gradient rms>bfloat16|relu`. Compared with autograd in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from loka.formats import TENSOR, Spec, block_amax, scale_from_amax
from loka.kernels.dropout import Dropout
from loka.kernels.norm_quantize import reference
from loka.kernels.norm_quantize.call import EPS, NormGradient, NormGradientCall
from loka.measure import fused, inputs
from loka.measure.conformance import Conformance, worst_of
from loka.measure.fused import ACTIVATE, FLOAT32, bf16_norm, block_norm, compiled, draw_dropout, dropped_share, option
from loka.measure.op import DTYPES
from loka.measure.rounding import judge_rounded
from loka.measure.timing import Thunk

HEAD = "gradient "
_SLACK = 8 * FLOAT32  # of the row's largest: two means of products, an approximate reciprocal


@dataclass(frozen=True)
class NormGradientOperands:
    """dy, what forward saved, the parameters, and the scale of an FP8 gradient."""

    dy: Tensor
    h: Tensor
    mean: Tensor | None
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    dropout: Dropout | None = None


@dataclass(frozen=True)
class ExactGradient:
    """dx in float64; also dweight and dbias by name, each with the sum of the magnitudes of its terms."""

    dx: Tensor
    sums: dict[str, tuple[Tensor, Tensor]]


def parse(m: int, k: int, head: str, output: str, options: set[str], activation: str) -> NormGradientCall:
    """Return the call of a variant.

    Args:
        m, k: rows and columns.
        head: what comes before the variant's arrow, `gradient NORM`.
        output: the Spec or dtype after it.
        options: `affine`, or nothing.
        activation: its name, empty for none.
    """
    if options - {"affine"}:
        raise ValueError(f"a gradient has the options affine and an activation, not {', '.join(sorted(options))}")
    kind, spec = (DTYPES[output], None) if output in DTYPES else (torch.bfloat16, Spec.parse(output))
    return NormGradientCall(m, k, head.removeprefix(HEAD), activation or "none", "affine" in options, False, kind, spec)


def spell(call: NormGradientCall) -> str:
    """Return the variant of a call."""
    output = call.spec or str(call.in_dtype).removeprefix("torch.")
    return "|".join([f"{HEAD}{call.norm}>{output}", call.activation, *(["affine"] if call.affine else [])])


def draw_operands(
    call: NormGradientCall, *, seed: int, distribution: str, device: torch.device
) -> NormGradientOperands:
    """Draw h from the distribution, with float32 statistics, and normal dy; an FP8 gradient gets a fitting scale."""

    def draw(rows: int, part: int, kind: str = "normal") -> Tensor:
        return inputs.draw(rows, call.k, distribution=kind, seed=4 * seed + part, device=device, dtype=call.in_dtype)

    h, dy, noise = draw(call.m, 0, distribution), draw(call.m, 1), draw(2, 2)
    weight, bias = (1 + 0.3 * noise[0], 0.3 * noise[1]) if call.affine else (None, None)
    _, mean, rstd = reference._normalize(h.double(), call.norm, EPS[call.norm])
    dropout = draw_dropout(call, seed=seed, device=device)
    kept = NormGradientOperands(
        dy, h, None if mean is None else mean.float(), rstd.float(), weight, bias, None, dropout
    )
    if call.spec is None:
        return kept
    largest = block_amax(exact(call, kept).dx.float(), TENSOR)
    return replace(kept, scale=scale_from_amax(largest, call.spec).reshape(()))


def make_thunk(backend: Any, call: NormGradientCall, o: NormGradientOperands, amax: Tensor | None = None) -> Thunk:
    """Return the gradient as training runs it: an FP8 gradient also updates its amax."""
    if amax is None and call.spec is not None:
        amax = torch.zeros((), device=o.dy.device)
    return lambda: backend.gradient(o.dy, o.h, o.mean, o.rstd, call, weight=o.weight, bias=o.bias, scale=o.scale, amax=amax, **option(o.dropout))  # fmt: skip


def judge(result: NormGradient, call: NormGradientCall, law: ExactGradient) -> Conformance:
    """Compare dx, its transpose, dweight and dbias with float64."""
    dx = law.dx
    error = _SLACK * dx.abs().nan_to_num(0.0).amax(1, keepdim=True).expand_as(dx) if dx.numel() else dx
    verdicts = [judge_rounded(result.dx, dx, error, what="dx")]
    if call.spec is not None:
        assert result.dx_t is not None
        verdicts.append(judge_rounded(result.dx_t, dx.T, error.T, what="dx_t"))
    for name, (total, size) in law.sums.items():
        found = getattr(result, name)
        verdicts.append(judge_rounded(found[None], total[None], _SLACK * size[None] + 1e-30, what=f"d{name}"))
    return worst_of(verdicts)


def judge_amax(
    backend: Any, call: NormGradientCall, o: NormGradientOperands, exact: Callable[[], ExactGradient]
) -> Conformance:
    """Check the amax of an FP8 gradient, which is of dx."""
    if call.spec is None or not o.dy.numel():
        return Conformance(True, 0.0, 1.0)
    largest = exact().dx.abs().nan_to_num(0.0, 0.0, 0.0).max()
    slack = (_SLACK * largest).clamp(min=1e-30)
    return fused.judge_amax(lambda amax: make_thunk(backend, call, o, amax)(), largest, slack)


def exact(call: NormGradientCall, o: NormGradientOperands) -> ExactGradient:
    """Compute the gradients of a call in float64."""
    h = o.h.double().requires_grad_()
    with torch.enable_grad():
        xhat = block_norm(h, EPS["block"])[0] if call.norm == "block" else bf16_norm(h, call.norm)
        p = xhat if o.weight is None else xhat * o.weight.double()
        p = p if o.bias is None else p + o.bias.double()
        y = ACTIVATE[call.activation](p)
        dx, dp = torch.autograd.grad(y, [h, p], o.dy.double() * dropped_share(o.dropout, call.m, call.k))
    terms = {"weight": dp * xhat.detach(), "bias": dp} if call.affine else {}
    return ExactGradient(dx, {name: (t.sum(0), t.abs().sum(0)) for name, t in terms.items()})


def make_baseline(call: NormGradientCall, o: NormGradientOperands) -> Thunk:
    """Return dx, dweight and dbias in 16-bit by the same formula in plain torch; compiled on a GPU."""
    wide = replace(call, spec=None)

    def plain(dy: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        made = reference.gradient(dy, h, o.mean, o.rstd, wide, weight=o.weight, bias=o.bias)
        assert isinstance(made.dx, Tensor)
        return tuple(part for part in (made.dx, made.weight, made.bias) if part is not None)

    run = compiled(plain, o.dy.device)
    return lambda: run(o.dy, o.h)


def judge_baseline(found: tuple[Tensor, ...], call: NormGradientCall, o: NormGradientOperands) -> Conformance:
    """Check the baseline's dx."""
    dx = exact(call, o).dx
    error = _SLACK * dx.abs().amax(1, keepdim=True).expand_as(dx) if dx.numel() else dx
    return judge_rounded(found[0], dx, error, what="the baseline's dx")


def bytes_moved(call: NormGradientCall) -> int:
    """Count dy, h and dx: 16-bit once, or FP8 twice."""
    item = call.in_dtype.itemsize
    return call.m * call.k * (2 * item + (item if call.spec is None else 2))
