"""The Triton kernels of `mixed_dots` as torch ops, and their FLOP counts."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from loka.kernels.mixed_dots import triton_kernels as kernels
from loka.kernels.op import fake_of, torch_op


@torch_op("mixed_dots")
def mixed_dots(x: Tensor, weight: Tensor) -> Tensor:
    """See `triton_kernels.mixed_dots`."""
    return kernels.mixed_dots(x, weight)


@fake_of(mixed_dots)
def _(x, weight):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], x.shape[1], weight.shape[0])


@torch_op("mixed_dots_gradient")
def mixed_dots_gradient(dp: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """See `triton_kernels.mixed_dots_gradient`."""
    return kernels.mixed_dots_gradient(dp, x, weight)


@fake_of(mixed_dots_gradient)
def _(dp, x, weight):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), weight.new_empty(weight.shape, dtype=torch.float32)


@register_flop_formula(torch.ops.loka.mixed_dots)
def _(x_shape: Any, weight_shape: Any, *_: Any, **__: Any) -> int:
    """Count two products."""
    rows, n, d = x_shape
    return 4 * rows * n * d * int(weight_shape[0])


@register_flop_formula(torch.ops.loka.mixed_dots_gradient)
def _(dp_shape: Any, x_shape: Any, weight_shape: Any, *_: Any, **__: Any) -> int:
    """Count two products for each of the two forward. Like torch, do not count recomputation (of the mixtures)."""
    rows, n, d = x_shape
    return 8 * rows * n * d * int(weight_shape[0])
