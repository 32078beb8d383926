"""The Triton kernels of `mixed_dots` as torch ops, and their FLOP counts."""

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from loka.kernels.mixed_dots import triton_kernels as kernels
from loka.kernels.op import fake_of, torch_op

mixed_dots = torch_op("mixed_dots")(kernels.mixed_dots)


@fake_of(mixed_dots)
def _(x, weight, mixing):  # type: ignore[no-untyped-def]
    rows, n, d = x.shape
    mixed = x.new_empty(0, dtype=torch.float32) if mixing is None else x.new_empty(rows, mixing.shape[0], d)
    return x.new_empty(rows, n, weight.shape[0]), mixed


mixed_dots_gradient = torch_op("mixed_dots_gradient")(kernels.mixed_dots_gradient)


@fake_of(mixed_dots_gradient)
def _(dp, dz, x, weight, mixing):  # type: ignore[no-untyped-def]
    shape = (0,) if mixing is None else mixing.shape
    return (
        torch.empty_like(x),
        weight.new_empty(weight.shape, dtype=torch.float32),
        weight.new_empty(shape, dtype=torch.float32),
    )


@register_flop_formula(torch.ops.loka.mixed_dots)
def _(x_shape: Any, weight_shape: Any, mixing_shape: Any, *_: Any, **__: Any) -> int:
    """Count two products, and one for mixtures that are results."""
    return _count(x_shape, weight_shape, mixing_shape)


@register_flop_formula(torch.ops.loka.mixed_dots_gradient)
def _(dp_shape: Any, dz_shape: Any, x_shape: Any, weight_shape: Any, mixing_shape: Any, *_: Any, **__: Any) -> int:
    """Count two products for each one forward. Like torch, do not count recomputation (of the mixtures)."""
    return 2 * _count(x_shape, weight_shape, mixing_shape)


def _count(x_shape: Any, weight_shape: Any, mixing_shape: Any) -> int:
    rows, n, d = x_shape
    return int(2 * rows * n * d * (2 * weight_shape[0] + (mixing_shape[0] if mixing_shape else 0)))
