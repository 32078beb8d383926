"""A call of `dots`, described without tensors."""

from dataclasses import dataclass

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class DotsCall:
    """A call of `dots`.

    Args:
        b, n, d, dtype: x is [b, n, d] in `dtype`.
        pairs: number of products per example.

    Example:
        >>> call = DotsCall(b=8192, n=27, d=128, pairs=351)
    """

    b: int
    n: int
    d: int
    pairs: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dots multiplies {', '.join(map(str, DTYPES))}, got {self.dtype}")

    def __str__(self) -> str:
        return f"{self.b}x{self.n}x{self.d} {self.pairs} pairs {str(self.dtype).removeprefix('torch.')}"
