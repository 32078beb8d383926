"""The Triton routers as torch ops, so that torch.compile sees calls and not Python."""

import torch
from torch import Tensor

from loka.kernels.route import triton_kernels as kernels


@torch.library.custom_op("loka::route", mutates_args=())
def route(x: Tensor, weight: Tensor, balance: Tensor, top: int, always: bool) -> tuple[Tensor, Tensor]:
    """See `triton_kernels.route`."""
    return kernels.route(x, weight, balance, top, always)


@torch.library.custom_op("loka::route_sorted", mutates_args=())
def route_sorted(
    x: Tensor, weight: Tensor, balance: Tensor, top: int, always: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `triton_kernels.route_sorted`."""
    return kernels.route_sorted(x, weight, balance, top, always)


@route_sorted.register_fake
def _(x, weight, balance, top, always):  # type: ignore[no-untyped-def]
    tokens, columns = x.shape[0], top + int(always)
    order, inverse = (x.new_empty(tokens * columns, dtype=torch.int64) for _ in range(2))
    offsets = x.new_empty(weight.shape[0] + int(always) + 1, dtype=torch.int32)
    return order, offsets, inverse, x.new_empty(tokens, columns, dtype=torch.float32)


@route.register_fake
def _(x, weight, balance, top, always):  # type: ignore[no-untyped-def]
    shape = (x.shape[0], top + int(always))
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.float32)
