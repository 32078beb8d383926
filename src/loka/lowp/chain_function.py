"""What a chain of linears computes in FP8, forward and backward: its layers, its precision and its tensors. `loka.lowp.chain` has the modules, and says why.

Layer i of L, with x_0 quantised once and every later x_i written in FP8 by the kernel before it:

    p_i = x_i W_i^T (+ b_i),   z_i = norm(p_i),   x_{i+1} = activation(z_i) (* kept / (1 - p), dropout in training)         y = the last layer's, in 16 bits

What x_{i+1} is scaled by depends on what stands between two linears:

    block norm              static 1/16: no value exceeds sqrt(256) = 16                          one kernel, the norm in its epilogue
    layer or rms norm       delayed or calibrated                                                 GEMM, then one kernel normalises, activates and quantises
    nothing but activation  delayed or calibrated; the epilogue itself collects the largest |z|   one kernel

Delayed scales come from the largest magnitudes of the last steps (`loka.lowp.scaling`). A chain that has no history yet is not `primed`: it writes 16 bits between its layers and finds
each scale from the tensor itself. That is slower and never wrong.

Dropout is drawn by the kernel that activates (`loka.kernels.dropout`), from one seed for a call of the chain and the number of the link; backward draws the same again and nothing is kept for it.
Scales are those of what is not dropped, before 1 / (1 - p): p may change from step to step.

Backward, from dy down, with g_i the gradient of p_i quantised both ways:

    dW_i = g_i^T x_i            g_{i-1} = (g_i W_i) * activation'(z_{i-1})        one kernel where no norm stands between and the gradients' scales are delayed
                                dx_{i} = g_i W_i in 16 bits, then the norm's gradient         otherwise

The kernels are called in `chain_forward` and `chain_backward`, which are plain functions of tensors and a Layout, so that a node which does more than a chain (`loka.lowp.interaction`) can
call them; `chain_node` has the autograd node of a chain alone.
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
        norm: what normalises its output; `block` is BlockNorm over 256 columns.
        activation: what follows, by the kernels' names.
        eps: of a layer or rms norm.
        slope: of a leaky ReLU.
        dropout: the p of a dropout behind it, when the chain was found; None: there is none. What is drawn is up to its module at every call.
    """

    linear: str
    norm: NormKind = "none"
    activation: str = "none"
    eps: float = 1e-5
    slope: float = 0.01
    dropout: float | None = None

    @property
    def bounded(self) -> bool:
        """Whether no value this layer hands on exceeds 16."""
        return self.norm == "block"

    @property
    def floor(self) -> float:
        """What the activation may reach however small its input is: sigmoid(0) is 1/2, and a scale made from |z| alone would cut it off."""
        return 1.0 if self.activation == "sigmoid" and self.norm == "none" else 0.0

    @property
    def plain(self) -> bool:
        """Whether nothing follows the linear."""
        return self.norm == "none" and self.activation == "none"


@dataclass(frozen=True)
class ChainPrecision:
    """The precision of a chain: how its gradients are scaled and rounded, and which kernels run.

    Args:
        gradient: scales of the gradients: one for the tensor from its own largest value, one per 128, or one for the tensor from the last steps.
        gradient_format: e4m3 or e5m2.
        fused_backend, gemm_backend, quantize_backend: kernels by name, or "auto".
        fast_accum: accumulate as fast as the tensor cores can. Not in the gradients of weights: sums over the batch are long and often of one sign, and Hopper
            keeps about 14 bits of them.
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
    """What the autograd node needs beside tensors.

    Args:
        links: first to last.
        precision: how it computes.
        dtype: of the result.
        weight_types, bias_types: of the parameters, one a link; None for a bias that is not there.
        primed: whether the scales between layers are known before the layer runs.
        gradients_primed: whether those of the gradients are.
        given_input: whether the scale of x is known before it comes: behind a BlockNorm, or calibrated.
        dropout: the share that each link drops in this call; empty where none does.
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
        """Whether gradients are scaled by what the last steps saw."""
        return self.primed and self.gradients_primed and self.precision.gradient == "delayed"

    @property
    def gradient_spec(self) -> Spec:
        """The spec gradients carry."""
        return GIVEN_SPECS[self.precision.gradient_format] if self.delays_gradients else self.precision.gradient_spec


class ChainTensors(NamedTuple):
    """The tensors of a chain, one entry a link in every field but the last; None where a link has none."""

    weight: tuple[Tensor | None, ...]
    bias: tuple[Tensor | None, ...]
    norm_weight: tuple[Tensor | None, ...]
    norm_bias: tuple[Tensor | None, ...]
    scale: tuple[Tensor | None, ...]  # of what the link hands on; 1/16 behind a BlockNorm
    pending: tuple[Tensor | None, ...]  # largest |z| of this step, raised in place
    g_scale: tuple[Tensor | None, ...]  # of the gradient of p
    g_pending: tuple[Tensor | None, ...]
    seed: Tensor | None = None  # of what dropout draws in this call; None where nothing is drawn

    @classmethod
    def unflatten(cls, flat: Sequence[Tensor | None], links: int) -> "ChainTensors":
        """From one list, field after field."""
        fields = [tuple(flat[i : i + links]) for i in range(0, len(flat) - 1, links)]
        return cls(*fields, flat[-1])  # type: ignore[arg-type, call-arg]

    def flatten(self) -> list[Tensor | None]:
        """As one list, field after field: arguments of an autograd function."""
        return [*(tensor for part in self[:-1] for tensor in part), self.seed]

    def draw(self, at: int, layout: Layout) -> Dropout | None:
        """What a link drops in this call."""
        if self.seed is None or layout.dropout[at] == 0.0:
            return None
        return Dropout(layout.dropout[at], self.seed, at)
