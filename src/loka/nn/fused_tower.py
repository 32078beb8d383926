"""A whole tower in FP8 as one autograd node: [linear -> BlockNorm -> activation]* and a last linear, FP8 travelling in between.

Forward, layer i, with x_0 quantised once and every later x_i written in FP8 by the kernel before it:

    p_i = x_i W_i^T (+ b_i),   z_i = BlockNorm(p_i),   x_{i+1} = activation(z_i)          one kernel (kernels.fused_linear)
    y   = x_L W_L^T (+ b_L)                                                              the last linear, 16-bit out

Backward, from dy down:

    g_L = dy;   g_i = d loss / d p_i, quantised both ways in one kernel                   (kernels.fused_linear_gradient)
    dW_i = g_i^T x_i            dx_i = g_i W_i                                            FP8 GEMMs

One node and not one per layer, because FP8 tensors cannot travel along autograd's edges: a gradient has its tensor's type. What is saved for backward
is FP8: x_i^T for the weight gradients, z_i and one rstd a block for the norm; a bf16 tower saves at least twice that.

Scales. Behind a BlockNorm no value exceeds sqrt(256) = 16, so x_i (i > 0) has a static scale that cannot saturate, and so has x_0 when the tower follows a
BlockNorm (`input_bound`). Weights, gradients and an unbounded x_0 get one scale from their own largest value ("tensor"), or gradients one per 128
("block"). Nothing is kept from step to step: there is no history to save, none to go stale.

The parameters stay those of the replaced module, under their old names. `freeze` quantises the weights once for serving.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from loka.formats import QTensor, Spec
from loka.kernels import registry
from loka.kernels.fused_linear import NORM_BLOCK, NORMALIZED, NORMALIZED_SCALE, FusedResult, fused_linear
from loka.kernels.fused_linear import fused_linear_gradient as fused_gradient
from loka.kernels.quantize import quantize, quantize_both
from loka.kernels.scaled_mm import scaled_mm

GradientScale = Literal["tensor", "block"]
_TENSOR = Spec.parse("e4m3:tensor")
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
        object.__setattr__(self, "weight_t_spec", _SQUARE if block else _TENSOR)

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


def _quantize_input(x: Tensor, scale: Tensor, layout: Layout) -> QTensor:
    backend = layout.precision.quantize_backend
    if not layout.bounded_input:
        return quantize(x, _TENSOR, backend=backend)
    if backend == "auto" and torch.compiler.is_compiling():
        # Plain torch: the compiler joins it to the norm that made x, which then never reaches memory in 16 bits, nor is rounded to them: some values become the
        # neighbouring FP8 number of what the eager tower has.
        backend = "reference"
    return quantize(x, _STATIC, scale=scale, backend=backend)


def _quantize_input_both(x: Tensor, scale: Tensor, layout: Layout) -> tuple[QTensor, QTensor]:
    spec, given = (_STATIC, scale) if layout.bounded_input else (_TENSOR, None)
    return quantize_both(x, spec, spec, scale=given, transpose_scale=given, backend=layout.precision.quantize_backend)


def _plain(link: Link) -> bool:
    return not link.norm_block and link.activation == "none"


def _run_plain(a: QTensor, w: QTensor, bias: Tensor | None, layout: Layout) -> Tensor:
    y = scaled_mm(
        a, w, out_dtype=layout.dtype, backend=layout.precision.gemm_backend, fast_accum=layout.precision.fast_accum
    )
    return y if bias is None else y + bias.to(layout.dtype)


def _run_link(
    a: QTensor, w: QTensor, bias: Tensor | None, scale: Tensor, layout: Layout, index: int, *, training: bool
) -> FusedResult:
    """One layer; the last one of a tower writes 16 bits, the others FP8 for the next (and, in training, its transpose for the next wgrad)."""
    link, last = layout.links[index], index == len(layout.links) - 1
    if _plain(link):
        return FusedResult(_run_plain(a, w, bias, layout))
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
            weight, _TENSOR, layout.precision.weight_t_spec, backend=layout.precision.quantize_backend
        )
        result = _run_link(a, w, biases[index], scale, layout, index, training=True)
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
            x_q = QTensor(x_t, x_scale, _STATIC if index or layout.bounded_input else _TENSOR)
            dtype = dtypes[index]
            assert dtype is not None
            dweights[index] = _multiply(g_t, x_q, dtype, layout)
        if index or needs_input:
            dy = _multiply(g, QTensor(w_t, w_scale, layout.precision.weight_t_spec), layout.dtype, layout)
    return dy, dweights, dbiases


class _Tower(torch.autograd.Function):
    """x [M, K], scale [], then the weights, then the biases -> y [M, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, layout: Layout, *parameters: Tensor | None) -> Tensor:
        count = len(layout.links)
        a, a_t = _quantize_input_both(x, scale, layout)
        y, saved = run_forward(a, a_t, scale, layout, parameters[:count], parameters[count:])
        ctx.save_for_backward(scale, *saved)
        ctx.layout = layout
        ctx.dtype, ctx.dtypes = x.dtype, tuple(None if p is None else p.dtype for p in parameters)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
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


def _multiply(a: QTensor, b: QTensor, dtype: torch.dtype, layout: Layout) -> Tensor:
    """a [M, K] @ b [N, K]^T. Beside groups of 128, one scale for the tensor is written as groups that all have it: libraries pair groups with groups."""
    if a.spec.block == _GROUP.block and b.scale.dim() == 0:
        rows, columns = b.shape
        groups = b.scale.expand(-(-columns // _GROUP.block.cols), rows).T.contiguous()
        b = QTensor(b.data, groups, _GROUP)
    return scaled_mm(
        a, b, out_dtype=dtype, backend=layout.precision.gemm_backend, fast_accum=layout.precision.fast_accum
    )


class FusedTower(nn.Module):
    """Stands in for a module whose forward is a chain of linear, norm and activation. Make one with `FusedTower.replacing`."""

    @classmethod
    def replacing(
        cls,
        module: nn.Module,
        links: Sequence[Link],
        *,
        tail: Sequence[str] = (),
        bounded_input: bool = False,
        precision: TowerPrecision | None = None,
    ) -> "FusedTower":
        """Share the children of `module` under their own names and run `links` in FP8, then the modules named in `tail` as they are.

        `bounded_input` promises that x comes out of a BlockNorm (no value beyond 16): it is then quantised with a static scale.
        """
        _check_links(module, links)
        tower = cls.__new__(cls)
        nn.Module.__init__(tower)
        for name, child in module.named_children():
            tower.add_module(name, child)
        for name, parameter in module.named_parameters(recurse=False):
            tower.register_parameter(name, parameter)
        tower.__dict__["_original"] = (module,)  # kept out of the module tree: it would double every key
        tower.__dict__["_linears"] = tuple(module.get_submodule(link.linear) for link in links)
        tower.__dict__["_tail"] = tuple(module.get_submodule(name) for name in tail)
        tower.links, tower.bounded_input = tuple(links), bounded_input
        tower.precision = precision or TowerPrecision()
        tower.frozen = False
        device = tower._linears[0].weight.device
        tower.register_buffer("_scale", torch.full((), NORMALIZED_SCALE, device=device), persistent=False)
        tower.train(module.training)
        return tower

    links: tuple[Link, ...]
    precision: TowerPrecision
    bounded_input: bool
    frozen: bool
    _scale: Tensor
    _linears: tuple[nn.Linear, ...]
    _tail: tuple[nn.Module, ...]

    @property
    def weights(self) -> list[Tensor]:
        """Of the linears, first to last."""
        return [linear.weight for linear in self._linears]

    @property
    def biases(self) -> list[Tensor | None]:
        """Of the linears, first to last; None where there is none."""
        return [linear.bias for linear in self._linears]

    def layout(self, dtype: torch.dtype, bounded_input: bool) -> Layout:
        """The tower without its tensors."""
        return Layout(self.links, self.precision, bounded_input, dtype, tuple(b is not None for b in self.biases))

    def restored(self) -> nn.Module:
        """The module this replaced; its children are the same objects."""
        module: nn.Module = self.__dict__["_original"][0]
        return module.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N] in the input's type, or autocast's where it is on."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        width = self._linears[0].in_features
        if x.shape[-1] != width:
            raise ValueError(f"this tower takes [..., {width}], got {tuple(x.shape)}")
        layout, biases = self.layout(dtype, self.bounded_input), self.biases
        flat = x.reshape(-1, width)
        with torch.autocast(kind, enabled=False):
            if self.needs_gradient(x):
                y: Tensor = _Tower.apply(flat, self._scale, layout, *self.weights, *biases)  # type: ignore[no-untyped-call]
            else:
                y = self._infer(_quantize_input(flat.detach(), self._scale, layout), layout, biases)
        y = y.reshape(*x.shape[:-1], self._linears[-1].out_features)
        for module in self._tail:
            y = module(y)
        return y

    def needs_gradient(self, x: Tensor) -> bool:
        """Whether to run the differentiable form. A frozen tower has none: asked for a gradient it raises, for it would lose it without a word."""
        if not self.frozen:
            return torch.is_grad_enabled()
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError("a frozen tower has no gradient, and its input asks for one; hint: serve under torch.no_grad(), or thaw() the tower")  # fmt: skip
        return False

    def infer(self, x: QTensor, dtype: torch.dtype) -> Tensor:
        """From an input that is already FP8 [M, K], without gradients and without the tail; for kernels that write what a tower reads."""
        return self._infer(x, self.layout(dtype, True), self.biases)

    def _infer(self, a: QTensor, layout: Layout, biases: Sequence[Tensor | None]) -> Tensor:
        y: Tensor | None = None
        for index, weight in enumerate(self._quantized_weights()):
            result = _run_link(a, weight, biases[index], self._scale, layout, index, training=False)
            if isinstance(result.y, QTensor):
                a = result.y
            else:
                y = result.y
        assert y is not None
        return y

    def _quantized_weights(self) -> list[QTensor]:
        if self.frozen:
            names = range(len(self.links))
            return [QTensor(getattr(self, f"_w{i}"), getattr(self, f"_s{i}"), _TENSOR) for i in names]
        backend = self.precision.quantize_backend
        return [quantize(linear.weight.detach(), _TENSOR, backend=backend) for linear in self._linears]

    def freeze(self, *, offload: bool = False) -> "FusedTower":
        """Quantise the weights once, for serving; they are not followed any more until `thaw` or `train()`. Nothing enters the state_dict.

        `offload` moves the weights in high precision to the host meanwhile: a frozen tower then takes half the memory of a 16-bit one, not one and a half.
        """
        self.thaw()
        for index, q in enumerate(self._quantized_weights()):
            self.register_buffer(f"_w{index}", q.data, persistent=False)
            self.register_buffer(f"_s{index}", q.scale, persistent=False)
        self.frozen = True
        if offload:
            self._move_weights(torch.device("cpu"))
        return self

    def _move_weights(self, device: torch.device) -> None:
        for linear in self._linears:
            if linear.weight.device != device:
                linear.weight.data = linear.weight.data.to(device)

    def thaw(self) -> "FusedTower":
        """Follow the weights again."""
        if self.frozen:
            for index in range(len(self.links)):
                delattr(self, f"_w{index}")
                delattr(self, f"_s{index}")
            self._move_weights(self._scale.device)
        self.frozen = False
        return self

    def train(self, mode: bool = True) -> "FusedTower":
        """Training mode thaws: frozen weights have no gradient."""
        if mode and getattr(self, "frozen", False):
            self.thaw()
        return super().train(mode)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.thaw()  # the frozen weights were made from other ones

    def extra_repr(self) -> str:
        """Precision and shape."""
        widths = [self._linears[0].in_features, *(linear.out_features for linear in self._linears)]
        state = ", frozen" if self.frozen else ""
        return f"{' -> '.join(map(str, widths))}, {self.precision}{state}"


def _check_links(module: nn.Module, links: Sequence[Link]) -> None:
    if not links:
        raise ValueError("a fused tower needs at least one linear")
    width: int | None = None
    for index, link in enumerate(links):
        linear = module.get_submodule(link.linear)
        if not isinstance(linear, nn.Linear):
            raise ValueError(f"{link.linear} is a {type(linear).__name__}, expected nn.Linear")
        if width is not None and linear.in_features != width:
            raise ValueError(f"{link.linear} takes {linear.in_features} features, the layer before it gives {width}")
        if not link.bounded and index < len(links) - 1:
            raise ValueError(
                f"{link.linear} has no norm behind it: nothing bounds what it hands on, so no static scale is safe; "
                "hint: apply the block_norm mod first, or end the tower here"
            )
        width = linear.out_features


def freeze(model: nn.Module, *, offload: bool = False) -> int:
    """Freeze every fused tower of a model for serving, its 16-bit weights on the host where asked; returns how many."""
    towers = [module for module in model.modules() if isinstance(module, FusedTower)]
    for tower in towers:
        tower.freeze(offload=offload)
    return len(towers)
