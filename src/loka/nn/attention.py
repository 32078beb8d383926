"""Softmax attention as separate modules: the parameter-free product, rotary positions, and self-attention.

    out = softmax(Q K^T / sqrt(d_head) + mask) V,     heads of Q in groups that share a K and V head (GQA)

The projections are `nn.Linear` children (`qkv`, `out`), and both batched products are in DotProductAttention, so tools
that look for heavy computation find three modules. Queries, keys and values of one input are one GEMM. Rotary angles
are a table: if forward computed them from positions, a compiler would recompute them for every element of every query
and key, a third of an InterFormer's step.

Not supported here: the SiLU attention of HSTU (see `silu_attention`), dropout of attention weights, caches.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.kernels import BACKENDS, masked_attention
from loka.nn.mix import compute_dtype


class DotProductAttention(nn.Module):
    """q [B, H, T, d], k and v [B, G, S, d] with G dividing H -> [B, H, T, d].

    With a mask it runs a `masked_attention` kernel of the registry, which skips padding; without one, torch's
    attention.

    Args:
        causal: a query attends to keys up to its own position.
        backend: for calls with a mask: "auto", or a backend of `masked_attention`.

    `mask` [B, S] is True for valid keys. `wanted` [B, T], allowed with a mask, is True for queries whose result is
    needed; the others, and queries without a valid key, return zeros. `chosen` is the backend of the latest call with a
    mask and `refusals` why the ones before it refused; compiled calls do not update them.

    Example:
        >>> q = k = v = torch.randn(2, 4, 5, 16)
        >>> DotProductAttention(causal=True)(q, k, v).shape
        torch.Size([2, 4, 5, 16])
    """

    def __init__(self, *, causal: bool = False, backend: str = "auto") -> None:
        super().__init__()
        if backend not in ("auto", *BACKENDS["masked_attention"]):
            raise ValueError(
                f"DotProductAttention has no backend {backend!r}; backends are auto, "
                f"{', '.join(BACKENDS['masked_attention'])}"
            )
        self.causal, self.backend = causal, backend
        self.chosen: str | None = None
        self.refusals: dict[str, str] = {}
        masked_attention.load()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the kernels: the next call may be compiled."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        masked_attention.load()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, wanted: Tensor | None = None
    ) -> Tensor:
        """Compute the attention."""
        if wanted is not None and mask is None:
            raise ValueError("`wanted` needs a mask of keys, got none")
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
        """Return the mask kind, and the requested and the actual backend."""
        ran = f", ran {self.chosen}" if self.chosen and self.chosen != self.backend else ""
        return f"causal={self.causal}, backend={self.backend}{ran}"


class Rotary(nn.Module):
    """Rotary positions for x [B, H, T, d]: the pair (i, i + d/2) at position t is rotated by t * base^(-2i/d)."""

    table: Tensor

    def __init__(self, d: int, length: int, *, base: float = 10_000.0) -> None:
        super().__init__()
        if d % 2:
            raise ValueError(f"rotary positions pair features, so the head width must be even, got {d}")
        self.d, self.length, self.base = d, length, base
        # stored as integers, so that casting the model to 16-bit keeps the angles in float32
        self.register_buffer("table", torch.empty(2, length, d // 2, dtype=torch.int32), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Compute the cosines and sines on the module's device, also after `to_empty`."""
        wide, device = torch.float64, self.table.device
        rates = self.base ** (-torch.arange(0, self.d, 2, device=device, dtype=wide) / self.d)
        angles = torch.arange(self.length, device=device, dtype=wide)[:, None] * rates
        self.table.copy_(torch.stack([angles.cos(), angles.sin()]).float().view(torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        """Rotate, at least in float32."""
        if x.shape[-2] > self.length or x.shape[-1] != self.d:
            raise ValueError(f"x has {x.shape[-2]} positions of {x.shape[-1]}; the table {self.length} of {self.d}")
        cos, sin = self.table[:, : x.shape[-2]].view(torch.float32).unbind()
        a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)

    def extra_repr(self) -> str:
        """Return width and length."""
        return f"{self.d}, length={self.length}"


class SelfAttention(nn.Module):
    """Multi-head self-attention over x [B, T, d].

    Args:
        d: features.
        heads: number of heads; divides d.
        causal: a token attends to itself and those before it.
        rotary: maximum number of positions for rotary embeddings; 0 for none.
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
        """Compute x [B, T, d], mask [B, T] -> [B, T, d]. The mask is True for real tokens; the others are ignored."""
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        out: Tensor = self.out(merge_heads(self.attention(q, k, v, mask, mask)))
        return out

    def extend(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Compute one more position, x [B, 1, d], after `past` keys and values; also return these, extended."""
        if self.rotary is not None or x.shape[1] != 1:
            raise ValueError(f"extend takes one position without rotary angles, got {x.shape[1]} with {self.rotary}")
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        out: Tensor = self.out(merge_heads(self.attention(q, k, v)))
        return out, (k, v)


def check_heads(d: int, heads: int) -> None:
    """Raise if the number of heads does not divide the width."""
    if heads < 1 or d % heads:
        raise ValueError(f"{heads} heads do not divide a width of {d}")


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, H d] -> [B, H, T, d], a view."""
    return x.view(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, d] -> [B, T, H d]."""
    return x.transpose(1, 2).flatten(2)
