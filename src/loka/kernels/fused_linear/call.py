"""The fused layer and its gradient, described without tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import QTensor, Spec

ACTIVATIONS = ("none", "relu", "silu", "hard_swish")
NORM_BLOCK = 256
NORM_EPS = 1e-6
# After BlockNorm the mean square of a block is 1, so no value exceeds sqrt(256) = 16: a static scale of 1/16 (largest value 28) cannot saturate.
NORMALIZED = Spec.parse("e4m3:tensor:static")
NORMALIZED_SCALE = 1 / 16


@dataclass(frozen=True)
class FusedCall:
    """y = activation(norm(a @ b^T + bias)), written as `out`. `keep`: also what backward needs; `transpose`: also y^T, for the next wgrad."""

    m: int
    k: int
    n: int
    a: Spec
    b: Spec
    out: Spec | torch.dtype
    norm_block: int = NORM_BLOCK  # 0: no normalisation
    activation: str = "hard_swish"
    bias: bool = False
    keep: bool = False
    transpose: bool = False

    def __post_init__(self) -> None:
        check_options(self.norm_block, self.activation)
        if self.transpose and not isinstance(self.out, Spec):
            raise ValueError(f"the transpose is an FP8 operand for the next wgrad; out is {self.out}")

    def __str__(self) -> str:
        norm = f"blocknorm{self.norm_block} " if self.norm_block else ""
        out = self.out if isinstance(self.out, Spec) else str(self.out).removeprefix("torch.")
        extras = "".join(f" +{name}" for name in ("bias", "keep", "transpose") if getattr(self, name))
        return f"{self.m}x{self.k}x{self.n} {self.a} @ {self.b} {norm}{self.activation} -> {out}{extras}"


@dataclass(frozen=True)
class FusedResult:
    """What a fused layer leaves behind."""

    y: QTensor | Tensor
    y_t: QTensor | None = None  # [N, M]
    z: QTensor | Tensor | None = (
        None  # normalised pre-activation: E4M3 with the static scale, or 16-bit where there is no norm
    )
    rstd: Tensor | None = None  # [M, blocks], float32


@dataclass(frozen=True)
class GradientCall:
    """From dy to the gradient of the GEMM's output, quantised both ways: g [M, N] for dgrad, g^T [N, M] for wgrad."""

    m: int
    n: int
    spec: Spec
    spec_t: Spec
    norm_block: int = NORM_BLOCK
    activation: str = "hard_swish"
    bias: bool = False
    in_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        check_options(self.norm_block, self.activation)

    def __str__(self) -> str:
        norm = f"blocknorm{self.norm_block} " if self.norm_block else ""
        return f"{self.m}x{self.n} gradient {norm}{self.activation} -> {self.spec} + T {self.spec_t}{' +bias' if self.bias else ''}"


@dataclass(frozen=True)
class GradientResult:
    """The quantised gradient, its transpose, the bias gradient where asked, and the largest magnitude (for the next delayed scale)."""

    g: QTensor
    g_t: QTensor
    amax: Tensor
    bias: Tensor | None = None


def check_options(norm_block: int, activation: str) -> None:
    """Options every backend shares."""
    if norm_block not in (0, NORM_BLOCK):
        raise ValueError(
            f"the norm block is {NORM_BLOCK} (or 0 for none), got {norm_block}; it is part of the model's definition"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
