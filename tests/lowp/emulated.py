"""Linears in FP8 written down once more, by nothing of this package but the number format: what a chain is compared with where float32 would hide an error."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.formats import Spec, quantize


class _Emulated(torch.autograd.Function):
    """A linear in FP8 written down once more: one scale for every tensor, from the tensor itself."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x, weight = rounded(x), rounded(weight)
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g = rounded(dy)
        rows = g.reshape(-1, g.shape[-1])
        return g @ weight, rows.T @ x.reshape(-1, x.shape[-1]), dy.reshape(rows.shape).sum(0) if ctx.biased else None


def rounded(x: Tensor) -> Tensor:
    return quantize(x.reshape(-1, x.shape[-1]).detach(), Spec.parse("e4m3:tensor")).dequantize().reshape(x.shape)


def emulate(model: nn.Module, linears: list[str]) -> None:
    """These linears in FP8, each by itself, by nothing of this package but the format."""
    for name in linears:
        linear = model.get_submodule(name)
        linear.forward = lambda x, m=linear: _Emulated.apply(x, m.weight, m.bias)
