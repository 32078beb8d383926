"""Triton SiLU attention as torch ops, forward and backward, so that torch.compile does not trace the launch code."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from loka.kernels.attention import triton_launch as launch
from loka.kernels.op import differentiate, fake_of, torch_op
from loka.kernels.strides import unit_rows


@torch_op("silu_attention")
def silu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    times: Tensor | None,
    asked: Tensor | None,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    max_length: int,
    divisor: float,
    alpha: float,
) -> Tensor:
    """Return out [total, H, d_v]. A divisor of 0 means the length of each row."""
    return launch.forward(q, k, v, offsets, times, asked, position_bias, time_bias, max_length, divisor, alpha)


@fake_of(silu_attention)
def _(q, k, v, offsets, times, asked, position_bias, time_bias, max_length, divisor, alpha):  # type: ignore[no-untyped-def]
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch_op("silu_attention_backward")
def silu_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    times: Tensor | None,
    asked: Tensor | None,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    max_length: int,
    divisor: float,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv and the gradients of the biases in float32, with no entries if a bias is absent."""
    return launch.backward(grad, q, k, v, offsets, times, asked, position_bias, time_bias, max_length, divisor, alpha)


@fake_of(silu_attention_backward)
def _(grad, q, k, v, offsets, times, asked, position_bias, time_bias, max_length, divisor, alpha):  # type: ignore[no-untyped-def]
    like = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    biases = [
        q.new_empty((q.shape[1], 0) if b is None else b.shape, dtype=torch.float32) for b in (position_bias, time_bias)
    ]
    return (*like, *biases)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.options = inputs[8:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, offsets, times, asked, position_bias, time_bias = ctx.saved_tensors
    grad = unit_rows(grad)
    dq, dk, dv, dposition, dtime = silu_attention_backward(
        grad, q, k, v, offsets, times, asked, position_bias, time_bias, *ctx.options
    )
    from_position = None if position_bias is None else dposition.to(position_bias.dtype)
    from_time = None if time_bias is None else dtime.to(time_bias.dtype)
    return dq, dk, dv, None, None, None, from_position, from_time, None, None, None


differentiate(silu_attention, _differentiate, save=_save)


def _count_pairs(offsets: Tensor, total: int) -> int:
    """Count the causal pairs of positions. If the lengths are not known (meta tensors), assume rows of equal length."""
    if type(offsets) is Tensor and not offsets.is_meta:
        lengths = offsets.diff()
        return int((lengths * (lengths + 1) // 2).sum())
    rows = max(offsets.shape[0] - 1, 1)
    return total * (total // rows + 1) // 2


@register_flop_formula(torch.ops.loka.silu_attention, get_raw=True)
def _flops(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * _count_pairs(offsets, q.shape[0]) * q.shape[1] * (q.shape[2] + v.shape[2])


@register_flop_formula(torch.ops.loka.silu_attention_backward, get_raw=True)
def _backward_flops(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * _count_pairs(offsets, q.shape[0]) * q.shape[1] * (3 * q.shape[2] + 2 * v.shape[2])
