"""The reference for lookups: float32 rows times their weights, summed in float32 in item order, rounded once."""

import torch
from torch import Tensor

from loka.kernels.backend import accept_every_call
from loka.kernels.embedding_bag.rows import Rows

supports = accept_every_call


def run(
    rows: Rows,
    indices: Tensor,
    offsets: Tensor | None,
    *,
    weights: Tensor | None = None,
    mode: str = "sum",
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """See `loka.kernels.embedding_bag.embedding_bag`."""
    values = rows.take(indices)
    if offsets is None:
        return values.to(out_dtype)
    if weights is not None:
        values = values * weights.float().unsqueeze(1)
    lengths = offsets.diff()
    bag = torch.repeat_interleave(torch.arange(len(lengths), device=indices.device), lengths)
    total = values.new_zeros(len(lengths), rows.width).index_add_(0, bag, values)
    if mode == "mean":
        total = total / lengths.clamp(min=1).unsqueeze(1)
    return total.to(out_dtype)
