"""What a fused tower computes: its layers forward and backward, and the autograd node around them. `loka.lowp.fused_tower` has the module, and says why.

    forward    a, a_t -> y, and six tensors a layer for backward: x^T, its scale, W^T, its scale, z, rstd
    backward   dy -> dx, dW, db

Both are plain functions of tensors and a Layout, so that a node which does more than a tower (`loka.lowp.fused_interaction`) can call them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from loka.formats import QTensor, Spec
from loka.kernels import registry
from loka.kernels.fused_linear import NORM_BLOCK, NORMALIZED, FusedResult, fused_linear
from loka.kernels.fused_linear import fused_linear_gradient as fused_gradient
from loka.kernels.quantize import quantize, quantize_both
from loka.kernels.scaled_mm import scaled_mm

GradientScale = Literal["tensor", "block"]
TENSOR_SPEC = Spec.parse("e4m3:tensor")
_STATIC = Spec.parse("e4m3:tensor:static")
_SQUARE = Spec.parse("e4m3:128x128")
_GROUP = Spec.parse("e4m3:1x128")


@dataclass(frozen=True)
class Link:
    """One layer of a tower: the dotted name of its linear inside the module, the norm behind it (0: none) and the activation."""

    linear: str
    norm_block: int = NORM_BLOCK
    activation: str = "hard_swish"

    @property
    def bounded(self) -> bool:
        """Whether what this layer hands on is bounded by sqrt(block)."""
        return self.norm_block > 0


@dataclass(frozen=True)
class TowerPrecision:
    """How a tower computes. `gradient`: one scale per tensor or per 128; `gradient_format`: e4m3 or e5m2; backends by name or "auto"."""

    gradient: GradientScale = "tensor"
    gradient_format: str = "e4m3"
    fused_backend: str = "auto"
    gemm_backend: str = "auto"
    quantize_backend: str = "auto"
    fast_accum: bool = True
    gradient_spec: Spec = field(init=False)
    weight_t_spec: Spec = field(init=False)

    def __post_init__(self) -> None:
        if self.gradient not in ("tensor", "block"):
            raise ValueError(f"gradient={self.gradient!r}; expected 'tensor' or 'block'")
        if self.gradient_format not in ("e4m3", "e5m2"):
            raise ValueError(f"gradient_format={self.gradient_format!r}; expected 'e4m3' or 'e5m2'")
        if self.gradient == "block" and self.gradient_format == "e5m2":
            raise ValueError("no library multiplies e5m2 by 128x128 scales; hint: gradient='tensor', or e4m3")
        for op, name in (
            ("fused_linear", self.fused_backend),
            ("scaled_mm", self.gemm_backend),
            ("quantize", self.quantize_backend),
        ):
            registry.load(op)
            if name != "auto":
                registry.backend(op, name)
        block = self.gradient == "block"
        # Specs are made here: torch 2.11 cannot trace the making of one.
        text = f"{self.gradient_format}:{'1x128' if block else 'tensor'}"
        object.__setattr__(self, "gradient_spec", Spec.parse(text))
        object.__setattr__(self, "weight_t_spec", _SQUARE if block else TENSOR_SPEC)

    def __str__(self) -> str:
        return f"e4m3 forward, {self.gradient_spec} gradients"


@dataclass(frozen=True)
class Layout:
    """What an autograd node needs besides tensors."""

    links: tuple[Link, ...]
    precision: TowerPrecision
    bounded_input: bool
    dtype: torch.dtype
    biases: tuple[bool, ...]


def quantize_input(x: Tensor, scale: Tensor, layout: Layout) -> QTensor:
    """x_0 for inference, with the static scale where it is bounded."""
    backend = layout.precision.quantize_backend
    if not layout.bounded_input:
        return quantize(x, TENSOR_SPEC, backend=backend)
    if backend == "auto" and torch.compiler.is_compiling():
        # Plain torch: the compiler joins it to the norm that made x, which then never reaches memory in 16 bits, nor is rounded to them: some values become the
        # neighbouring FP8 number of what the eager tower has.
        backend = "reference"
    return quantize(x, _STATIC, scale=scale, backend=backend)


def quantize_input_both(x: Tensor, scale: Tensor, layout: Layout) -> tuple[QTensor, QTensor]:
    """x_0 and its transpose, for training."""
    spec, given = (_STATIC, scale) if layout.bounded_input else (TENSOR_SPEC, None)
    return quantize_both(x, spec, spec, scale=given, transpose_scale=given, backend=layout.precision.quantize_backend)


def _plain(link: Link) -> bool:
    return not link.norm_block and link.activation == "none"


def run_plain(a: QTensor, w: QTensor, bias: Tensor | None, layout: Layout) -> Tensor:
    """A linear with nothing behind it: the library's GEMM."""
    y = scaled_mm(
        a, w, out_dtype=layout.dtype, backend=layout.precision.gemm_backend, fast_accum=layout.precision.fast_accum
    )
    return y if bias is None else y + bias.to(layout.dtype)


def run_link(
    a: QTensor, w: QTensor, bias: Tensor | None, scale: Tensor, layout: Layout, index: int, *, training: bool
) -> FusedResult:
    """One layer; the last one of a tower writes 16 bits, the others FP8 for the next (and, in training, its transpose for the next wgrad)."""
    link, last = layout.links[index], index == len(layout.links) - 1
    if _plain(link):
        return FusedResult(run_plain(a, w, bias, layout))
    return fused_linear(
        a,
        w,
        out=layout.dtype if last else NORMALIZED,
        out_scale=None if last else scale,
        bias=bias,
        norm_block=link.norm_block,
        activation=link.activation,
        keep=training,
        transpose=training and not last,
        backend=layout.precision.fused_backend,
    )


def run_forward(
    a: QTensor,
    a_t: QTensor,
    scale: Tensor,
    layout: Layout,
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
) -> tuple[Tensor, list[Tensor | None]]:
    """A tower's output and, six per layer, what its backward needs. `a_t` is the transpose of the quantised input a."""
    saved: list[Tensor | None] = []
    y: Tensor | None = None
    for index in range(len(layout.links)):
        weight = weights[index]
        assert weight is not None
        w, w_t = quantize_both(
            weight, TENSOR_SPEC, layout.precision.weight_t_spec, backend=layout.precision.quantize_backend
        )
        result = run_link(a, w, biases[index], scale, layout, index, training=True)
        kept = result.z.data if isinstance(result.z, QTensor) else result.z
        saved += [a_t.data, a_t.scale, w_t.data, w_t.scale, kept, result.rstd]
        if isinstance(result.y, QTensor):
            assert result.y_t is not None
            a, a_t = result.y, result.y_t
        else:
            y = result.y
    assert y is not None
    return y, saved


def run_backward(
    dy: Tensor,
    saved: Sequence[Any],
    scale: Tensor,
    layout: Layout,
    *,
    dtypes: Sequence[torch.dtype | None],
    needs_input: bool,
    needs_weight: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None], list[Tensor | None]]:
    """From dy to the input's gradient (dy itself of no meaning where not needed), those of the weights and of the biases, in `dtypes` (weights, then biases)."""
    count = len(layout.links)
    dweights: list[Tensor | None] = [None] * count
    dbiases: list[Tensor | None] = [None] * count
    for index in reversed(range(count)):
        x_t, x_scale, w_t, w_scale, z, rstd = saved[6 * index : 6 * index + 6]
        g, g_t, dbias = _gradient_of(dy, z, rstd, scale, layout, index)
        if layout.biases[index]:
            assert dbias is not None
            dbiases[index] = dbias.to(dtypes[count + index])
        if needs_weight[index]:
            x_q = QTensor(x_t, x_scale, _STATIC if index or layout.bounded_input else TENSOR_SPEC)
            dtype = dtypes[index]
            assert dtype is not None
            dweights[index] = multiply(g_t, x_q, dtype, layout)
        if index or needs_input:
            dy = multiply(g, QTensor(w_t, w_scale, layout.precision.weight_t_spec), layout.dtype, layout)
    return dy, dweights, dbiases


class TowerFunction(torch.autograd.Function):
    """x [M, K], scale [], then the weights, then the biases -> y [M, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, layout: Layout, *parameters: Tensor | None) -> Tensor:
        """y, keeping FP8 for backward."""
        count = len(layout.links)
        a, a_t = quantize_input_both(x, scale, layout)
        y, saved = run_forward(a, a_t, scale, layout, parameters[:count], parameters[count:])
        ctx.save_for_backward(scale, *saved)
        ctx.layout = layout
        ctx.dtype, ctx.dtypes = x.dtype, tuple(None if p is None else p.dtype for p in parameters)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """dx, and the gradients of weights and biases, once."""
        scale, *saved = ctx.saved_tensors
        needs_input, _, _, *needs = ctx.needs_input_grad
        dx, dweights, dbiases = run_backward(
            grads[0], saved, scale, ctx.layout, dtypes=ctx.dtypes, needs_input=needs_input, needs_weight=needs
        )
        if not needs_input:
            return None, None, None, *dweights, *dbiases
        return dx if dx.dtype == ctx.dtype else dx.to(ctx.dtype), None, None, *dweights, *dbiases


def _gradient_of(
    dy: Tensor, z: Tensor | None, rstd: Tensor | None, scale: Tensor, layout: Layout, index: int
) -> tuple[QTensor, QTensor, Tensor | None]:
    """The gradient of a layer's GEMM output, quantised for dgrad and, transposed, for wgrad; the bias gradient where there is a bias."""
    link, precision = layout.links[index], layout.precision
    spec, biased = precision.gradient_spec, layout.biases[index]
    if z is None:
        g, g_t = quantize_both(dy, spec, spec, backend=precision.quantize_backend)
        return g, g_t, dy.sum(0, dtype=torch.float32) if biased else None
    kept: QTensor | Tensor = QTensor(z, scale, NORMALIZED) if link.norm_block else z
    result = fused_gradient(
        dy.contiguous(),
        FusedResult(kept, z=kept, rstd=rstd),
        spec=spec,
        spec_t=spec,
        norm_block=link.norm_block,
        activation=link.activation,
        bias=biased,
        backend=precision.fused_backend,
    )
    return result.g, result.g_t, result.bias


def multiply(a: QTensor, b: QTensor, dtype: torch.dtype, layout: Layout) -> Tensor:
    """a [M, K] @ b [N, K]^T. Beside groups of 128, one scale for the tensor is written as groups that all have it: libraries pair groups with groups."""
    if a.spec.block == _GROUP.block and b.scale.dim() == 0:
        rows, columns = b.shape
        groups = b.scale.expand(-(-columns // _GROUP.block.cols), rows).T.contiguous()
        b = QTensor(b.data, groups, _GROUP)
    return scaled_mm(
        a, b, out_dtype=dtype, backend=layout.precision.gemm_backend, fast_accum=layout.precision.fast_accum
    )
