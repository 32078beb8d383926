"""The Triton kernels of `dots` as torch ops."""

import torch
from torch import Tensor

from loka.kernels.dots import triton_kernels as kernels
from loka.kernels.op import fake_of, torch_op


@torch_op("dots_places")
def places(first: Tensor, second: Tensor, n: int) -> Tensor:
    """See `triton_kernels.places`."""
    return kernels.places(first, second, n)


@fake_of(places)
def _(first, second, n):  # type: ignore[no-untyped-def]
    return first.new_empty(n * n + 1, dtype=torch.int32)


@torch_op("dots")
def dots(x: Tensor, head: Tensor | None, place: Tensor, pairs: int) -> Tensor:
    """See `triton_kernels.dots`."""
    return kernels.dots(x, head, place, pairs)


@fake_of(dots)
def _(x, head, place, pairs):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], pairs)


@torch_op("dots_gradient")
def dots_gradient(dy: Tensor, x: Tensor, place: Tensor) -> Tensor:
    """See `triton_kernels.dots_gradient`."""
    return kernels.dots_gradient(dy, x, place)


@fake_of(dots_gradient)
def _(dy, x, place):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)
