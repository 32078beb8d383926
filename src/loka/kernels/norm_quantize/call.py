"""`norm_quantize` and its gradient, described without tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import TENSOR, QTensor, Spec
from loka.kernels.activation import check_activation
from loka.kernels.fused_linear.call import NORM_EPS

NORMS = ("layer", "rms", "block")
MOST_HEADS = 8  # each is a reduction over the row, after the norm
EPS = {"layer": 1e-5, "rms": 1e-6, "block": NORM_EPS}


@dataclass(frozen=True)
class NormCall:
    """One call of `norm_quantize`, which documents the fields. `kept` is the Spec of an FP8 x."""

    m: int
    k: int
    spec: Spec | None
    norm: str
    activation: str = "none"
    affine: bool = False
    residual: bool = False
    in_dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    transpose: bool = False
    kept: Spec | None = None
    dropout: bool = False
    heads: int = 0

    def __post_init__(self) -> None:
        _check(self.norm, self.activation, affine=self.affine, kept=self.kept)
        if self.spec is None and self.out_dtype is None and not self.heads:
            raise ValueError(
                "norm_quantize was asked for nothing: give a spec, an out_dtype, a head, or several of them"
            )
        if self.heads > MOST_HEADS:
            raise ValueError(
                f"a head has at most {MOST_HEADS} rows here, got {self.heads}; hint: a GEMM after the norm"
            )
        if self.kept is not None and self.residual:
            raise ValueError(f"x is {self.kept}: a sum with a residual is no FP8 tensor; hint: dequantize x first")
        if self.transpose and not _given(self.spec):
            raise ValueError(
                f"the transpose shares one given scale with q, {self.spec} does not; hint: e4m3:tensor:static"
            )

    def __str__(self) -> str:
        x = f" {self.kept}" if self.kept else ""
        wide = (
            f"{self.heads} dots"
            if self.heads and self.out_dtype is None
            else str(self.out_dtype).removeprefix("torch.")
        )
        out = self.spec or wide
        sources = f"{x} {'residual+' if self.residual else ''}{self.norm} {self.activation}"
        return f"{self.m}x{self.k}{sources} -> {out}{' + T' if self.transpose else ''}{' +dropout' if self.dropout else ''}"


@dataclass(frozen=True)
class NormGradientCall:
    """One call of `norm_gradient`, which documents the fields. `kept` is the Spec of an FP8 h, `residual` means dh."""

    m: int
    k: int
    norm: str
    activation: str = "none"
    affine: bool = False
    residual: bool = False
    in_dtype: torch.dtype = torch.bfloat16
    spec: Spec | None = None
    kept: Spec | None = None
    dropout: bool = False

    def __post_init__(self) -> None:
        _check(self.norm, self.activation, affine=self.affine, kept=self.kept)
        if self.spec is not None and not _given(self.spec):
            raise ValueError(f"an FP8 gradient takes one given scale, {self.spec} does not; hint: e4m3:tensor:delayed")

    def __str__(self) -> str:
        x = f" {self.kept}" if self.kept else ""
        out = f"{self.spec} + T" if self.spec else str(self.in_dtype).removeprefix("torch.")
        extras = f"{' +dh' if self.residual else ''}{' +dropout' if self.dropout else ''}"
        return f"{self.m}x{self.k}{x} gradient {self.norm} {self.activation}{extras} -> {out}"


def _check(norm: str, activation: str, *, affine: bool, kept: Spec | None) -> None:
    if norm not in NORMS:
        raise ValueError(f"norm {norm!r} is not one of {', '.join(NORMS)}")
    check_activation(activation)
    if norm == "block" and affine:
        raise ValueError("block norm has no parameters; hint: fold an affine into the next linear (loka.mods)")
    if kept is not None and kept.block not in (TENSOR, Spec.parse("e4m3:row").block):
        raise ValueError(f"an x in FP8 has one scale, or one a row, not {kept}")


def _given(spec: Spec | None) -> bool:
    return spec is not None and spec.block == TENSOR and spec.mode != "dynamic"


@dataclass(frozen=True)
class NormResult:
    """The output, and what backward and the residual stream need."""

    q: QTensor | None  # None without a spec
    y: Tensor | None  # the output before quantization, if requested
    h: Tensor | QTensor  # x + residual, in x's dtype (x itself without a residual)
    mean: Tensor | None  # [M, 1] for layer norm
    rstd: Tensor  # [M, 1], or [M, blocks] for block norm
    q_t: QTensor | None = None  # q^T [K, M], if requested
    dots: Tensor | None = None  # the output before quantization times a head, [M, N] in float32, if requested


@dataclass(frozen=True)
class NormGradient:
    """dx (= dresidual), with a `spec` in FP8 along with dx^T [K, M]; parameter gradients in the parameters' dtypes."""

    dx: Tensor | QTensor
    dx_t: QTensor | None
    weight: Tensor | None
    bias: Tensor | None
