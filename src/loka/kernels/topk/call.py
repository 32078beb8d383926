"""Selections, described without tensors."""

from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TopkCall:
    """The k largest of each of `rows` rows of n scores."""

    rows: int
    n: int
    k: int
    dtype: torch.dtype = torch.float32
    sorted: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.k <= self.n:
            raise ValueError(f"topk takes k between 0 and the {self.n} scores of a row, got {self.k}")
        if self.dtype not in DTYPES:
            raise ValueError(f"topk compares {', '.join(map(str, DTYPES))}, got {self.dtype}")

    def __str__(self) -> str:
        order = "" if self.sorted else " unsorted"
        return f"{self.k} of {self.rows}x{self.n} {str(self.dtype).removeprefix('torch.')}{order}"


@dataclass(frozen=True)
class BeamTopkCall:
    """The k best continuations of all beams of each request: scores over beams x codes that are never written down."""

    requests: int
    beams: int
    codes: int
    k: int
    dtype: torch.dtype = torch.float32
    masked: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.k <= self.beams * self.codes:
            raise ValueError(
                f"beam_topk takes k between 0 and {self.beams} beams x {self.codes} codes, got {self.k}; hint: min(k, beams * codes)"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"beam_topk reads logits of {', '.join(map(str, DTYPES))}, got {self.dtype}")

    def __str__(self) -> str:
        mask = " masked" if self.masked else ""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.k} of {self.requests}x({self.beams} beams x {self.codes}) {kind}{mask}"
