"""The Triton router as a torch op, so that torch.compile sees a call and not Python."""

import torch
from torch import Tensor

from loka.kernels.route import triton_kernels as kernels


@torch.library.custom_op("loka::route", mutates_args=())
def route(x: Tensor, weight: Tensor, balance: Tensor, top: int, always: bool) -> tuple[Tensor, Tensor]:
    """See `triton_kernels.route`."""
    return kernels.route(x, weight, balance, top, always)


@route.register_fake
def _(x, weight, balance, top, always):  # type: ignore[no-untyped-def]
    shape = (x.shape[0], top + int(always))
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.float32)
