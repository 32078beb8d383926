"""A lookup in an embedding table, described without tensors."""

from dataclasses import dataclass

import torch

MODES = ("sum", "mean", "item")


@dataclass(frozen=True)
class BagCall:
    """`items` rows of `width` out of `rows`, added up or averaged in `bags` bags, or each on its own (`mode="item"`, bags == items)."""

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
                f"bags are pooled by {', '.join(MODES)}, not {self.mode!r}; max has no gradient for all its items"
            )
        if self.weighted and self.mode != "sum":
            raise ValueError(f"weights per sample belong to sums, as in torch, not to {self.mode!r}")

    def __str__(self) -> str:
        options = [self.mode] + ["weighted"] * self.weighted + ["hot rows"] * self.hot
        out = str(self.out_dtype).removeprefix("torch.")
        return (
            f"{self.items} of {self.rows}x{self.width} {self.kind} in {self.bags} bags ({', '.join(options)}) -> {out}"
        )
