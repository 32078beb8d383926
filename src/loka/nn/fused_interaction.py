"""A Wukong layer for serving: its interactions in two kernels around an FP8 tower, x read once (loka.kernels.interaction).

It stands in for a module with the children `mix` (FeatureMix: n_l, k and perhaps residual rows), `fmb` (with `norm` and a fused `mlp`) and `norm`, and shares
them under their names. With gradients on it computes what the layer computes, module by module: the kernels keep nothing for backward.
"""

from typing import Any

import torch
from torch import Tensor, nn

from loka.kernels import registry
from loka.kernels.fused_linear import NORMALIZED_SCALE
from loka.kernels.interaction import InteractionCall, finish, interact
from loka.nn.fused_tower import FusedTower
from loka.nn.mix import FeatureMix
from loka.nn.norm import BLOCK, BlockNorm


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
        if torch.is_grad_enabled():
            compressed, mixtures, *rest = self.mix.split(x)
            residual = rest[0] if rest else x
            out: Tensor = self.norm(torch.cat([self.fmb(x, mixtures), compressed], 1) + residual)
            return out
        call = self.describe(x)
        made = interact(x, self.mix.weight, call, self._scale, backend=self.backend)
        return finish(made, self.fmb.mlp.infer(made.products, x.dtype), call, backend=self.backend)

    def extra_repr(self) -> str:
        """What runs when."""
        return f"fused for inference on {self.backend}"


def refuse(layer: nn.Module) -> str | None:
    """Why a layer cannot be fused, or None."""
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
