"""The Triton kernels of `dots` as torch ops."""

import torch

from loka.kernels.dots import triton_kernels as kernels
from loka.kernels.op import fake_of, torch_op

places = torch_op("dots_places")(kernels.places)


@fake_of(places)
def _(first, second, n):  # type: ignore[no-untyped-def]
    return first.new_empty(n * n + 1, dtype=torch.int32)


dots = torch_op("dots")(kernels.dots)


@fake_of(dots)
def _(x, head, place, pairs):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], pairs)


dots_gradient = torch_op("dots_gradient")(kernels.dots_gradient)


@fake_of(dots_gradient)
def _(dy, x, place):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)
