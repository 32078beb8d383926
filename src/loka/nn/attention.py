"""Softmax attention as named parts: the parameter-free product, rotary positions, and self-attention around them.

    out = softmax(Q K^T / sqrt(d_head) + mask) V,     heads of Q in groups that share a K and V head (GQA)

The projections are `nn.Linear` children (`qkv`, `out`); the two batched products live in DotProductAttention, so a tool that looks for heavy
computation finds three names. Queries, keys and values of one input are one GEMM. Rotary angles are a table: made from positions in forward, a compiler makes them again for every
element of every query and key, a third of an InterFormer's step.

Not here: the SiLU attention of HSTU (`silu_attention`), dropout of attention weights, caches.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.kernels import BACKENDS, masked_attention
from loka.nn.mix import compute_dtype


class DotProductAttention(nn.Module):
    """q [B, H, T, d], k and v [B, G, S, d] with G dividing H -> [B, H, T, d]. With a mask a kernel of the registry runs (`masked_attention`), which passes over padding; without one, torch's.

    Args:
        causal: a query sees keys up to its own place.
        backend: of calls with a mask: "auto", or a backend of the registry's `masked_attention`.

    `mask` [B, S] is True for keys that may be seen; `wanted` [B, T], with a mask, for queries whose answers are read: the others, and those that see no key, are answered with zeros.
    `chosen` is the backend that the latest call with a mask ran, and `refusals` what those before it said; both are kept by calls that are not being compiled.

    Example:
        >>> DotProductAttention(causal=True)(q, k, v)
    """

    def __init__(self, *, causal: bool = False, backend: str = "auto") -> None:
        super().__init__()
        if backend not in ("auto", *BACKENDS["masked_attention"]):
            raise ValueError(f"DotProductAttention has no backend {backend!r}; backends are auto, {', '.join(BACKENDS['masked_attention'])}")  # fmt: skip
        self.causal, self.backend = causal, backend
        self.chosen: str | None = None
        self.refusals: dict[str, str] = {}
        masked_attention.load()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A module that was pickled by an earlier version has no backend; and what is unpickled may be compiled at once."""
        super().__setstate__({"backend": "auto", "chosen": None, "refusals": {}, **state})  # type: ignore[no-untyped-call]
        masked_attention.load()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, wanted: Tensor | None = None
    ) -> Tensor:
        """Attend."""
        if wanted is not None and mask is None:
            raise ValueError("wanted queries are those of a masked attention: give a mask of keys too")
        if mask is not None and self.causal:
            raise ValueError("a causal DotProductAttention takes no mask of keys; use causal=False with a mask")
        if self.causal and q.shape[2] not in (1, k.shape[2]):
            raise ValueError(f"causal attention takes all {k.shape[2]} queries or the newest one, got {q.shape[2]}")
        # The newest query alone sees every key; torch's causal mask would align it with the first.
        causal = self.causal and q.shape[2] > 1
        if mask is not None:
            q, k, v = (t.to(compute_dtype(t)) for t in (q, k, v))
            if not torch.compiler.is_compiling():
                selection = masked_attention.choose(q, k, backend=self.backend)
                self.chosen, self.refusals = selection.name, selection.refusals
            return masked_attention.masked_attention(q, k, v, mask, wanted=wanted, backend=self.backend)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    def extra_repr(self) -> str:
        """Whether causal, and the backend that was asked for and that ran."""
        ran = f", ran {self.chosen}" if self.chosen and self.chosen != self.backend else ""
        return f"causal={self.causal}, backend={self.backend}{ran}"


class Rotary(nn.Module):
    """Rotary positions: pair (i, i + d/2) of position t is turned by the angle t * base^(-2i/d). x [B, H, T, d] -> the same shape.

    Args:
        d: width of a head, even.
        length: positions there are.
        base: of the angles.

    Example:
        >>> Rotary(32, 260)(torch.randn(2, 4, 256, 32)).shape
        torch.Size([2, 4, 256, 32])
    """

    table: Tensor

    def __init__(self, d: int, length: int, *, base: float = 10_000.0) -> None:
        super().__init__()
        if d % 2:
            raise ValueError(f"rotary positions pair features, so the head width must be even, got {d}")
        self.d, self.length, self.base = d, length, base
        # as bits: a model that is put into 16 bits keeps its angles
        self.register_buffer("table", torch.empty(2, length, d // 2, dtype=torch.int32), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Make the cosines and sines, where the module is: after `to_empty` too."""
        wide, device = torch.float64, self.table.device
        rates = self.base ** (-torch.arange(0, self.d, 2, device=device, dtype=wide) / self.d)
        angles = torch.arange(self.length, device=device, dtype=wide)[:, None] * rates
        self.table.copy_(torch.stack([angles.cos(), angles.sin()]).float().view(torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        """Rotate, in float32 at least."""
        if x.shape[-2] > self.length or x.shape[-1] != self.d:
            raise ValueError(f"x has {x.shape[-2]} positions of {x.shape[-1]}; the table {self.length} of {self.d}")
        cos, sin = self.table[:, : x.shape[-2]].view(torch.float32).unbind()
        a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)

    def extra_repr(self) -> str:
        """Positions and width."""
        return f"{self.d}, length={self.length}"


class SelfAttention(nn.Module):
    """Multi-head self-attention over x [B, T, d].

    Args:
        d: features.
        heads: that divide them.
        causal: a token sees those before it.
        rotary: how many positions there are to rotate queries and keys by; 0 rotates none.
        bias: of the linears.

    Example:
        >>> SelfAttention(64, 4, causal=True)(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    def __init__(self, d: int, heads: int, *, causal: bool = False, rotary: int = 0, bias: bool = False) -> None:
        super().__init__()
        check_heads(d, heads)
        self.heads = heads
        self.rotary = Rotary(d // heads, rotary) if rotary else None
        self.qkv = nn.Linear(d, 3 * d, bias=bias)
        self.attention = DotProductAttention(causal=causal)
        self.out = nn.Linear(d, d, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B, T, d], mask [B, T] (True: a real token; the others neither ask nor are asked) -> [B, T, d]."""
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        out: Tensor = self.out(merge_heads(self.attention(q, k, v, mask, mask)))
        return out

    def extend(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One more position, x [B, 1, d], after the keys and values of the earlier ones; returns them with its own appended."""
        if self.rotary is not None or x.shape[1] != 1:
            raise ValueError(f"extend takes one position without rotary angles, got {x.shape[1]} with {self.rotary}")
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        out: Tensor = self.out(merge_heads(self.attention(q, k, v)))
        return out, (k, v)


def check_heads(d: int, heads: int) -> None:
    """Heads must divide the width."""
    if heads < 1 or d % heads:
        raise ValueError(f"{heads} heads do not divide a width of {d}")


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, H d] -> [B, H, T, d], a view."""
    return x.view(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, d] -> [B, T, H d]."""
    return x.transpose(1, 2).flatten(2)
