"""Calls of the top-k kernels, described without tensors."""

from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TopkCall:
    """A call of `topk`.

    Args:
        rows, n, dtype: scores are [rows, n] in `dtype`.
        k, sorted: as in `topk`.

    Example:
        >>> call = TopkCall(rows=64, n=100_000, k=100)
    """

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
    """A call of `beam_topk`.

    Args:
        requests, beams, codes, dtype: logits are [requests, beams, codes] in `dtype`.
        k: how many to select per request.
        masked: whether there is a mask.

    Example:
        >>> call = BeamTopkCall(requests=8, beams=512, codes=8192, k=512)
    """

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
