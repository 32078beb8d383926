"""Softmax attention over masked keys, described without tensors."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MaskedAttentionCall:
    """rows of `queries` queries and `keys` keys, `heads` heads of queries on `shared` heads of keys and values, all `d` wide."""

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
