"""A whole Wukong layer as one autograd node: its interactions in two kernels around an FP8 tower, x read once (loka.kernels.interaction).

It stands in for a module with the children `mix` (FeatureMix: n_l, k and perhaps residual rows), `fmb` (with `norm` and a fused `mlp`) and `norm`, and shares
them under their names.

    forward     interact(x) -> FP8 products, half of next;   tower;   finish -> next
    backward    norm_gradient(d next) -> dS;   tower backward of dS's first half;   interact_gradient -> dx, dW

For backward a layer keeps x, next (which the layer after it keeps anyway as its x), one rstd a vector, and what its tower keeps in FP8: the products and mixtures are
computed again from x.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from loka.kernels import registry
from loka.kernels.fused_linear import NORMALIZED_SCALE
from loka.kernels.interaction import InteractionCall, finish, interact, interact_gradient, norm_gradient
from loka.kernels.interaction.triton import fits
from loka.kernels.quantize import transpose
from loka.lowp.fused_tower import FusedTower
from loka.lowp.tower_function import Layout, run_backward, run_forward
from loka.nn.mix import FeatureMix, compute_dtype
from loka.nn.norm import BLOCK, BlockNorm


class _Layer(torch.autograd.Function):
    """x [B, n, d], the rows of the mix, scale [], then the tower's weights and biases -> next [B, n_f + n_l, d]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mix: Tensor,
        scale: Tensor,
        call: InteractionCall,
        backend: str,
        layout: Layout,
        *parameters: Any,
    ) -> Tensor:
        count = len(layout.links)
        made = interact(x, mix, call, scale, keep=True, backend=backend)
        turned = transpose(made.products, backend=layout.precision.quantize_backend)
        y, saved = run_forward(made.products, turned, scale, layout, parameters[:count], parameters[count:])
        following = finish(made, y, call, backend=backend)
        ctx.save_for_backward(x, mix, scale, following, made.rstd, *saved)
        ctx.call, ctx.backend, ctx.layout = call, backend, layout
        ctx.dtypes = tuple(None if p is None else p.dtype for p in parameters)
        return following

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mix, scale, following, rstd, *saved = ctx.saved_tensors
        call, backend = ctx.call, ctx.backend
        ds = norm_gradient(grads[0], following, rstd, call, backend=backend)
        dy = ds.flatten(1)[:, : call.n_f * call.d]
        dq, dweights, dbiases = run_backward(
            dy, saved, scale, ctx.layout, dtypes=ctx.dtypes, needs_input=True, needs_weight=ctx.needs_input_grad[6:]
        )
        dx, dmix = interact_gradient(x, mix, dq, ds, call, backend=backend)
        dmix = dmix if dmix.dtype == mix.dtype else dmix.to(mix.dtype)
        return dx, dmix, None, None, None, None, *dweights, *dbiases


class FusedInteraction(nn.Module):
    """Make one with `FusedInteraction.replacing(layer)`, after the layer's tower is a FusedTower."""

    mix: FeatureMix
    fmb: Any
    norm: BlockNorm
    _scale: Tensor

    @classmethod
    def replacing(cls, layer: nn.Module, *, backend: str = "auto") -> "FusedInteraction":
        """Share the children of a layer; refuses one that is something else."""
        refusal = refuse(layer)
        if refusal:
            raise ValueError(f"{type(layer).__name__} cannot be fused: {refusal}")
        fused = cls.__new__(cls)
        nn.Module.__init__(fused)
        for name, child in layer.named_children():
            fused.add_module(name, child)
        fused.__dict__["_original"] = (layer,)
        fused.backend = backend
        registry.load("interaction")
        device = fused.mix.weight.device
        fused.register_buffer("_scale", torch.full((), NORMALIZED_SCALE, device=device), persistent=False)
        fused.train(layer.training)
        return fused

    backend: str

    def restored(self) -> nn.Module:
        """The layer this replaced."""
        layer: nn.Module = self.__dict__["_original"][0]
        return layer.train(self.training)

    def describe(self, x: Tensor) -> InteractionCall:
        """The call for one batch."""
        n_l, k, *rest = self.mix.rows
        n_f, d = self.fmb.shape
        return InteractionCall(x.shape[0], self.mix.n, d, k, n_l, n_f, bool(rest), x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, d] -> [B, n_f + n_l, d]."""
        x = x.to(compute_dtype(x))
        call, tower = self.describe(x), self.fmb.mlp
        with torch.autocast(x.device.type, enabled=False):
            if not tower.needs_gradient(x):
                made = interact(x, self.mix.weight, call, self._scale, backend=self.backend)
                return finish(made, tower.infer(made.products, x.dtype), call, backend=self.backend)
            layout = tower.layout(x.dtype, True)
            out: Tensor = _Layer.apply(  # type: ignore[no-untyped-call]
                x.contiguous(), self.mix.weight, self._scale, call, self.backend, layout, *tower.weights, *tower.biases
            )
        return out

    def extra_repr(self) -> str:
        """What runs when."""
        return f"fused, on {self.backend}"


def refuse_interaction(layer: Any) -> str | None:
    """Why a layer cannot be fused, its size on a GPU included, or None."""
    reason = refuse(layer)
    if reason is not None:
        return reason
    n_l, k, *rest = layer.mix.rows
    n_f, d = layer.fmb.shape
    verdict = fits(InteractionCall(1, layer.mix.n, d, k, n_l, n_f, bool(rest)))
    return None if verdict else verdict.reason


def refuse(layer: Any) -> str | None:
    """Why a layer is not one of these, or None."""
    mix, fmb, norm = (getattr(layer, name, None) for name in ("mix", "fmb", "norm"))
    if not isinstance(mix, FeatureMix) or fmb is None or norm is None:
        return "it has no children mix, fmb and norm"
    if not isinstance(getattr(fmb, "mlp", None), FusedTower):
        return "its tower fmb.mlp is not a FusedTower yet; fuse towers first"
    if fmb.mlp._tail:
        return "its tower ends in modules that stay in high precision"
    for name, found in (("norm", norm), ("fmb.norm", fmb.norm)):
        if not isinstance(found, BlockNorm) or found.block != min(BLOCK, found.width):
            return f"its {name} is {found}, expected BlockNorm over blocks of {BLOCK}; hint: the block_norm mod"
    return None
