"""The autograd node of a chain, and what it saves for backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loka.lowp.chain_backward import Gradients, cast_to, run_backward
from loka.lowp.chain_forward import quantize_input_both, run_forward
from loka.lowp.chain_function import ChainTensors, Layout
from loka.lowp.leaving import only_once


class ChainFunction(torch.autograd.Function):
    """x [M, K], its scale if known, and the flattened tensors of the chain -> y [M, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, layout: Layout, *flat: Tensor | None) -> Tensor:
        """Return y, and save FP8 tensors for backward."""
        tensors = ChainTensors.unflatten(flat, len(layout.links))
        a, a_t = quantize_input_both(x, scale, layout)
        y, saved = run_forward(a, a_t, layout, tensors)
        save_chain(ctx, layout, tensors, saved)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    @only_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx and the gradients of weights, biases and norms."""
        needs_input, _, _, *needs = ctx.needs_input_grad
        made = restore_chain(ctx, grads[0], ctx.saved_tensors, needs_input=needs_input, needs=needs)
        return cast_to(made.x, ctx.dtype), None, None, *spread(made)


def save_chain(ctx: Any, layout: Layout, tensors: ChainTensors, saved: Sequence[Tensor | None], *others: Tensor) -> None:  # fmt: skip
    """Save what `restore_chain` needs, after `others`. Weights are saved only in FP8."""
    ctx.save_for_backward(*others, *tensors.norm_weight, *tensors.norm_bias, *tensors.g_scale, tensors.seed, *saved)
    # not a saved tensor: every backward of this chain writes to it, which would fail autograd's version check
    ctx.pending, ctx.layout = tensors.g_pending, layout


def restore_chain(ctx: Any, dy: Tensor, kept: Sequence[Any], *, needs_input: bool, needs: Sequence[bool]) -> Gradients:
    """Run the backward of a chain from what `save_chain` saved.

    Args:
        ctx: the context that `save_chain` was called with.
        dy: gradient of the chain's output.
        kept: the saved tensors after `others`.
        needs_input: whether the gradient of x is needed.
        needs: the same for every flattened tensor of the chain.
    """
    layout, count = ctx.layout, len(ctx.layout.links)
    norms, shifts, scales = (tuple(kept[i * count : (i + 1) * count]) for i in range(3))
    none = (None,) * count
    tensors = ChainTensors(none, none, norms, shifts, none, none, scales, ctx.pending, kept[3 * count])
    return run_backward(dy, kept[3 * count + 1 :], layout, tensors, needs_input=needs_input, needs_weight=needs[:count])


def spread(made: Gradients) -> list[Tensor | None]:
    """Return the gradients in the order of the flattened tensors; those of scales and of the seed are None."""
    parameters = [*made.weight, *made.bias, *made.norm_weight, *made.norm_bias]
    return [*parameters, *([None] * (len(parameters) + 1))]
