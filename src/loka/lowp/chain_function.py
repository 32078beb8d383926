"""What a chain of linears computes in FP8, forward and backward, and the autograd node around it. `loka.lowp.chain` has the modules, and says why.

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

Everything here is a plain function of tensors and a Layout, so that a node which does more than a chain (`loka.lowp.interaction`) can call it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from loka.formats import ROW, TENSOR, QTensor, Spec, block_amax, scale_from_amax
from loka.kernels import registry
from loka.kernels.dropout import Dropout
from loka.kernels.fused_linear import NORM_BLOCK, NORMALIZED, FusedResult, fused_linear, fused_linear_dgrad
from loka.kernels.fused_linear import fused_linear_gradient as fused_gradient
from loka.kernels.norm_quantize import norm_gradient, norm_quantize
from loka.kernels.quantize import quantize, quantize_both
from loka.kernels.scaled_mm import scaled_mm
from loka.lowp.scaling import find_amax

__all__ = ["ChainPrecision", "ChainTensors", "GradientScale", "Layout", "Link", "NormKind"]

GradientScale = Literal["tensor", "block", "delayed"]
NormKind = Literal["none", "block", "layer", "rms"]
TENSOR_SPEC = Spec.parse("e4m3:tensor")
STATIC_SPEC = Spec.parse("e4m3:tensor:static")
ROW_SPEC = Spec.parse("e4m3:row")
_SQUARE = Spec.parse("e4m3:128x128")
_GROUP = Spec.parse("e4m3:1x128")
_GIVEN = {name: Spec.parse(f"{name}:tensor:static") for name in ("e4m3", "e5m2")}


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
    """How a chain computes.

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
        object.__setattr__(self, "weight_t_spec", _SQUARE if block else TENSOR_SPEC)

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
        return _GIVEN[self.precision.gradient_format] if self.delays_gradients else self.precision.gradient_spec


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
        fields = [tuple(flat[i * links : (i + 1) * links]) for i in range(len(cls._fields) - 1)]
        return cls(*fields, flat[-1])

    def flatten(self) -> list[Tensor | None]:
        """As one list, field after field: arguments of an autograd function."""
        return [*(tensor for part in self[:-1] for tensor in part), self.seed]  # type: ignore[union-attr]

    def draw(self, at: int, layout: Layout) -> Dropout | None:
        """What a link drops in this call."""
        if self.seed is None or layout.dropout[at] == 0.0:
            return None
        return Dropout(layout.dropout[at], self.seed, at)


class Kept(NamedTuple):
    """What one link keeps for backward."""

    x_t: Tensor
    x_t_scale: Tensor
    w_t: Tensor
    w_t_scale: Tensor
    z: Tensor | None = None
    z_scale: Tensor | None = None
    rstd: Tensor | None = None
    mean: Tensor | None = None


_KEPT = len(Kept._fields)


def quantize_input(x: Tensor, scale: Tensor | None, layout: Layout, *, rows: bool = True) -> QTensor:
    """x_0 without gradients: with the scale that is given, otherwise one scale a row, which a compiler finds where the row is made.

    `rows` False: one scale for the tensor, as `quantize_input_both` has it, so that a forward whose gradient is computed by running it again (activation
    checkpointing) is the same both times.
    """
    backend = layout.precision.quantize_backend
    if backend == "auto" and torch.compiler.is_compiling():
        # Plain torch: the compiler joins it to what made x, which then never reaches memory in 16 bits, nor is rounded to them: some values become the
        # neighbouring FP8 number of what the eager chain has.
        backend = "compiled"
    if layout.given_input:
        return quantize(x, STATIC_SPEC, scale=scale, backend=backend)
    return quantize(x, ROW_SPEC if rows else TENSOR_SPEC, backend=backend)


def quantize_input_both(x: Tensor, scale: Tensor | None, layout: Layout) -> tuple[QTensor, QTensor]:
    """x_0 and its transpose, for training."""
    backend = layout.precision.quantize_backend
    if not layout.given_input:
        return quantize_found(x, TENSOR_SPEC, backend)
    return quantize_both(x, STATIC_SPEC, STATIC_SPEC, scale=scale, transpose_scale=scale, backend=backend)


def quantize_found(x: Tensor, spec: Spec, backend: str) -> tuple[QTensor, QTensor]:
    """x and x^T under a dynamic spec. Compiled, the scale of a whole tensor is found where the compiler can join it to what made x."""
    if spec.block != TENSOR or not torch.compiler.is_compiling() or x.numel() == 0:
        return quantize_both(x, spec, spec, backend=backend)
    # Row by row first: that reduction has the loops of what makes the rows, so it costs no read of its own.
    scale = scale_from_amax(block_amax(x, ROW).amax(), spec)
    given = _GIVEN[spec.format.name]
    return quantize_both(x, given, given, scale=scale, transpose_scale=scale, backend=backend)


def run_plain(a: QTensor, w: QTensor, bias: Tensor | None, layout: Layout) -> Tensor:
    """A linear with nothing behind it: the library's GEMM."""
    return scaled_mm(a, w, out_dtype=layout.dtype, backend=layout.precision.gemm_backend, fast_accum=layout.precision.fast_accum, bias=bias)  # fmt: skip


class Step(NamedTuple):
    """What one link made: FP8 for the next (and its transpose in training), or 16 bits; and for backward z, rstd, mean."""

    a: QTensor | None
    a_t: QTensor | None
    y: Tensor | None
    z: QTensor | Tensor | None = None
    rstd: Tensor | None = None
    mean: Tensor | None = None


def run_link(a: QTensor, w: QTensor, at: int, layout: Layout, tensors: ChainTensors, *, training: bool) -> Step:
    """One layer; the last one writes 16 bits, the others FP8 for the next."""
    link, last = layout.links[at], at == len(layout.links) - 1
    bias, draw = tensors.bias[at], tensors.draw(at, layout)
    if last:
        if link.plain and draw is None:
            return Step(None, None, run_plain(a, w, bias, layout))
        result = _fuse(a, w, bias, link, layout, out=layout.dtype, keep=training, draw=draw)
        return Step(None, None, _as_tensor(result.y), result.z, result.rstd)
    if link.norm in ("layer", "rms"):
        # the bias inside the GEMM's kernel: what follows is a kernel of ours, which no compiler could join an addition to
        library = bias is None or (w.shape[0] % 16 == 0 and layout.precision.gemm_backend in ("auto", "torch"))
        h = (
            run_plain(a, w, bias, layout)
            if library
            else _as_tensor(_fuse(a, w, bias, Link(link.linear), layout, out=layout.dtype).y)
        )
        return _run_normed(h, at, layout, tensors, training=training)
    if link.bounded:
        result = _fuse(a, w, bias, link, layout, out=NORMALIZED, scale=tensors.scale[at], keep=training, transpose=training, draw=draw)  # fmt: skip
        return Step(_as_q(result.y), result.y_t, None, result.z, result.rstd)
    if layout.primed:
        result = _fuse(a, w, bias, link, layout, out=STATIC_SPEC, scale=tensors.scale[at], keep=training, transpose=training, amax=tensors.pending[at], draw=draw)  # fmt: skip
        return Step(_as_q(result.y), result.y_t, None, result.z)
    if link.plain and draw is None:
        y = run_plain(a, w, bias, layout)
        _raise(tensors.pending[at], y)
        return _quantize_step(y, layout, training=training, z=None)
    result = _fuse(a, w, bias, link, layout, out=layout.dtype, keep=True, amax=tensors.pending[at], draw=draw)
    return _quantize_step(_as_tensor(result.y), layout, training=training, z=result.z)


def _run_normed(h: Tensor, at: int, layout: Layout, tensors: ChainTensors, *, training: bool) -> Step:
    """Normalise, activate and quantise what a GEMM wrote in 16 bits."""
    link = layout.links[at]
    norm: dict[str, Any] = {"norm": link.norm, "activation": link.activation, "weight": tensors.norm_weight[at], "bias": tensors.norm_bias[at], "eps": link.eps, "amax": tensors.pending[at], "dropout": tensors.draw(at, layout)}  # fmt: skip
    if layout.primed:
        made = norm_quantize(h, STATIC_SPEC, scale=tensors.scale[at], transpose=training, **norm)
        return Step(made.q, made.q_t, None, h, made.rstd, made.mean)
    made = norm_quantize(h, None, out_dtype=layout.dtype, **norm)
    assert made.y is not None
    step = _quantize_step(made.y, layout, training=training, z=h)
    return step._replace(rstd=made.rstd, mean=made.mean)


def _quantize_step(y: Tensor, layout: Layout, *, training: bool, z: QTensor | Tensor | None) -> Step:
    backend = layout.precision.quantize_backend
    if not training:
        return Step(quantize(y, TENSOR_SPEC, backend=backend), None, None)
    a, a_t = quantize_both(y, TENSOR_SPEC, TENSOR_SPEC, backend=backend)
    return Step(a, a_t, None, z)


def _raise(pending: Tensor | None, x: Tensor) -> None:
    if pending is not None:
        pending.copy_(torch.maximum(pending, find_amax(x)))


def _fuse(a: QTensor, w: QTensor, bias: Tensor | None, link: Link, layout: Layout, *, out: Any, scale: Tensor | None = None, keep: bool = False, transpose: bool = False, amax: Tensor | None = None, draw: Dropout | None = None) -> FusedResult:  # fmt: skip
    return fused_linear(
        a, w, out=out, out_scale=scale, bias=bias, norm_block=NORM_BLOCK if link.bounded else 0, activation=link.activation,
        slope=link.slope, keep=keep, transpose=transpose, amax=amax, dropout=draw, backend=layout.precision.fused_backend,
    )  # fmt: skip


def _known(scale: Tensor | None) -> Tensor:
    assert scale is not None
    return scale


def _as_q(y: QTensor | Tensor) -> QTensor:
    assert isinstance(y, QTensor)
    return y


def _as_tensor(y: QTensor | Tensor) -> Tensor:
    assert isinstance(y, Tensor)
    return y


def run_forward(a: QTensor, a_t: QTensor, layout: Layout, tensors: ChainTensors) -> tuple[Tensor, list[Tensor | None]]:
    """A chain's output and, those of `Kept` for every link, what its backward needs. `a_t` is the transpose of the quantised input a."""
    saved: list[Tensor | None] = []
    y: Tensor | None = None
    for at in range(len(layout.links)):
        weight = tensors.weight[at]
        assert weight is not None
        w, w_t = _quantize_weight(weight, layout)
        step = run_link(a, w, at, layout, tensors, training=True)
        z, z_scale = (step.z.data, step.z.scale) if isinstance(step.z, QTensor) else (step.z, None)
        saved += [a_t.data, a_t.scale, w_t.data, w_t.scale, z, z_scale, step.rstd, step.mean]
        y = step.y
        if step.a is not None:
            assert step.a_t is not None
            a, a_t = step.a, step.a_t
    assert y is not None
    return y, saved


def _quantize_weight(weight: Tensor, layout: Layout) -> tuple[QTensor, QTensor]:
    """W and W^T; where both have one scale for the tensor a compiler finds it, faster than our kernel does for a matrix as small as a weight."""
    precision = layout.precision
    if precision.weight_t_spec == TENSOR_SPEC:
        return quantize_found(weight, TENSOR_SPEC, precision.quantize_backend)
    return quantize_both(weight, TENSOR_SPEC, precision.weight_t_spec, backend=precision.quantize_backend)


class Gradients(NamedTuple):
    """Of the input, and one a link of the weights, biases and the norms' own."""

    x: Tensor | None
    weight: list[Tensor | None]
    bias: list[Tensor | None]
    norm_weight: list[Tensor | None]
    norm_bias: list[Tensor | None]


def run_backward(
    dy: Tensor, saved: Sequence[Any], layout: Layout, tensors: ChainTensors, *, needs_input: bool, needs_weight: Sequence[bool],
    show: Callable[[int, QTensor], None] | None = None,
) -> Gradients:  # fmt: skip
    """From dy to the gradients of everything; of `tensors` only the norms and the gradients' scales are read. `show(at, g)` is given every link's g."""
    count, width = len(layout.links), _KEPT
    kept = [Kept(*saved[width * i : width * (i + 1)]) for i in range(count)]
    none: list[Tensor | None] = [None] * count
    made = Gradients(None, none.copy(), none.copy(), none.copy(), none.copy())
    g, g_t = _enter(dy, count - 1, kept, layout, tensors, made)
    for at in reversed(range(count)):
        if show is not None:
            show(at, g)
        if needs_weight[at]:
            x_q = QTensor(kept[at].x_t, kept[at].x_t_scale, input_spec(at, layout))
            made.weight[at] = multiply(g_t, x_q, layout.weight_types[at], layout, exact=True)
        w_t = QTensor(kept[at].w_t, kept[at].w_t_scale, layout.precision.weight_t_spec)
        if at == 0:
            return made._replace(x=multiply(g, w_t, layout.dtype, layout) if needs_input else None)
        before, follows = (
            layout.links[at - 1],
            not layout.links[at - 1].plain or tensors.draw(at - 1, layout) is not None,
        )
        if before.norm == "none" and layout.delays_gradients and follows:
            g, g_t = _step_back(g, w_t, at - 1, kept, layout, tensors, made)
        else:
            g, g_t = _enter(multiply(g, w_t, layout.dtype, layout), at - 1, kept, layout, tensors, made)
    raise AssertionError("a chain has at least one link")


def input_spec(at: int, layout: Layout) -> Spec:
    """What a link's input is quantised to in training."""
    given = layout.given_input if at == 0 else layout.primed or layout.links[at - 1].bounded
    return STATIC_SPEC if given else TENSOR_SPEC


def _kept_z(kept: Kept, link: Link) -> QTensor | Tensor | None:
    if kept.z is None or kept.z_scale is None:
        return kept.z
    return QTensor(kept.z, kept.z_scale, NORMALIZED if link.bounded else STATIC_SPEC)


def _step_back(g: QTensor, w_t: QTensor, at: int, kept: list[Kept], layout: Layout, tensors: ChainTensors, made: Gradients) -> tuple[QTensor, QTensor]:  # fmt: skip
    """g_{at} from g_{at+1} in one kernel: GEMM, the activation's slope, FP8 both ways."""
    link = layout.links[at]
    result = fused_linear_dgrad(
        g, w_t, _kept_z(kept[at], link), spec=layout.gradient_spec, scale=_known(tensors.g_scale[at]), activation=link.activation, slope=link.slope,
        bias=layout.bias_types[at] is not None, amax=tensors.g_pending[at], dropout=tensors.draw(at, layout), backend=layout.precision.fused_backend,
    )  # fmt: skip
    made.bias[at] = _cast(result.bias, layout.bias_types[at])
    return result.g, result.g_t


def _enter(dy: Tensor, at: int, kept: list[Kept], layout: Layout, tensors: ChainTensors, made: Gradients) -> tuple[QTensor, QTensor]:  # fmt: skip
    """g of a link from the gradient of what it hands on, in 16 bits; the gradients of its bias and norm on the way."""
    link, precision, biased = layout.links[at], layout.precision, layout.bias_types[at] is not None
    backend, draw = precision.quantize_backend, tensors.draw(at, layout)
    if link.norm in ("layer", "rms"):
        dx, dx_t = _norm_back(dy, at, kept[at], layout, tensors, made)
        if isinstance(dx, QTensor):
            assert dx_t is not None
            if biased:
                made.bias[at] = _cast(_column_sums(dx), layout.bias_types[at])
            return dx, dx_t
        dy, draw = dx, None
    z = None if link.norm in ("layer", "rms") else _kept_z(kept[at], link)
    if z is None and draw is None:
        if biased:
            made.bias[at] = _cast(dy.sum(0, dtype=torch.float32), layout.bias_types[at])
        spec = precision.gradient_spec
        g, g_t = quantize_found(dy, spec, backend)
        if not layout.delays_gradients:
            _raise_from(tensors.g_pending[at], dy)
        return _given(g, layout), _given(g_t, layout)
    scale = tensors.g_scale[at] if layout.delays_gradients else None
    spec = layout.gradient_spec
    result = fused_gradient(
        dy.contiguous(), FusedResult(dy, z=z, rstd=kept[at].rstd), spec=spec, spec_t=spec, scale=scale,
        norm_block=NORM_BLOCK if link.bounded else 0, activation=link.activation, slope=link.slope, bias=biased, dropout=draw,
        backend=precision.fused_backend,
    )  # fmt: skip
    made.bias[at] = _cast(result.bias, layout.bias_types[at])
    pending = tensors.g_pending[at]
    if pending is not None:
        pending.copy_(torch.maximum(pending, result.amax))
    return result.g, result.g_t


def _given(q: QTensor, layout: Layout) -> QTensor:
    """The same numbers under the spec that the other gradients of this chain carry."""
    return QTensor(q.data, q.scale, _GIVEN[layout.precision.gradient_format]) if layout.delays_gradients else q


def _raise_from(pending: Tensor | None, dy: Tensor) -> None:
    if pending is not None:
        _raise(pending, dy)


def _norm_back(dy: Tensor, at: int, kept: Kept, layout: Layout, tensors: ChainTensors, made: Gradients) -> tuple[Tensor | QTensor, QTensor | None]:  # fmt: skip
    """Through a layer or rms norm and the activation behind it; in FP8 both ways where the gradients' scales are delayed."""
    link = layout.links[at]
    assert kept.z is not None
    assert kept.rstd is not None
    weight, bias = tensors.norm_weight[at], tensors.norm_bias[at]
    fp8: dict[str, Any] = {}
    if layout.delays_gradients:
        fp8 = {"spec": layout.gradient_spec, "scale": tensors.g_scale[at], "amax": tensors.g_pending[at]}
    back = norm_gradient(
        dy.contiguous(), kept.z, kept.mean, kept.rstd, norm=link.norm, weight=weight, bias=bias, activation=link.activation, dropout=tensors.draw(at, layout), **fp8
    )  # fmt: skip
    made.norm_weight[at], made.norm_bias[at] = _cast(back.weight, _type_of(weight)), _cast(back.bias, _type_of(bias))
    return back.dx, back.dx_t


def _column_sums(g: QTensor) -> Tensor:
    """Of a gradient in FP8: what the bias behind a norm gets."""
    return g.data.float().sum(0) * g.scale


def _type_of(x: Tensor | None) -> torch.dtype | None:
    return None if x is None else x.dtype


def _cast(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if gradient is None or dtype is None:
        return None
    return gradient if gradient.dtype == dtype else gradient.to(dtype)


def multiply(a: QTensor, b: QTensor, dtype: torch.dtype, layout: Layout, *, exact: bool = False) -> Tensor:
    """a [M, K] @ b [N, K]^T Beside groups of 128, one scale for the tensor is written as groups that all have it: libraries pair groups with groups."""
    if a.spec.block == _GROUP.block and b.scale.dim() == 0:
        rows, columns = b.shape
        groups = b.scale.expand(-(-columns // _GROUP.block.cols), rows).T.contiguous()
        b = QTensor(b.data, groups, _GROUP)
    return scaled_mm(
        a,
        b,
        out_dtype=dtype,
        backend=layout.precision.gemm_backend,
        fast_accum=layout.precision.fast_accum and not exact,
    )


class ChainFunction(torch.autograd.Function):
    """x [M, K], its scale where it is given, then the tensors of the chain, flattened -> y [M, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, layout: Layout, *flat: Tensor | None) -> Tensor:
        """y, keeping FP8 for backward."""
        tensors = ChainTensors.unflatten(flat, len(layout.links))
        a, a_t = quantize_input_both(x, scale, layout)
        y, saved = run_forward(a, a_t, layout, tensors)
        save_chain(ctx, layout, tensors, saved)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """dx, and the gradients of weights, biases and norms, once."""
        needs_input, _, _, *needs = ctx.needs_input_grad
        made = restore_chain(ctx, grads[0], ctx.saved_tensors, needs_input=needs_input, needs=needs)
        return _cast(made.x, ctx.dtype), None, None, *spread(made)


def save_chain(ctx: Any, layout: Layout, tensors: ChainTensors, saved: Sequence[Tensor | None], *others: Tensor) -> None:  # fmt: skip
    """Keep what `restore_chain` needs, behind `others`. Weights are not kept: backward has them in FP8."""
    ctx.save_for_backward(*others, *tensors.norm_weight, *tensors.norm_bias, *tensors.g_scale, tensors.seed, *saved)
    # raised by every backward of this chain, in any order: not for autograd's check of versions
    ctx.pending, ctx.layout = tensors.g_pending, layout


def restore_chain(ctx: Any, dy: Tensor, kept: Sequence[Any], *, needs_input: bool, needs: Sequence[bool]) -> Gradients:
    """Backward from what `save_chain` kept, without its `others`; `needs`: of the flattened tensors."""
    layout, count = ctx.layout, len(ctx.layout.links)
    norms, shifts, scales = (tuple(kept[i * count : (i + 1) * count]) for i in range(3))
    none = (None,) * count
    tensors = ChainTensors(none, none, norms, shifts, none, none, scales, ctx.pending, kept[3 * count])
    return run_backward(dy, kept[3 * count + 1 :], layout, tensors, needs_input=needs_input, needs_weight=needs[:count])


def spread(made: Gradients) -> list[Tensor | None]:
    """Gradients in the order of the flattened tensors; scales and the seed have none."""
    parameters = [*made.weight, *made.bias, *made.norm_weight, *made.norm_bias]
    return [*parameters, *([None] * (len(parameters) + 1))]
