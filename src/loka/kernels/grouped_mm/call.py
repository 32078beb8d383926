"""Calls of the mixture-of-experts kernels, described without tensors."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from loka.formats import QTensor, Spec

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class GroupedCall:
    """A call of `grouped_mm` or `grouped_swiglu`: out[m, n] = x[m, k] @ w[e(m), n, k]^T, rows sorted by expert.

    Args:
        m, k, n, experts: sizes of the product. With `swiglu`, n counts the gate and up columns together.
        a, b: Specs of x and w, or None for plain tensors of `in_dtype`.
        in_dtype, out_dtype, fast_accum: as in `grouped_mm`.
        swiglu, out: return silu(gate) * up, half as wide, quantized to the Spec `out` if given.

    Example:
        >>> call = GroupedCall(m=4096, k=1024, n=2816, experts=8)
    """

    m: int
    k: int
    n: int
    experts: int
    a: Spec | None = None
    b: Spec | None = None
    in_dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16
    fast_accum: bool = False
    swiglu: bool = False
    out: Spec | None = None

    def __post_init__(self) -> None:
        if min(self.m, self.k, self.n) < 0 or self.experts < 1:
            raise ValueError(f"grouped GEMM of {self.m}x{self.k}x{self.n} with {self.experts} experts does not exist")
        if self.out_dtype not in DTYPES:
            raise ValueError(f"grouped_mm writes {DTYPES}, got {self.out_dtype}")
        if (self.a is None) != (self.b is None):
            raise ValueError(f"both operands must be quantized or neither, got x {self.a} and w {self.b}")
        if self.swiglu and self.n % 2:
            raise ValueError(f"swiglu needs an even number of columns (gate and up), got {self.n}")

    def __str__(self) -> str:
        kind = str(self.in_dtype).removeprefix("torch.") if self.a is None else f"{self.a} @ {self.b}"
        result = self.out if self.out is not None else str(self.out_dtype).removeprefix("torch.")
        extra = (" swiglu" if self.swiglu else "") + (" fast" if self.fast_accum else "")
        return f"{self.m}x{self.k}x{self.n} of {self.experts} {kind} -> {result}{extra}"


@dataclass(frozen=True)
class SwigluCall:
    """A call of `swiglu_quantize`.

    Args:
        m, f, in_dtype: h is [m, 2 f] in `in_dtype`.
        spec: of the quantized result, or None.

    Example:
        >>> call = SwigluCall(4096, 1408, Spec.parse("e4m3:1x128"))
    """

    m: int
    f: int
    spec: Spec | None
    in_dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        kind = str(self.in_dtype).removeprefix("torch.")
        return f"swiglu {self.m}x2x{self.f} {kind} -> {self.spec if self.spec is not None else kind}"


@dataclass(frozen=True)
class MoveCall:
    """A call of `permute`, `gather` or `combine`.

    Args:
        tokens, top, experts: each of `tokens` tokens visits `top` of `experts` experts.
        dtype: of the rows.
        step: which of the three.
        width: elements of a row.
        spec: of quantized rows, else None.

    Example:
        >>> call = MoveCall(tokens=4096, top=2, experts=8)
    """

    tokens: int
    top: int
    experts: int
    dtype: torch.dtype = torch.bfloat16
    step: Literal["permute", "gather", "combine"] = "permute"
    width: int = 0
    spec: Spec | None = None

    def __str__(self) -> str:
        who = f"{self.step} {self.tokens} tokens to {self.top} of {self.experts}"
        if self.step == "permute":
            return who
        kind = self.spec if self.spec is not None else str(self.dtype).removeprefix("torch.")
        return f"{who}, rows of {self.width} {kind}"


@dataclass(frozen=True)
class Permutation:
    """Visits sorted by expert. Visits of one expert keep their order.

    Args:
        order: int64 [T * top]; row p holds visit order[p] = token * top + choice.
        offsets: int32 [E + 1]; rows offsets[e] to offsets[e + 1] belong to expert e.
        inverse: int64 [T * top]; visit i is in row inverse[i].
        top: experts that each token visits.

    Example:
        >>> token_of_row = permute(ids, experts=8).tokens
    """

    order: Tensor
    offsets: Tensor
    inverse: Tensor
    top: int

    @property
    def tokens(self) -> Tensor:
        """Return the token of each row, int64 [T * top]."""
        return self.order // self.top


def describe(
    x: QTensor | Tensor,
    w: QTensor | Tensor,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
    swiglu: bool = False,
    out: Spec | None = None,
) -> GroupedCall:
    """Check the operands and describe the call."""
    if len(x.shape) != 2 or len(w.shape) != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(f"grouped_mm takes x [M, K] and w [E, N, K], got {tuple(x.shape)} and {tuple(w.shape)}")
    if offsets.shape != (w.shape[0] + 1,) or offsets.dtype != torch.int32:
        raise ValueError(f"offsets must be int32 [{w.shape[0] + 1}], got {offsets.dtype} {tuple(offsets.shape)}")
    if isinstance(x, QTensor) != isinstance(w, QTensor):
        raise ValueError(f"x and w are both QTensors or neither, got {type(x).__name__} and {type(w).__name__}")
    if isinstance(x, QTensor):
        assert isinstance(w, QTensor)
        specs: tuple[Spec | None, Spec | None] = (x.spec, w.spec)
        dtype = x.data.dtype
    else:
        assert isinstance(w, Tensor)
        specs, dtype = (None, None), x.dtype
        if w.dtype != dtype:
            raise ValueError(f"x and w must have one dtype, got {dtype} and {w.dtype}")
    m, k = x.shape
    return GroupedCall(m, k, w.shape[1], w.shape[0], *specs, dtype, out_dtype, fast_accum, swiglu, out)
