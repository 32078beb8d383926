"""A call of SiLU attention, described without tensors."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionCall:
    """A call of `silu_attention`.

    Args:
        rows, length: number of ragged rows, and length of the longest.
        heads, d_qk, d_v: number of heads, and head widths of q and k, and of v.
        dtype: of q, k and v.

    Example:
        >>> call = AttentionCall(rows=128, length=200, heads=8, d_qk=64, d_v=64)
    """

    rows: int
    length: int
    heads: int
    d_qk: int
    d_v: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.rows} rows <= {self.length}, {self.heads} heads, qk {self.d_qk}, v {self.d_v}, {kind}"
