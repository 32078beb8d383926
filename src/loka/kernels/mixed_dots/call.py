"""A call of `mixed_dots`, described without tensors."""

from dataclasses import dataclass

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class MixedDotsCall:
    """A call of `mixed_dots`.

    Args:
        b, n, d, dtype: x is [b, n, d] in `dtype`.
        k: number of mixtures.

    Example:
        >>> call = MixedDotsCall(b=8192, n=64, d=128, k=24)
    """

    b: int
    n: int
    d: int
    k: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"mixed_dots multiplies {', '.join(map(str, DTYPES))}, got {self.dtype}")

    def __str__(self) -> str:
        return f"{self.b}x{self.n}x{self.d} k {self.k} {str(self.dtype).removeprefix('torch.')}"
