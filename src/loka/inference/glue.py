"""The small operations between the GEMMs, each in one pass if possible; on a GPU they are compiled to one kernel each.

    add_norm        h <- h + delta;  y = norm(h)         before FP8 GEMMs: kernels.norm_quantize, which also quantizes y
    embed, join     of the context: items as sums of table rows; the norm of concatenated tokens
    route           (token, expert) pairs sorted by expert, with their weights, including a folded shared expert:
                    kernels.route
    gate            act(gate) * up                       with SiLU: kernels.swiglu_quantize, which can also quantize
    lse             log-sum-exp of logits in float32

Compiled functions have a dynamic number of rows and static widths, so that one compilation serves all buckets. They are
compiled outside graph capture, by the warm-up run.
"""

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
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
    """Return x / rms(x) * weight, computed in float32, in x's dtype."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(y, (x.shape[-1],), None if weight is None else weight.to(y.dtype), eps).to(x.dtype)


def normalize(x: Tensor, kind: str, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Apply any of the norms that a `PackedNorm` describes."""
    if kind == "none":
        return x
    if kind == "rms":
        return rms(x, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    if kind == "layer":
        assert weight is not None  # a layer norm of loka.nn is affine
        return F.layer_norm(y, (x.shape[-1],), weight.to(wide), None if bias is None else bias.to(wide), eps).to(x.dtype)  # fmt: skip
    parts = [p * torch.rsqrt(p.square().mean(-1, keepdim=True) + eps) for p in torch.split(y, NORM_BLOCK, -1)]
    return torch.cat(parts, -1).to(x.dtype)


def embed(codes: Tensor, positions: Tensor, first_rows: Tensor, table: Tensor, item_table: Tensor | None) -> Tensor:
    """Return items [R, S, d]: the sum of the table rows of their codes [R, S, columns], and of their positions [S, d].

    Codes of level i are rows `first_rows[i]` and on; a column beyond the levels is a row of `item_table`.
    """
    levels = first_rows.shape[0]
    items = F.embedding(codes[..., :levels] + first_rows, table).sum(2)
    if item_table is not None:
        items = items + F.embedding(codes[..., levels], item_table)
    return items + positions


def lse(logits: Tensor) -> Tensor:
    """Return the log-sum-exp over the last dimension, in float32."""
    return torch.logsumexp(logits.float(), -1)


@lru_cache(maxsize=64)
def compiled_add_rms(eps: float, compiler: str | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function to h + delta and its `rms` with this eps, see `compiled`.

    eps is closed over, because numbers passed to a compiled function become symbols.
    """

    def run_add_rms(h: Tensor, delta: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        h = h + delta
        return h, rms(h, weight, eps)

    return compiled(run_add_rms, compiler, rows=2)


@lru_cache(maxsize=64)
def compiled_join(kind: str, eps: float, parts: int, compiler: str | None) -> Callable[..., Tensor]:
    """Return the norm of `parts` tensors [..., S_i, d], concatenated along S, see `compiled`."""

    def run_join(*operands: Tensor) -> Tensor:
        *joined, weight, bias = operands
        return normalize(joined[0] if parts == 1 else torch.cat(joined, 1), kind, weight, bias, eps)

    return compiled(run_join, compiler, rows=parts)


@lru_cache(maxsize=64)
def compiled(function: Callable[..., Any], compiler: str | None, *, rows: int) -> Callable[..., Any]:
    """Compile a function for any number of rows, by `compiler` or, if None, not at all. Engines share the result.

    All dimensions but the last of the first `rows` operands are dynamic.
    """
    if compiler is None:
        return function
    # torch counts recompilations by code object and raises after eight. All functions that one factory makes have the
    # same code, so each gets a copy: two engines with other norms or widths in a process would be too many.
    assert isinstance(function, FunctionType)
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__)
    made = torch.compile(own, fullgraph=True, backend=compiler)

    def call(*operands: Any) -> Any:
        for operand in operands[:rows]:
            for dimension in range(operand.dim() - 1):
                torch._dynamo.maybe_mark_dynamic(operand, dimension)
        return made(*operands)

    return call


class Glue:
    """The operations of one engine, compiled or eager."""

    def __init__(self, *, fuse: bool, backends: dict[str, str], compiler: str = "inductor") -> None:
        self.backends, self.compiler = backends, compiler if fuse else None
        self.lse, self.embed = compiled(lse, self.compiler, rows=1), compiled(embed, self.compiler, rows=2)

    def join(self, parts: list[Tensor], norm: PackedNorm) -> Tensor:
        """Return the norm of tokens that are concatenated along their second dimension."""
        return compiled_join(norm.kind, norm.eps, len(parts), self.compiler)(*parts, norm.weight, norm.bias)

    def add_norm(
        self, h: Tensor, delta: Tensor | None, norm: PackedNorm, spec: Spec | None, *, plain: bool = False
    ) -> tuple[Operand, Tensor | None, Tensor]:
        """Return norm(h + delta) as the next linear takes it, the same unquantized if `plain`, and the new h."""
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
            if norm.kind == "rms":
                y = self.join([h], norm)
            else:
                y = normalize(h, norm.kind, norm.weight, norm.bias, norm.eps)
        x = y if spec is None else quantize(y, spec, backend=self.backends.get("quantize", "auto"))
        return x, y if plain else None, h

    def route(self, x: Tensor, moe: PackedExperts) -> tuple[Permutation, Tensor]:
        """Return the (token, expert) pairs sorted by expert, and their weights."""
        name = self.backends.get("route", "auto")
        return route_sorted(x, moe.router, moe.balance, moe.top, always=moe.always, backend=name)

    def gate(self, both: Tensor, activation: nn.Module, spec: Spec | None) -> Operand:
        """Return act(gate) * up of [M, 2 F], quantized if the next linear needs it."""
        if isinstance(activation, nn.SiLU) and both.dtype != torch.float64:
            return swiglu_quantize(both, spec)
        gate, up = both.chunk(2, -1)
        y = activation(gate) * up
        return y if spec is None else quantize(y.contiguous(), spec, backend=self.backends.get("quantize", "auto"))
