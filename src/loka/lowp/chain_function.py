"""The maths of a chain in FP8, forward and backward: its layers, its precision and its tensors.

Layer i of L, where x_0 is quantized once and every later x_i is written in FP8 by the kernel before it:

    p_i = x_i W_i^T (+ b_i),   z_i = norm(p_i),   x_{i+1} = activation(z_i) (* kept / (1 - p), dropout in training)

The last layer writes y in 16-bit. The scale of x_{i+1} depends on what is between two linears:

    block norm              static 1/16, since no value exceeds sqrt(256) = 16; one kernel with the norm in its epilogue
    layer or rms norm       delayed or calibrated; a GEMM, then one kernel that normalizes, activates and quantizes
    only an activation      delayed or calibrated; one kernel, whose epilogue also collects the largest |z|

Delayed scales come from the largest magnitudes of the last steps (`loka.lowp.scaling`). A chain without a history is
not `primed`: it writes 16-bit between its layers and computes each scale from the tensor itself, which is slower but
safe.

Dropout is drawn by the kernel that activates (`loka.kernels.dropout`), from a seed per call of the chain and the index
of the link; backward draws the same again, so no mask is saved. Scales are those of the values before dropout and its 1
/ (1 - p), so p may change from step to step.

Backward, from dy down, where g_i is the gradient of p_i quantized both ways:

    dW_i = g_i^T x_i
    g_{i-1} = (g_i W_i) * activation'(z_{i-1})          one kernel, if there is no norm and gradient scales are delayed
    dx_{i} = g_i W_i in 16-bit, then the norm's gradient             otherwise

The kernels are called in `chain_forward` and `chain_backward`. These are plain functions of tensors and a Layout, so
that a node that does more than a chain (`loka.lowp.interaction`) can use them too; `chain_node` has the node of a
chain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from loka.formats import Spec
from loka.kernels import registry
from loka.kernels.dropout import Dropout

GradientScale = Literal["tensor", "block", "delayed"]
NormKind = Literal["none", "block", "layer", "rms"]
TENSOR_SPEC = Spec.parse("e4m3:tensor")
STATIC_SPEC = Spec.parse("e4m3:tensor:static")
ROW_SPEC = Spec.parse("e4m3:row")
SQUARE_SPEC = Spec.parse("e4m3:128x128")
GROUP_SPEC = Spec.parse("e4m3:1x128")
GIVEN_SPECS = {name: Spec.parse(f"{name}:tensor:static") for name in ("e4m3", "e5m2")}


@dataclass(frozen=True)
class Link:
    """One layer of a chain.

    Args:
        linear: name of the nn.Linear.
        norm: what normalizes its output; `block` is BlockNorm over 256 columns.
        activation: the kernels' name of the activation.
        eps: of a layer or rms norm.
        slope: of a leaky ReLU.
        dropout: p of the dropout after it when the chain was found, or None. At each call the dropout module decides.

    Example:
        >>> Link("top.0", norm="layer", activation="relu")
    """

    linear: str
    norm: NormKind = "none"
    activation: str = "none"
    eps: float = 1e-5
    slope: float = 0.01
    dropout: float | None = None

    @property
    def bounded(self) -> bool:
        """Whether no output value exceeds 16."""
        return self.norm == "block"

    @property
    def floor(self) -> float:
        """The least magnitude to scale for: sigmoid(0) is 1/2, and would saturate with a scale from a small |z|."""
        return 1.0 if self.activation == "sigmoid" and self.norm == "none" else 0.0

    @property
    def plain(self) -> bool:
        """Whether nothing follows the linear."""
        return self.norm == "none" and self.activation == "none"


@dataclass(frozen=True)
class ChainPrecision:
    """How the gradients of a chain are scaled and rounded, and which kernels run.

    Args:
        gradient: how gradients are scaled: "tensor" (one scale, from the tensor's own amax), "block" (one per 128
            values) or "delayed" (one scale, from the last steps).
        gradient_format: e4m3 or e5m2.
        fused_backend, gemm_backend, quantize_backend: kernels by name, or "auto".
        fast_accum: use the tensor cores' fast accumulation, except for weight gradients: sums over the batch are long
            and often of one sign, and Hopper keeps about 14 bits of them.

    Example:
        >>> ChainPrecision(gradient="delayed")
    """

    gradient: GradientScale = "tensor"
    gradient_format: str = "e4m3"
    fused_backend: str = "auto"
    gemm_backend: str = "auto"
    quantize_backend: str = "auto"
    fast_accum: bool = True
    gradient_spec: Spec = field(init=False)
    weight_t_spec: Spec = field(init=False)

    def __post_init__(self) -> None:
        if self.gradient not in ("tensor", "block", "delayed"):
            raise ValueError(f"gradient={self.gradient!r}; expected 'tensor', 'block' or 'delayed'")
        if self.gradient_format not in ("e4m3", "e5m2"):
            raise ValueError(f"gradient_format={self.gradient_format!r}; expected 'e4m3' or 'e5m2'")
        if self.gradient == "block" and self.gradient_format == "e5m2":
            raise ValueError("no library multiplies e5m2 by 128x128 scales; hint: gradient='tensor', or e4m3")
        for op, name in (
            ("fused_linear", self.fused_backend),
            ("scaled_mm", self.gemm_backend),
            ("quantize", self.quantize_backend),
            ("norm_quantize", "auto"),
        ):
            registry.load(op)
            if name != "auto":
                registry.backend(op, name)
        block = self.gradient == "block"
        # Specs are made here: torch 2.11 cannot trace the making of one.
        text = f"{self.gradient_format}:{'1x128' if block else 'tensor'}"
        object.__setattr__(self, "gradient_spec", Spec.parse(text))
        object.__setattr__(self, "weight_t_spec", SQUARE_SPEC if block else TENSOR_SPEC)

    def __str__(self) -> str:
        delayed = " delayed" if self.gradient == "delayed" else ""
        return f"e4m3 forward, {self.gradient_spec}{delayed} gradients"


@dataclass(frozen=True)
class Layout:
    """What the autograd node needs besides tensors.

    Args:
        links: first to last.
        precision: of the chain.
        dtype: of the result.
        weight_types, bias_types: dtypes of the parameters, one per link; None for a missing bias.
        primed: whether the scales between layers are known before the layers run.
        gradients_primed: the same for the gradients.
        given_input: whether the scale of x is known beforehand: bounded by a BlockNorm, or calibrated.
        dropout: p of each link in this call.
    """

    links: tuple[Link, ...]
    precision: ChainPrecision
    dtype: torch.dtype
    weight_types: tuple[torch.dtype, ...]
    bias_types: tuple[torch.dtype | None, ...]
    primed: bool = True
    gradients_primed: bool = True
    given_input: bool = False
    dropout: tuple[float, ...] = ()

    @property
    def delays_gradients(self) -> bool:
        """Whether gradients are scaled by the magnitudes of the last steps."""
        return self.primed and self.gradients_primed and self.precision.gradient == "delayed"

    @property
    def gradient_spec(self) -> Spec:
        """The spec of quantized gradients."""
        return GIVEN_SPECS[self.precision.gradient_format] if self.delays_gradients else self.precision.gradient_spec


class ChainTensors(NamedTuple):
    """The tensors of a chain. All fields but the last have one entry per link; None if the link has no such tensor."""

    weight: tuple[Tensor | None, ...]
    bias: tuple[Tensor | None, ...]
    norm_weight: tuple[Tensor | None, ...]
    norm_bias: tuple[Tensor | None, ...]
    scale: tuple[Tensor | None, ...]  # of the link's output; 1/16 after a BlockNorm
    pending: tuple[Tensor | None, ...]  # largest |z| of this step, updated in place
    g_scale: tuple[Tensor | None, ...]  # of the gradient of p
    g_pending: tuple[Tensor | None, ...]
    seed: Tensor | None = None  # of this call's dropout; None if nothing is dropped

    @classmethod
    def unflatten(cls, flat: Sequence[Tensor | None], links: int) -> "ChainTensors":
        """Undo `flatten`."""
        fields = [tuple(flat[i : i + links]) for i in range(0, len(flat) - 1, links)]
        return cls(*fields, flat[-1])  # type: ignore[arg-type, call-arg]

    def flatten(self) -> list[Tensor | None]:
        """Return all tensors in one list, field by field, as arguments of an autograd function."""
        return [*(tensor for part in self[:-1] for tensor in part), self.seed]

    def draw(self, at: int, layout: Layout) -> Dropout | None:
        """Return the dropout of a link in this call, or None."""
        if self.seed is None or layout.dropout[at] == 0.0:
            return None
        return Dropout(layout.dropout[at], self.seed, at)
