"""A call of `embedding_bag`, described without tensors."""

from dataclasses import dataclass

import torch

MODES = ("sum", "mean", "item")


@dataclass(frozen=True)
class BagCall:
    """A call of `embedding_bag`.

    Args:
        rows, width, kind: size and row format of the table.
        bags, items: bags of the result and rows looked up; equal with `mode="item"`.
        mode: `sum`, `mean` or `item` (no pooling).
        weighted, hot: items have weights; some rows are kept in float32 (`Rows.hot`).
        out_dtype: of the result.

    Example:
        >>> call = BagCall(rows=1_000_000, width=64, bags=4096, items=81920, kind="int8:row")
    """

    rows: int
    width: int
    bags: int
    items: int
    kind: str = "float32"
    mode: str = "sum"
    weighted: bool = False
    hot: bool = False
    out_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(
                f"mode must be {', '.join(MODES)}, not {self.mode!r}; max has no gradient for most of its items"
            )
        if self.weighted and self.mode != "sum":
            raise ValueError(f"per-sample weights belong to sums, as in torch, not to {self.mode!r}")

    def __str__(self) -> str:
        options = [self.mode] + ["weighted"] * self.weighted + ["hot rows"] * self.hot
        out = str(self.out_dtype).removeprefix("torch.")
        return (
            f"{self.items} of {self.rows}x{self.width} {self.kind} in {self.bags} bags ({', '.join(options)}) -> {out}"
        )
