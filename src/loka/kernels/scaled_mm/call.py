"""The GEMM of quantised operands, described without tensors."""

from dataclasses import dataclass

import torch

from loka.formats import QTensor, Spec

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class MatmulCall:
    """out[M, N] = a[M, K] @ b[N, K]^T. Both operands are K-major, as FP8 tensor cores want them."""

    m: int
    k: int
    n: int
    a: Spec
    b: Spec
    out_dtype: torch.dtype = torch.bfloat16
    fast_accum: bool = False

    def __post_init__(self) -> None:
        if min(self.m, self.k, self.n) < 0:
            raise ValueError(f"negative GEMM shape {self.m} x {self.k} x {self.n}")
        if self.out_dtype not in OUT_DTYPES:
            raise ValueError(f"scaled_mm writes {OUT_DTYPES}, got {self.out_dtype}")

    def __str__(self) -> str:
        accumulation = " fast" if self.fast_accum else ""
        return f"{self.m}x{self.k}x{self.n} {self.a} @ {self.b} -> {str(self.out_dtype).removeprefix('torch.')}{accumulation}"

    @classmethod
    def of(cls, a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> "MatmulCall":
        """Describe a call by its operands."""
        if a.data.dim() != 2 or b.data.dim() != 2 or a.shape[1] != b.shape[1]:
            raise ValueError(f"scaled_mm takes a [M, K] and b [N, K], got {tuple(a.shape)} and {tuple(b.shape)}")
        return cls(a.shape[0], a.shape[1], b.shape[0], a.spec, b.spec, out_dtype, fast_accum)
