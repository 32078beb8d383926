"""The Triton router as torch ops, so that torch.compile does not trace the launch code."""

import torch

from loka.kernels.op import fake_of, torch_op
from loka.kernels.route import triton_kernels as kernels

route = torch_op("route")(kernels.route)


route_sorted = torch_op("route_sorted")(kernels.route_sorted)


@fake_of(route_sorted)
def _(x, weight, balance, top, always):  # type: ignore[no-untyped-def]
    tokens, columns = x.shape[0], top + int(always)
    order, inverse = (x.new_empty(tokens * columns, dtype=torch.int64) for _ in range(2))
    offsets = x.new_empty(weight.shape[0] + int(always) + 1, dtype=torch.int32)
    return order, offsets, inverse, x.new_empty(tokens, columns, dtype=torch.float32)


@fake_of(route)
def _(x, weight, balance, top, always):  # type: ignore[no-untyped-def]
    shape = (x.shape[0], top + int(always))
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.float32)
