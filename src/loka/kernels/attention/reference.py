"""The reference for SiLU attention: plain torch, any float dtype, gradients by autograd.

For every ragged row of n positions and every head, causal with the position itself included (j <= i):

    s_ij  = alpha <q_i, k_j> + position_bias[i - j] + time_bias[bucket(query_time_i - time_j)]
    out_i = (1 / divisor) sum_{j <= i} silu(s_ij) v_j            divisor: a constant, or the row's own length n

There is no softmax: weights are not normalized over keys, so the output reflects how many keys matched and how well.

    bucket(dt) = two buckets per octave of max(|dt|, 1): 1, 1.5, 2, 3, 4, 6, 8, ...

Buckets are read from the bits of the float32 value (exponent and first mantissa bit), so all backends agree exactly; a
computed logarithm would differ at the edges. A distance beyond the last entry of a bias uses the last entry.

Rows are padded to [B, L] and masked: this backend is written for clarity, not for speed.
"""

import torch
from torch import Tensor

from loka.kernels.backend import accept_every_call

supports = accept_every_call


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_length: int,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times: Tensor | None = None,
    query_times: Tensor | None = None,
    divisor: float | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """See `loka.kernels.attention.silu_attention`."""
    row, place = locate(offsets, q.shape[0])
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = offsets.shape[0] - 1
    dense_q, dense_k, dense_v = (_pad(t.to(wide), row, place, rows, max_length) for t in (q, k, v))
    s = alpha * torch.einsum("bihd,bjhd->bhij", dense_q, dense_k)
    steps = torch.arange(max_length, device=q.device)
    distance = steps[:, None] - steps[None, :]
    if position_bias is not None:
        s = s + position_bias.to(wide)[:, distance.clamp(0, position_bias.shape[1] - 1)]
    if time_bias is not None:
        assert times is not None  # the facade checked it
        asked = times if query_times is None else query_times
        dense_asked, dense_times = (_pad(t, row, place, rows, max_length) for t in (asked, times))
        which = time_bucket(dense_asked[:, :, None] - dense_times[:, None, :], time_bias.shape[1])
        s = s + time_bias.to(wide)[:, which].transpose(0, 1)
    lengths = offsets[1:] - offsets[:-1]
    n = lengths.clamp(min=1).to(wide) if divisor is None else torch.full_like(lengths, 1, dtype=wide) * divisor
    weights = torch.where(distance >= 0, s * torch.sigmoid(s), 0.0) / n[:, None, None, None]
    return torch.einsum("bhij,bjhd->bihd", weights, dense_v)[row, place].to(v.dtype)


def locate(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Find the row and the place in the row of every position of a ragged tensor.

    Args:
        offsets, total: int64 [rows + 1], from 0 to `total`.

    Returns:
        Two int64 tensors [total].

    Example:
        >>> row, place = locate(torch.tensor([0, 2, 5]), 5)  # [0, 0, 1, 1, 1] and [0, 1, 0, 1, 2]
    """
    index = torch.arange(total, device=offsets.device)
    row = torch.bucketize(index, offsets[1:], right=True)
    return row, index - offsets[row]


def time_bucket(dt: Tensor, buckets: int) -> Tensor:
    """Return 2 floor(log2 |dt|) + the first mantissa bit, from the float32 bits of |dt|: two buckets per octave."""
    bits = dt.to(torch.float32).abs().clamp(min=1).view(torch.int32)
    return ((bits >> 22) - (127 << 1)).clamp(max=buckets - 1)


def _pad(values: Tensor, row: Tensor, place: Tensor, rows: int, length: int) -> Tensor:
    dense = values.new_zeros(rows, length, *values.shape[1:])
    return dense.index_put((row, place), values)
