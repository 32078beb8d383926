"""SiLU attention over ragged rows, described without tensors."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionCall:
    """rows x heads of at most `length` positions, head widths d_qk and d_v."""

    rows: int
    length: int
    heads: int
    d_qk: int
    d_v: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.rows} rows <= {self.length}, {self.heads} heads, qk {self.d_qk}, v {self.d_v}, {kind}"
