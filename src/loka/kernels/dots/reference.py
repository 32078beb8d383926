"""The reference for pairwise products, in plain torch.

y[b, p]  = sum_d x[b, first[p], d] x[b, second[p], d]
dx[b, i] = sum over the pairs p that contain i of dy[b, p] x[b, the other vector of p]
"""

import torch
from torch import Tensor

from loka.kernels.backend import accept_every_call

supports = accept_every_call


def run(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """See `loka.kernels.dots.dots`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = torch.bmm(wide, wide.mT)[:, first, second]
    return y if y.dtype == x.dtype else y.to(x.dtype)


def gradient(dy: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return dx [B, n, d]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    grid = torch.zeros(x.shape[0], x.shape[1], x.shape[1], dtype=wide.dtype, device=x.device)
    # accumulating, as in torch's gradient of an index
    grid = torch.ops.aten.index_put(grid, [None, first, second], dy.to(wide.dtype), True)
    dx = torch.bmm(grid + grid.mT, wide)
    return dx if dx.dtype == x.dtype else dx.to(x.dtype)
