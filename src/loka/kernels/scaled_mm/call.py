"""The GEMM of quantized operands, described without tensors: how it runs (`GemmWay`), and one call (`MatmulCall`)."""

from dataclasses import dataclass, field

import torch

from loka.formats import QTensor, Spec

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class GemmWay:
    """How one GEMM runs: the Specs of its K-major operands, the accumulation and the backend.

    The same value is used from the recipe table to the kernel; records carry it as strings.

    Args:
        a: Spec of the left operand, [M, K].
        b: Spec of the right operand, [N, K].
        fast_accum: allow sums to stay in the tensor cores.
        backend: a name, checked where it is bound, or "auto". "auto" is resolved when a module is placed
            (`loka.lowp.auto`) but stays "auto", so that a module that moves is resolved again.
        picked: what "auto" was resolved to, as text.
        kernels: what "auto" was resolved to, as (output dtype, backend) pairs.

    Example:
        >>> str(GemmWay.parse("e4m3:row@e4m3:row", fast_accum=True).on("torch"))
        'e4m3:row@e4m3:row/torch'
    """

    a: Spec
    b: Spec
    fast_accum: bool = False
    backend: str = "auto"
    picked: str | None = field(default=None, compare=False)
    kernels: tuple[tuple[torch.dtype, str], ...] = field(default=(), compare=False)

    @classmethod
    def parse(cls, text: str, *, fast_accum: bool = False) -> "GemmWay":
        """Parse "a@b" or "a@b/backend"."""
        operands, _, backend = text.partition("/")
        a, _, b = operands.partition("@")
        return cls(Spec.parse(a), Spec.parse(b), fast_accum, backend or "auto")

    def on(self, backend: str) -> "GemmWay":
        """Return the same GEMM on another backend, with nothing resolved yet."""
        return GemmWay(self.a, self.b, self.fast_accum, backend)

    def preferred(self, dtype: torch.dtype) -> str | None:
        """Return the backend that "auto" was resolved to for an output dtype, None if it was not."""
        for known, name in self.kernels:
            if known == dtype:
                return name
        return None

    @property
    def of_weight(self) -> "GemmWay":
        """The way to lay a weight (operand b) out for: if "auto" was resolved, its backend for autocast's dtype."""
        return self.on(self.kernels[-1][1]) if self.backend == "auto" and self.kernels else self.on(self.backend)

    def call(self, m: int, k: int, n: int, out_dtype: torch.dtype = torch.bfloat16) -> "MatmulCall":
        """Return the call for a shape."""
        return MatmulCall(m, k, n, self.a, self.b, out_dtype, self.fast_accum)

    def __str__(self) -> str:
        return f"{self.a}@{self.b}/{self.backend}" + (f" ({self.picked})" if self.picked else "")


@dataclass(frozen=True)
class MatmulCall:
    """One call, out[M, N] = a[M, K] @ b[N, K]^T: a `GemmWay` with a shape, as passed to a backend's `supports`.

    Args:
        m, k, n: the shape. Both operands are K-major, as FP8 tensor cores require.
        a, b: the Specs of the operands.
        out_dtype: one of OUT_DTYPES.
        fast_accum: allow sums to stay in the tensor cores.

    Example:
        >>> MatmulCall(1024, 512, 256, Spec.parse("e4m3:row"), Spec.parse("e4m3:row"))
    """

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
        """Return the call for these operands."""
        if a.data.dim() != 2 or b.data.dim() != 2 or a.shape[1] != b.shape[1]:
            raise ValueError(f"scaled_mm takes a [M, K] and b [N, K], got {tuple(a.shape)} and {tuple(b.shape)}")
        return cls(a.shape[0], a.shape[1], b.shape[0], a.spec, b.spec, out_dtype, fast_accum)
