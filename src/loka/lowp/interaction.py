"""A whole Wukong layer as one autograd node: two interaction kernels around an FP8 chain (`loka.kernels.interaction`).

It replaces the forward of a module with the children `mix` (FeatureMix: n_l, k and perhaps residual rows), `fmb` (with
`norm` and a tower `mlp` that is a chain) and `norm`. The module changes its class and keeps everything else (as in
`loka.lowp.chain`).

    forward     interact(x) -> FP8 products, half of next;   chain;   finish -> next
    backward    norm_gradient(d next) -> dS;   chain backward of dS's first half;   interact_gradient -> dx, dW

For backward a layer saves x, next (which the next layer saves anyway as its x), one rstd per vector, and what its chain
saves in FP8; the products and mixtures are recomputed from x.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from loka.formats import QTensor
from loka.kernels import registry
from loka.kernels.interaction import InteractionCall, finish, interact, interact_gradient, norm_gradient
from loka.kernels.interaction.triton import fits
from loka.kernels.quantize import transpose
from loka.lowp.chain import Chain, chain_of
from loka.lowp.chain_forward import run_forward
from loka.lowp.chain_function import ChainTensors, Layout
from loka.lowp.chain_node import restore_chain, save_chain, spread
from loka.lowp.leaving import only_once, refuse_tracing
from loka.nn.mix import FeatureMix, compute_dtype
from loka.nn.mixing import mix, unmix
from loka.nn.norm import BLOCK, BlockNorm


class _Layer(torch.autograd.Function):
    """x [B, n, d], the weight of the mix, scale [], and the chain's tensors -> next [B, n_f + n_l, d]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mix: Tensor, scale: Tensor, call: InteractionCall, layout: Layout, *flat: Any
    ) -> Tensor:
        tensors = ChainTensors.unflatten(flat, len(layout.links))
        made = interact(x, mix, call, scale, keep=True)
        turned = transpose(made.products, backend=layout.precision.quantize_backend)
        y, saved = run_forward(made.products, turned, layout, tensors)
        following = finish(made, y, call)
        save_chain(ctx, layout, tensors, saved, x, mix, following, made.rstd)
        ctx.call = call
        return following

    @staticmethod
    @only_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mix, following, rstd, *kept = ctx.saved_tensors
        call = ctx.call
        ds = norm_gradient(grads[0], following, rstd, call)
        dy = ds.flatten(1)[:, : call.n_f * call.d]
        made = restore_chain(ctx, dy, kept, needs_input=True, needs=ctx.needs_input_grad[5:])
        assert made.x is not None
        dx, dmix = interact_gradient(x, mix, made.x, ds, call)
        dmix = dmix if dmix.dtype == mix.dtype else dmix.to(mix.dtype)
        return dx, dmix, None, None, None, *spread(made)


@torch.no_grad()
def _look(chain: Chain, products: Any, layout: Layout, seed: Tensor | None) -> None:
    """Run the chain a second time in an observed step, to record its errors for Guard."""
    chain.look(products.dequantize().to(layout.dtype), chain.infer(products, layout, seed), seed)


@torch.no_grad()
def enter_chain(layer: Any, x: Tensor) -> tuple[QTensor, Callable[[Tensor, Tensor], Tensor]]:
    """Return the input of the chain inside a fused layer, for observers.

    Args:
        layer: a layer that `place_interaction` changed.
        x: the layer's input.

    Returns:
        The chain's input in FP8, and `pull(y, gradient)`, which computes the gradient of the chain's output y from that
        of the layer's output.
    """
    call, chain = _describe(layer, x.shape[0], x.dtype), _tower_of(layer)
    assert chain is not None
    made = interact(x.contiguous(), layer.mix.weight.detach(), call, chain.static, keep=True)

    def pull(y: Tensor, gradient: Tensor) -> Tensor:
        ds = norm_gradient(gradient, finish(made, y, call), made.rstd, call)
        return ds.flatten(1)[:, : call.n_f * call.d]

    return made.products, pull


class _Fused(nn.Module):
    """The forward of a fused layer; it is mixed in before the layer's own class."""

    mix: FeatureMix
    fmb: Any
    norm: BlockNorm

    def forward(self, x: Tensor) -> Tensor:
        """Compute [B, n, d] -> [B, n_f + n_l, d]. An empty batch runs the layer's own forward: kernels need a row."""
        if x.shape[0] == 0:
            empty: Tensor = super().forward(x)
            return empty
        x = x.to(compute_dtype(x))
        chain = _tower_of(self)
        assert chain is not None
        refuse_tracing(chain)
        call = _describe(self, x.shape[0], x.dtype)
        with chain.read_once(), torch.autocast(x.device.type, enabled=False):
            layout = chain.layout(x.dtype)
            seed = chain.draw_seed(layout, x.device)
            if chain.watching and chain.health is not None:
                _look(chain, interact(x.detach(), self.mix.weight.detach(), call, chain.static).products, layout, seed)
            if not chain.needs_gradient(x):
                made = interact(x, self.mix.weight, call, chain.static)
                return self._show(chain, x, finish(made, chain.infer(made.products, layout, seed), call), seed)
            out: Tensor = _Layer.apply(  # type: ignore[no-untyped-call]
                x.contiguous(), self.mix.weight, chain.static, call, layout, *chain.tensors(seed).flatten()
            )
        return self._show(chain, x, out, seed)

    @staticmethod
    def _show(chain: Chain, x: Tensor, out: Tensor, seed: Tensor | None) -> Tensor:
        tap = chain.tap
        return out if tap is None or not tap.on else tap.see(chain, x, out, seed)

    def extra_repr(self) -> str:
        """Say that the layer is fused."""
        return "interactions fused around the chain"


def _describe(layer: Any, rows: int, dtype: torch.dtype = torch.bfloat16) -> InteractionCall:
    n_l, k, *rest = layer.mix.rows
    n_f, d = layer.fmb.shape
    return InteractionCall(rows, layer.mix.n, d, k, n_l, n_f, bool(rest), dtype)


def _tower_of(layer: Any) -> Chain | None:
    """Return the chain that consists of all linears of a layer's tower, if there is one."""
    tower = getattr(getattr(layer, "fmb", None), "mlp", None)
    linears = [m for m in tower.modules() if isinstance(m, nn.Linear)] if isinstance(tower, nn.Module) else []
    chain = chain_of(linears[0]) if linears else None
    return chain if chain is not None and list(chain.linears) == linears else None


def place_interaction(layer: nn.Module) -> None:
    """Fuse the interactions of a Wukong layer around its tower, in place.

    Raise a ValueError if that is not possible.
    """
    chain = _tower_of(layer)
    linears, bounded = ([], False) if chain is None else (list(chain.linears), chain.bounded_input)
    if reason := refuse_interaction(layer, linears, bounded_input=bounded):
        raise ValueError(f"{type(layer).__name__} cannot be fused: {reason}")
    assert chain is not None
    chain.around = layer
    registry.load("interaction")
    layer.__class__ = mix(type(layer), _Fused)


def release_interaction(layer: nn.Module) -> None:
    """Undo `place_interaction`; a no-op for other layers."""
    if isinstance(layer, _Fused):
        if (chain := _tower_of(layer)) is not None:
            chain.around = None
        plain: nn.Module = layer
        plain.__class__ = unmix(type(layer), _Fused)


def interactions_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every fused layer with its name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, _Fused))


def refuse_interaction(layer: Any, linears: Sequence[nn.Module], *, bounded_input: bool) -> str | None:
    """Return why a layer's interactions cannot be fused around the linears of a chain, or None if they can."""
    mix, fmb, norm = (getattr(layer, name, None) for name in ("mix", "fmb", "norm"))
    if (
        not isinstance(mix, FeatureMix)
        or fmb is None
        or norm is None
        or not isinstance(getattr(fmb, "mlp", None), nn.Module)
    ):
        return "it has no children mix, fmb with a tower mlp, and norm"
    if [m for m in fmb.mlp.modules() if isinstance(m, nn.Linear)] != list(linears):
        return "its tower fmb.mlp is not one FP8 chain, first linear to last"
    if not bounded_input:
        return "nothing bounds what its tower reads"
    for name, found in (("norm", norm), ("fmb.norm", fmb.norm)):
        if not isinstance(found, BlockNorm) or found.block != min(BLOCK, found.width):
            return f"its {name} is {found}, expected BlockNorm over blocks of {BLOCK}; hint: the block_norm mod"
    verdict = fits(_describe(layer, 1))
    return None if verdict else verdict.reason
