"""Normalise, activate and quantise in one pass, described without tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import QTensor, Spec

NORMS = ("layer", "rms", "block")
ACTIVATIONS = ("none", "relu", "silu", "hard_swish")
NORM_BLOCK = 256
EPS = {"layer": 1e-5, "rms": 1e-6, "block": 1e-6}


@dataclass(frozen=True)
class NormCall:
    """q = quantize(activation(norm(x + residual))); with `out_dtype` also the same in 16 or 32 bits."""

    m: int
    k: int
    spec: Spec
    norm: str
    activation: str = "none"
    affine: bool = False
    residual: bool = False
    in_dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise ValueError(f"norm {self.norm!r} is not one of {', '.join(NORMS)}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.norm == "block" and self.affine:
            raise ValueError("block norm has no parameters; hint: fold an affine into the next linear (loka.mods)")

    def __str__(self) -> str:
        return f"{self.m}x{self.k} {'residual+' if self.residual else ''}{self.norm} {self.activation} -> {self.spec}"


@dataclass(frozen=True)
class NormResult:
    """The quantised output, and what backward and the residual stream need."""

    q: QTensor
    y: Tensor | None  # the same values before quantisation, where asked
    h: Tensor  # x + residual, in x's type (x itself without a residual)
    mean: Tensor | None  # [M, 1] for layer norm
    rstd: Tensor  # [M, 1], or [M, blocks] for block norm
