"""The autograd node of a chain, and what it keeps between forward and backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from loka.lowp.chain_backward import Gradients, cast_to, run_backward
from loka.lowp.chain_forward import quantize_input_both, run_forward
from loka.lowp.chain_function import ChainTensors, Layout


class ChainFunction(torch.autograd.Function):
    """x [M, K], its scale where it is given, then the tensors of the chain, flattened -> y [M, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, layout: Layout, *flat: Tensor | None) -> Tensor:
        """y, keeping FP8 for backward."""
        tensors = ChainTensors.unflatten(flat, len(layout.links))
        a, a_t = quantize_input_both(x, scale, layout)
        y, saved = run_forward(a, a_t, layout, tensors)
        save_chain(ctx, layout, tensors, saved)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """dx, and the gradients of weights, biases and norms, once."""
        needs_input, _, _, *needs = ctx.needs_input_grad
        made = restore_chain(ctx, grads[0], ctx.saved_tensors, needs_input=needs_input, needs=needs)
        return cast_to(made.x, ctx.dtype), None, None, *spread(made)


def save_chain(ctx: Any, layout: Layout, tensors: ChainTensors, saved: Sequence[Tensor | None], *others: Tensor) -> None:  # fmt: skip
    """Keep what `restore_chain` needs, behind `others`. Weights are not kept: backward has them in FP8."""
    ctx.save_for_backward(*others, *tensors.norm_weight, *tensors.norm_bias, *tensors.g_scale, tensors.seed, *saved)
    # raised by every backward of this chain, in any order: not for autograd's check of versions
    ctx.pending, ctx.layout = tensors.g_pending, layout


def restore_chain(ctx: Any, dy: Tensor, kept: Sequence[Any], *, needs_input: bool, needs: Sequence[bool]) -> Gradients:
    """Backward from what `save_chain` kept.

    Args:
        ctx: of the autograd function that called `save_chain`.
        dy: gradient of the chain's output.
        kept: its saved tensors behind `others`.
        needs_input: whether the gradient of x is wanted.
        needs: the same of every flattened tensor of the chain.

    Returns:
        The gradients.
    """
    layout, count = ctx.layout, len(ctx.layout.links)
    norms, shifts, scales = (tuple(kept[i * count : (i + 1) * count]) for i in range(3))
    none = (None,) * count
    tensors = ChainTensors(none, none, norms, shifts, none, none, scales, ctx.pending, kept[3 * count])
    return run_backward(dy, kept[3 * count + 1 :], layout, tensors, needs_input=needs_input, needs_weight=needs[:count])


def spread(made: Gradients) -> list[Tensor | None]:
    """Gradients in the order of the flattened tensors; scales and the seed have none."""
    parameters = [*made.weight, *made.bias, *made.norm_weight, *made.norm_bias]
    return [*parameters, *([None] * (len(parameters) + 1))]
