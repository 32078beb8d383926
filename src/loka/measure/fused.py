"""Shared by the benchmark adapters of fused ops: parsing of variants, bf16 baselines, exact results in float64.

Variants are `HEAD>OUTPUT|option|option`, e.g. `rms>e4m3:row|hard_swish` or
`e4m3:tensor@e4m3:tensor>e4m3:tensor:static|keep|transpose`.

The bf16 baseline is what a model without FP8 runs: linear + RMSNorm + SiLU (or the norm, or the backward of norm and
activation), compiled for static shapes on a GPU, eager on a CPU. It has no affine parameters, which favors it.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.kernels.activation import ACTIVATIONS, activate
from loka.kernels.dropout import Dropout, factor_of, keep_mask
from loka.kernels.fused_linear.call import NORM_BLOCK, NORM_EPS
from loka.kernels.norm_quantize.call import EPS
from loka.measure.conformance import Conformance, poisoned_allocations, worst_of

FLOAT32 = 1e-5  # error of sums in another order and an approximate reciprocal, relative to the row
STEEPEST = 1.5  # upper bound on the slope of all activations
DROPPED = 0.3  # the share that dropout drops where kernels are judged
ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {name: partial(activate, name=name) for name in ACTIVATIONS}


def split_variant(text: str, known: set[str]) -> tuple[str, str, set[str], str]:
    """Split a variant into HEAD, OUTPUT, options and activation."""
    head, arrow, rest = text.partition(">")
    output, *options = rest.split("|")
    unknown = sorted(set(options) - known - set(ACTIVATIONS))
    activations = [option for option in options if option in ACTIVATIONS]
    if not arrow or unknown or len(activations) > 1:
        wrong = f", not {', '.join(unknown)}" if unknown else ""
        raise ValueError(
            f"variant {text!r} is not HEAD>OUTPUT[|option]; options are an activation, {', '.join(sorted(known))}{wrong}"
        )
    return head, output, set(options) - set(activations), activations[0] if activations else ""


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Compile a function for static shapes on a GPU; return it unchanged for a CPU.

    `fullgraph=True` because torch.compile would otherwise silently run the function eagerly beyond its recompilation
    limit.
    """
    if device.type != "cuda":
        return function
    result: Callable[..., Any] = torch.compile(function, dynamic=False, fullgraph=True)
    return result


def bf16_norm(x: Tensor, norm: str) -> Tensor:
    """Apply layer norm or RMS norm; the latter also stands in for block norm."""
    if norm == "layer":
        return F.layer_norm(x, x.shape[-1:], eps=EPS["layer"])
    return F.rms_norm(x, x.shape[-1:], eps=EPS["rms"])


def bf16_layer(x: Tensor, w: Tensor) -> Tensor:
    """Compute SiLU(RMSNorm(x w^T))."""
    return F.silu(F.rms_norm(F.linear(x, w), (w.shape[0],), eps=NORM_EPS))


def bf16_gradient(dy: Tensor, p: Tensor) -> Tensor:
    """Compute the backward of SiLU(RMSNorm(p)), as compiled autograd would fuse it."""
    wide = p.float()
    rstd = torch.rsqrt(wide.square().mean(1, keepdim=True) + NORM_EPS)
    z = wide * rstd
    s = torch.sigmoid(z)
    dz = dy.float() * s * (1 + z * (1 - s))
    return (rstd * (dz - z * (dz * z).mean(1, keepdim=True))).to(dy.dtype)


def block_norm(p: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Divide p by the root mean square of each block of 256 columns. Returns the result and the factor, expanded."""
    parts = [
        torch.rsqrt(part.square().mean(1, keepdim=True) + eps).expand_as(part) for part in torch.split(p, NORM_BLOCK, 1)
    ]
    factor = torch.cat(parts, 1)
    return p * factor, factor


def judge_twice(run: Callable[[], Any], judge: Callable[[Any], Conformance]) -> Conformance:
    """Judge a plain run and one with poisoned allocations; return the worse verdict."""
    plain = judge(run())
    if not plain:
        return plain
    with poisoned_allocations():
        result = run()
    return worst_of([plain, judge(result)])


def judge_amax(run: Callable[[Tensor], object], largest: Tensor, slack: Tensor) -> Conformance:
    """Check that a kernel raises its amax to the largest magnitude and never lowers it: delayed scales come from it.

    Args:
        run: runs the kernel with an amax.
        largest: the exact magnitude.
        slack: how far the amax may be from it.
    """
    verdicts = []
    for start in (0.0, 2 * float(largest) + 1):
        amax = torch.full((), start, device=largest.device)
        run(amax)
        off = float((amax.double() - largest).abs() / slack) if start == 0 else 0.0 if amax == start else math.inf
        verdicts.append(Conformance.within(off, 1.0, f"amax is {float(amax)}, expected {max(start, float(largest))}"))
    return worst_of(verdicts)


def draw_dropout(call: Any, *, seed: int, device: torch.device) -> Dropout | None:
    """Return a mask's parameters for a call with dropout, else None. They differ in both words of the seed."""
    if not call.dropout:
        return None
    return Dropout(DROPPED, torch.tensor([(seed + 1) * 0x1E3779B97F4A7C15 % 2**63], device=device), stream=2)


def dropped_share(dropout: Dropout | None, rows: int, columns: int) -> Tensor | float:
    """Return what dropout multiplies each element by, in float64: 0 or 1 / (1 - p). Without dropout 1."""
    if dropout is None:
        return 1.0
    return keep_mask(dropout, rows, columns).double() * factor_of(dropout.p)


def option(dropout: Dropout | None) -> dict[str, Dropout]:
    """Return dropout as an option of a backend, none without dropout."""
    return {} if dropout is None else {"dropout": dropout}
