"""A call of `masked_attention`, described without tensors."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MaskedAttentionCall:
    """A call of `masked_attention`.

    Args:
        rows, queries, keys: batch size, and queries and keys per row.
        heads, shared, d: query heads, heads of keys and values, and their width.
        dtype: of q, k and v.

    Example:
        >>> call = MaskedAttentionCall(rows=512, queries=200, keys=200, heads=8, shared=8, d=64)
    """

    rows: int
    queries: int
    keys: int
    heads: int
    shared: int
    d: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.rows} rows, {self.queries} x {self.keys}, {self.heads} heads on {self.shared}, d {self.d}, {kind}"
        )
