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
from typing import Any

import torch
from torch import Tensor, nn

from loka.formats import QTensor
from loka.kernels.fused_linear import NORMALIZED_SCALE
from loka.kernels.quantize import quantize
from loka.lowp.tower_function import TENSOR_SPEC, Layout, Link, TowerFunction, TowerPrecision, quantize_input, run_link


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
                y: Tensor = TowerFunction.apply(flat, self._scale, layout, *self.weights, *biases)  # type: ignore[no-untyped-call]
            else:
                y = self._infer(quantize_input(flat.detach(), self._scale, layout), layout, biases)
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
            result = run_link(a, weight, biases[index], self._scale, layout, index, training=False)
            if isinstance(result.y, QTensor):
                a = result.y
            else:
                y = result.y
        assert y is not None
        return y

    def _quantized_weights(self) -> list[QTensor]:
        if self.frozen:
            names = range(len(self.links))
            return [QTensor(getattr(self, f"_w{i}"), getattr(self, f"_s{i}"), TENSOR_SPEC) for i in names]
        backend = self.precision.quantize_backend
        return [quantize(linear.weight.detach(), TENSOR_SPEC, backend=backend) for linear in self._linears]

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
