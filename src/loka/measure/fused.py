"""What the benchmark's views of the fused ops share: how variants are spelled, the bf16 baselines, the exact maths in float64.

Variants are `HEAD>OUTPUT|option|option`, e.g. `rms>e4m3:row|hard_swish` or `e4m3:tensor@e4m3:tensor>e4m3:tensor:static|keep|transpose`.

The bf16 baseline is what a model without FP8 runs: linear + RMSNorm + SiLU (or the norm, or the backward of norm and activation), compiled for static
shapes where there is a GPU, eager on a CPU. It has no affine parameters, which favours it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.kernels.activation import ACTIVATIONS, activate
from loka.kernels.fused_linear.call import NORM_BLOCK, NORM_EPS
from loka.kernels.norm_quantize.call import EPS
from loka.measure.conformance import Conformance, poisoned_allocations
from loka.measure.rounding import worst_of

FLOAT32 = 1e-5  # what sums in another order and an approximate reciprocal lose, relative to the row
STEEPEST = 1.5  # no activation here has a larger slope
ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {name: partial(activate, name=name) for name in ACTIVATIONS}


def split_variant(text: str, known: set[str]) -> tuple[str, str, set[str], str]:
    """HEAD, OUTPUT, options and the activation of a variant."""
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
    """For static shapes where there is a GPU; as it is on a CPU, where the number is a label and not a claim.

    A full graph or an error: beyond its limit of recompilations torch.compile would otherwise run the function uncompiled and say nothing.
    """
    if device.type != "cuda":
        return function
    result: Callable[..., Any] = torch.compile(function, dynamic=False, fullgraph=True)
    return result


def bf16_norm(x: Tensor, norm: str) -> Tensor:
    """Layer norm, or the RMS norm that stands for block norm too."""
    if norm == "layer":
        return F.layer_norm(x, x.shape[-1:], eps=EPS["layer"])
    return F.rms_norm(x, x.shape[-1:], eps=EPS["rms"])


def bf16_layer(x: Tensor, w: Tensor) -> Tensor:
    """SiLU(RMSNorm(x w^T))."""
    return F.silu(F.rms_norm(F.linear(x, w), (w.shape[0],), eps=NORM_EPS))


def bf16_gradient(dy: Tensor, p: Tensor) -> Tensor:
    """Backward of SiLU(RMSNorm(p)), as compiled autograd would fuse it."""
    wide = p.float()
    rstd = torch.rsqrt(wide.square().mean(1, keepdim=True) + NORM_EPS)
    z = wide * rstd
    s = torch.sigmoid(z)
    dz = dy.float() * s * (1 + z * (1 - s))
    return (rstd * (dz - z * (dz * z).mean(1, keepdim=True))).to(dy.dtype)


def block_norm(p: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """In float64: p over the root mean square of its 256 columns, and the factor, repeated to p's width."""
    parts = [
        torch.rsqrt(part.square().mean(1, keepdim=True) + eps).expand_as(part) for part in torch.split(p, NORM_BLOCK, 1)
    ]
    factor = torch.cat(parts, 1)
    return p * factor, factor


def judge_twice(run: Callable[[], Any], judge: Callable[[Any], Conformance]) -> Conformance:
    """A plain run, and one with poisoned allocations."""
    plain = judge(run())
    if not plain:
        return plain
    with poisoned_allocations():
        result = run()
    return worst_of([plain, judge(result)])
