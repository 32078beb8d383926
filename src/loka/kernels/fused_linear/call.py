"""The fused layer and its gradient, described without tensors."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from loka.formats import E4M3, TENSOR, QTensor, Spec
from loka.kernels.activation import LEAK as SLOPE
from loka.kernels.activation import check_activation

NORM_BLOCK = 256
NORMALIZED = Spec.parse("e4m3:tensor:static")


# Functions that return literals, for code that torch.compile traces: see `loka.formats.Format.max`.
def norm_eps() -> float:
    """Return what BlockNorm adds to a mean square."""
    return 1e-6


def normalized_scale() -> float:
    """Return the scale of what BlockNorm returns.

    A block's mean square is 1 then, so |z| <= sqrt(256) = 16: a scale of 1/16 (up to 28) cannot saturate.
    """
    return 1 / 16


NORM_EPS, NORMALIZED_SCALE = norm_eps(), normalized_scale()

Kept = Literal["nothing", "y", "normalized", "scaled", "bf16"]
_FROM_OUTPUT = ("relu", "leaky_relu", "tanh", "sigmoid")


def kept_form(norm_block: int, activation: str, out: Spec | torch.dtype) -> Kept:
    """Return in which form forward keeps z for backward.

    nothing      no norm, no activation: the gradient passes through
    normalized   after a norm: z in E4M3 with the static scale (|z| <= 16)
    y            no norm, E4M3 output with a given scale, derivative known from the sign of y (relu, leaky_relu) or its
                 value (tanh, sigmoid): the output itself, nothing more is written
    scaled       no norm, the same output, any other activation: z in E4M3 with the output's scale, which comes from |z|
    bf16         no norm, any other output: z in bf16
    """
    if norm_block:
        return "normalized"
    if activation == "none":
        return "nothing"
    if isinstance(out, Spec) and (out.format, out.block) == (E4M3, TENSOR) and out.mode != "dynamic":
        return "y" if activation in _FROM_OUTPUT else "scaled"
    return "bf16"


def derived_from_output(norm_block: int, activation: str, z: QTensor | Tensor | None) -> bool:
    """Return True if y was kept and the derivative is computed from its value (tanh, sigmoid), not from a sign."""
    return norm_block == 0 and activation in ("tanh", "sigmoid") and isinstance(z, QTensor)


def dropped_in_output(norm_block: int, activation: str, z: QTensor | Tensor | None) -> bool:
    """Return True if backward need not redraw dropout: relu's y was kept, and its dropped zeros have slope 0."""
    return norm_block == 0 and activation == "relu" and isinstance(z, QTensor)


@dataclass(frozen=True)
class FusedCall:
    """One call of `fused_linear`, which documents the fields: y = activation(norm(a @ b^T + bias)) as `out`."""

    m: int
    k: int
    n: int
    a: Spec
    b: Spec
    out: Spec | torch.dtype
    norm_block: int = NORM_BLOCK  # 0: no norm
    activation: str = "hard_swish"
    bias: bool = False
    keep: bool = False
    transpose: bool = False
    amax: bool = False
    slope: float = SLOPE
    dropout: bool = False

    def __post_init__(self) -> None:
        check_options(self.norm_block, self.activation, self.slope)
        if self.transpose and not isinstance(self.out, Spec):
            raise ValueError(f"the transpose is an FP8 operand for the next wgrad; out is {self.out}")

    def __str__(self) -> str:
        norm = f"blocknorm{self.norm_block} " if self.norm_block else ""
        out = self.out if isinstance(self.out, Spec) else str(self.out).removeprefix("torch.")
        extras = "".join(
            f" +{name}" for name in ("bias", "keep", "transpose", "amax", "dropout") if getattr(self, name)
        )
        chosen = spell_activation(self.activation, self.slope)
        return f"{self.m}x{self.k}x{self.n} {self.a} @ {self.b} {norm}{chosen} -> {out}{extras}"


@dataclass(frozen=True)
class FusedResult:
    """The results of `fused_linear`."""

    y: QTensor | Tensor
    y_t: QTensor | None = None  # [N, M]
    z: QTensor | Tensor | None = None  # what backward needs of the pre-activation (`kept_form`)
    rstd: Tensor | None = None  # [M, blocks], float32


@dataclass(frozen=True)
class GradientCall:
    """One call of `fused_linear_gradient`: g [M, N] as `spec` for dgrad, g^T [N, M] as `spec_t` for wgrad."""

    m: int
    n: int
    spec: Spec
    spec_t: Spec
    norm_block: int = NORM_BLOCK
    activation: str = "hard_swish"
    bias: bool = False
    in_dtype: torch.dtype = torch.bfloat16
    slope: float = SLOPE
    dropout: bool = False

    def __post_init__(self) -> None:
        check_options(self.norm_block, self.activation, self.slope)

    def __str__(self) -> str:
        norm = f"blocknorm{self.norm_block} " if self.norm_block else ""
        chosen = spell_activation(self.activation, self.slope)
        extras = "".join(f" +{name}" for name in ("bias", "dropout") if getattr(self, name))
        return f"{self.m}x{self.n} gradient {norm}{chosen} -> {self.spec} + T {self.spec_t}{extras}"


@dataclass(frozen=True)
class GradientResult:
    """The quantized gradient, its transpose, its amax for the next delayed scale, the bias gradient if requested."""

    g: QTensor
    g_t: QTensor
    amax: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class DgradCall:
    """One call of `fused_linear_dgrad`: (g [M, K] @ w_t [N, K]^T) * activation'(z [M, N]), written as `spec` both ways.

    `z`: the form in which forward kept z ("nothing" without an activation).
    """

    m: int
    k: int
    n: int
    g: Spec
    w_t: Spec
    spec: Spec
    activation: str = "relu"
    z: Kept = "y"
    bias: bool = False
    amax: bool = False
    slope: float = SLOPE
    dropout: bool = False

    def __post_init__(self) -> None:
        check_options(0, self.activation, self.slope)
        if (self.z == "nothing") != (self.activation == "none"):
            raise ValueError(
                f"activation {self.activation} needs {'no' if self.activation == 'none' else 'a'} kept z, got {self.z}"
            )

    @property
    def z_bytes(self) -> int:
        """Bytes per element of z."""
        return {"nothing": 0, "bf16": 2}.get(self.z, 1)

    def __str__(self) -> str:
        extras = "".join(f" +{name}" for name in ("bias", "amax", "dropout") if getattr(self, name))
        chosen = spell_activation(self.activation, self.slope)
        return (
            f"{self.m}x{self.k}x{self.n} dgrad {self.g} @ {self.w_t} {chosen} from {self.z} -> {self.spec} + T{extras}"
        )


@dataclass(frozen=True)
class DgradResult:
    """The quantized gradient of the previous layer, its transpose, and the bias gradient (float32) if requested."""

    g: QTensor
    g_t: QTensor
    bias: Tensor | None = None


def spell_activation(activation: str, slope: float) -> str:
    """Return the activation's name, with leaky_relu's slope if it is not the default."""
    return f"{activation}({slope:g})" if activation == "leaky_relu" and slope != SLOPE else activation


def check_options(norm_block: int, activation: str, slope: float = SLOPE) -> None:
    """Raise ValueError for invalid options."""
    if norm_block not in (0, NORM_BLOCK):
        raise ValueError(
            f"the norm block is {NORM_BLOCK} (or 0 for none), got {norm_block}; it is part of the model's definition"
        )
    check_activation(activation)
    if not 0 <= slope <= 1:
        raise ValueError(
            f"leaky_relu's slope is between 0 and 1, got {slope}: outside, |y| <= |z| fails and the sign of y does not tell that of z"
        )


def check_amax(amax: Tensor | None, device: torch.device) -> None:
    """Raise ValueError unless amax is a buffer that an epilogue can raise."""
    if amax is not None and (amax.dtype != torch.float32 or amax.numel() != 1 or amax.device != device):
        raise ValueError(
            f"amax is one float32 number on {device} that is raised in place, got {tuple(amax.shape)} of {amax.dtype} on {amax.device}"
        )
