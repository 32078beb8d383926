"""The small operations between the GEMMs, each one pass where it can be: on a GPU torch.compile makes one kernel of each.

    add_norm        h <- h + delta;  y = norm(h)                       in FP8 blocks: kernels.norm_quantize, which also quantises y
    route           visits of the tokens sorted by expert, and their weights, the shared one among them where it was folded in: kernels.route
    gate            act(gate) * up                                     with silu in one pass, quantised where asked: kernels.swiglu_quantize
    lse             log-sum-exp of logits in float32

Compiled functions take the number of rows as a symbol and widths as they are, so that one compilation serves all buckets. They are compiled outside graph
capture, by the warm-up run.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.formats import Spec
from loka.inference.weights import Operand, PackedExperts, PackedNorm
from loka.kernels.fused_linear.call import NORM_BLOCK
from loka.kernels.grouped_mm import Permutation, swiglu_quantize
from loka.kernels.norm_quantize import norm_quantize
from loka.kernels.quantize import quantize
from loka.kernels.route import route_sorted


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / rms(x) * weight in float32, in x's dtype."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(y, (x.shape[-1],), None if weight is None else weight.to(y.dtype), eps).to(x.dtype)


def add_rms(h: Tensor, delta: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of the residual stream and what is added to it, and its norm."""
    h = h + delta
    return h, rms(h, weight, eps)


def normalize(x: Tensor, norm: PackedNorm) -> Tensor:
    """Any of the norms, plainly."""
    if norm.kind == "none":
        return x
    if norm.kind == "rms":
        return rms(x, norm.weight, norm.eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    if norm.kind == "layer":
        assert norm.weight is not None  # a layer norm of loka.nn is affine
        bias = None if norm.bias is None else norm.bias.to(wide)
        return F.layer_norm(y, (x.shape[-1],), norm.weight.to(wide), bias, norm.eps).to(x.dtype)
    parts = [p * torch.rsqrt(p.square().mean(-1, keepdim=True) + norm.eps) for p in torch.split(y, NORM_BLOCK, -1)]
    return torch.cat(parts, -1).to(x.dtype)


def lse(logits: Tensor) -> Tensor:
    """Log-sum-exp over the last dimension, float32."""
    return torch.logsumexp(logits.float(), -1)


@lru_cache(maxsize=64)
def compiled_rms(eps: float, compiler: str | None) -> Callable[..., Tensor]:
    """`rms` with this eps, compiled by `compiler` or not at all.

    Constants are closed over, because numbers passed to a compiled function become symbols; and every operation has a function of its own, because
    torch.compile counts recompilations by code object and gives up on one that has too many. Engines share them.
    """

    def run_rms(x: Tensor, weight: Tensor | None) -> Tensor:
        return rms(x, weight, eps)

    return _compile(run_rms, compiler, rows=1)


@lru_cache(maxsize=64)
def compiled_add_rms(eps: float, compiler: str | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """`add_rms` with this eps."""

    def run_add_rms(h: Tensor, delta: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        return add_rms(h, delta, weight, eps)

    return _compile(run_add_rms, compiler, rows=2)


@lru_cache(maxsize=4)
def compiled_lse(compiler: str | None) -> Callable[[Tensor], Tensor]:
    """`lse`."""
    return _compile(lse, compiler, rows=1)


def _compile(function: Callable[..., Any], compiler: str | None, *, rows: int) -> Callable[..., Any]:
    """Compiled for any number of rows: of the first `rows` operands every dimension but the last is a symbol."""
    if compiler is None:
        return function
    made = torch.compile(function, fullgraph=True, backend=compiler)

    def call(*operands: Any) -> Any:
        for operand in operands[:rows]:
            for dimension in range(operand.dim() - 1):
                torch._dynamo.maybe_mark_dynamic(operand, dimension)
        return made(*operands)

    return call


class Glue:
    """The operations, compiled or plain; one per engine."""

    def __init__(self, *, fuse: bool, backends: dict[str, str], compiler: str = "inductor") -> None:
        self.backends, self.compiler = backends, compiler if fuse else None
        self.lse = compiled_lse(self.compiler)

    def add_norm(
        self, h: Tensor, delta: Tensor | None, norm: PackedNorm, spec: Spec | None, *, plain: bool = False
    ) -> tuple[Operand, Tensor | None, Tensor]:
        """norm(h + delta) as the next linear takes it, in 16 bits too where `plain`, and the new residual stream."""
        if spec is not None and norm.kind != "none":
            found = norm_quantize(
                h if delta is None else delta,
                spec,
                norm=norm.kind,
                weight=norm.weight,
                bias=norm.bias,
                residual=None if delta is None else h,
                eps=norm.eps,
                out_dtype=h.dtype if plain else None,
                backend=self.backends.get("norm_quantize", "auto"),
            )
            assert found.q is not None  # there is a spec
            return found.q, found.y, cast(Tensor, found.h)
        if delta is not None and norm.kind == "rms":
            h, y = compiled_add_rms(norm.eps, self.compiler)(h, delta, norm.weight)
        else:
            h = h if delta is None else h + delta
            plainly = norm.kind != "rms"
            y = normalize(h, norm) if plainly else compiled_rms(norm.eps, self.compiler)(h, norm.weight)
        x = y if spec is None else quantize(y, spec, backend=self.backends.get("quantize", "auto"))
        return x, y if plain else None, h

    def route(self, x: Tensor, moe: PackedExperts) -> tuple[Permutation, Tensor]:
        """The visits of all tokens sorted by expert, and their weights."""
        name = self.backends.get("route", "auto")
        return route_sorted(x, moe.router, moe.balance, moe.top, always=moe.always, backend=name)

    def gate(self, both: Tensor, activation: nn.Module, spec: Spec | None) -> Operand:
        """act(gate) * up of [M, 2 F], quantised where the next linear wants it."""
        if isinstance(activation, nn.SiLU) and both.dtype != torch.float64:
            return swiglu_quantize(both, spec)
        gate, up = both.chunk(2, -1)
        y = activation(gate) * up
        return y if spec is None else quantize(y.contiguous(), spec, backend=self.backends.get("quantize", "auto"))
