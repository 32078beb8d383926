"""OneRec-V2: a lazy decoder that generates the next item as a semantic id (OneRec-V2 technical report, 2025).

    context    C = W [static || long-term || short-term]     [B, S, S_kv L_kv G_kv d_head], in chunks along features
               k_l = Norm(C_{l S_kv}),  v_l = Norm(C_{l S_kv + 1}) with S_kv = 2, else v_l = k_l
    block      h += CrossAttention(Norm(h), k, v);   h += CausalSelfAttention(Norm(h));   h += FFN(Norm(h))
    heads      logits of code p = W_p Norm_p(h at position p);    loss = mean cross-entropy over the codes of the id

The cross-attention is lazy: it has queries and an output projection, but no key and value projections. Block l reads
pair floor(l L_kv / layers) of the context, which is computed once per request and shared by blocks, by groups of query
heads (GQA) and, when decoding, by all beams of the request. The FFN is a SwiGLU, or a mixture of experts from block
`dense_blocks` on.

The decoder reads [BOS, code_1, ..., code_{L-1}]. Every level has its own codebook of any size, and ids may have any
number of levels. Items of the history are the sums of the same code embeddings over their levels; with `items`, an
embedding of the item itself is added, since codes describe an item but do not identify it. The static token is computed
from the user's features, or learned if there are none, so that a user without history still has a context.

Decoding: call `encode` once, then `step` once per code for [B, W] beams; self-attention caches keys and values. The
beam search is in `loka.models.beam`.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.models.ranker import check_positive
from loka.nn import DotProductAttention, EmbeddingTables, MixtureOfExperts, SelfAttention, Style, SwiGLU, make_norm
from loka.nn.attention import check_heads, merge_heads, split_heads
from loka.nn.embedding import Seeds, pad_recent
from loka.nn.mix import compute_dtype

if TYPE_CHECKING:
    from loka.data.batch import Jagged

LLM_STYLE = Style(norm="rms", activation="silu", bias=False)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture in the FFNs from block `dense_blocks` on; `hidden` is the width of one expert."""

    routed: int
    top: int
    hidden: int
    shared: int = 1
    dense_blocks: int = 2


@dataclass(frozen=True, kw_only=True)
class OneRecConfig:
    """codebooks: their sizes, by level; d_ff: width of a dense FFN; l_kv: key-value pairs; s_kv: 2 for separate values.

    g_kv: groups of heads; context: maximum history in items, of which the `short` latest take the short-term path;
    static: number of user features; items: rows of the table of item embeddings, padding included, or 0. With `items`,
    the values of a history have one more column, the item numbers.
    """

    codebooks: tuple[int, ...] = (32, 32, 32)
    d: int = 32
    layers: int = 2
    heads: int = 4
    d_ff: int = 64
    l_kv: int = 1
    s_kv: int = 1
    g_kv: int = 4
    context: int = 16
    short: int = 4
    static: int = 0
    items: int = 0
    experts: Experts | None = None
    style: Style = LLM_STYLE

    def __post_init__(self) -> None:
        check_positive(self, except_for=("static", "items"))
        check_heads(self.d, self.heads)
        if self.s_kv not in (1, 2):
            raise ValueError(
                f"OneRecConfig.s_kv is {self.s_kv}; expected 1 (values are the keys) or 2 (separate values)"
            )
        if self.heads % self.g_kv:
            raise ValueError(f"OneRecConfig.g_kv is {self.g_kv}; groups must divide the {self.heads} heads")
        if self.l_kv > self.layers:
            raise ValueError(f"OneRecConfig.l_kv is {self.l_kv}, more key-value pairs than the {self.layers} blocks")
        if self.short >= self.context or self.static < 0 or self.items < 0:
            raise ValueError(
                "OneRecConfig needs short < context, static >= 0 and items >= 0, "
                f"got {self.short}, {self.context}, {self.static}, {self.items}"
            )

    @property
    def levels(self) -> int:
        """Codes per id."""
        return len(self.codebooks)

    @property
    def history_width(self) -> int:
        """Columns of a history's values: the codes and, if there is a table of items, the item number."""
        return self.levels + (self.items > 0)

    @property
    def kv_width(self) -> int:
        """Features of one chunk of the context: G_kv heads."""
        return self.g_kv * (self.d // self.heads)


class Context(NamedTuple):
    """What all blocks read: key-value pairs [B, G, S, d_head], and which of the S tokens are real [B, S]."""

    pairs: list[tuple[Tensor, Tensor]]
    mask: Tensor


class ContextProcessor(nn.Module):
    """Compute shared keys and values from history and user features."""

    def __init__(self, config: OneRecConfig) -> None:
        super().__init__()
        d, style = config.d, config.style
        self.config = config
        self.positions = nn.Embedding(config.context, d)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.dropout = nn.Dropout(style.dropout) if style.dropout else nn.Identity()
        self.static = nn.Linear(config.static, d, bias=True) if config.static else Seeds(1, d)
        self.long = nn.Linear(d, d, bias=style.bias)
        self.short = nn.Linear(d, d, bias=style.bias)
        self.norm = make_norm(style.norm, d, bias=style.bias)
        self.project = nn.Linear(d, config.s_kv * config.l_kv * config.kv_width, bias=style.bias)
        self.chunk_norms = nn.ModuleList(
            make_norm(style.norm, config.kv_width, bias=style.bias) for _ in range(config.s_kv * config.l_kv)
        )

    def forward(self, items: tuple[Tensor, Tensor], counts: tuple[Tensor, Tensor], static: Tensor | None) -> Context:
        """Compute the context from vectors [B, T, d] of the long-term and short-term history and their counts [B]."""
        long, short = (self.dropout(part) for part in items)
        recency = torch.arange(self.config.context, device=long.device)
        ages = [counts[0][:, None] + counts[1][:, None] - 1 - recency[: long.shape[1]]]
        ages.append(counts[1][:, None] - 1 - recency[: short.shape[1]])
        places = [self.positions(age.clamp(min=0)) for age in ages]
        parts = [self._static(long, static), self.long(long + places[0]), self.short(short + places[1])]
        tokens = self.project(self.norm(torch.cat([part.to(parts[1].dtype) for part in parts], 1)))
        masks = [recency[: t.shape[1]] < c[:, None] for t, c in zip(items, counts, strict=True)]
        mask = torch.cat([torch.ones_like(masks[0][:, :1]), *masks], 1)
        chunks = [norm(c) for norm, c in zip(self.chunk_norms, tokens.chunk(len(self.chunk_norms), -1), strict=True)]
        heads = [split_heads(chunk, self.config.g_kv) for chunk in chunks]
        s = self.config.s_kv
        return Context([(heads[i * s], heads[i * s + s - 1]) for i in range(self.config.l_kv)], mask)

    def _static(self, like: Tensor, static: Tensor | None) -> Tensor:
        if (static is not None) != (self.config.static > 0):
            seen = "none" if static is None else f"{tuple(static.shape)}"
            raise ValueError(f"the model was built for {self.config.static} user features, got {seen}")
        if static is None:
            out: Tensor = self.static(like.shape[0])
            return out
        projected: Tensor = self.static(static.to(like.dtype))
        return projected.unsqueeze(1)


class LazyCrossAttention(nn.Module):
    """Cross-attention over the keys and values of the context, without projecting them."""

    def __init__(self, config: OneRecConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.d, config.d, bias=config.style.bias)
        self.attention = DotProductAttention()
        self.out = nn.Linear(config.d, config.d, bias=config.style.bias)

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """x [B, T, d] -> [B, T, d]."""
        q = split_heads(self.query(x), self.heads)
        k, v = (t.to(q.dtype) for t in pair)
        out: Tensor = self.out(merge_heads(self.attention(q, k, v, mask)))
        return out


Past = tuple[Tensor, Tensor] | None


class LazyBlock(nn.Module):
    """Cross-attention, causal self-attention and FFN, each with a pre-norm and a residual."""

    def __init__(self, config: OneRecConfig, index: int) -> None:
        super().__init__()
        d, style, experts = config.d, config.style, config.experts
        self.pair = index * config.l_kv // config.layers
        self.cross_norm, self.self_norm, self.ffn_norm = (make_norm(style.norm, d, bias=style.bias) for _ in range(3))
        self.cross = LazyCrossAttention(config)
        self.attention = SelfAttention(d, config.heads, causal=True, bias=style.bias)
        self.dropout = nn.Dropout(style.dropout) if style.dropout else nn.Identity()
        self.ffn: nn.Module
        if experts is None or index < experts.dense_blocks:
            self.ffn = SwiGLU(d, config.d_ff, activation=style.activation, bias=style.bias)
        else:
            self.ffn = MixtureOfExperts(
                d,
                experts.hidden,
                routed=experts.routed,
                top=experts.top,
                shared=experts.shared,
                activation=style.activation,
            )

    def forward(self, h: Tensor, context: Context) -> Tensor:
        """Run all positions of the id at once, h [B, T, d]."""
        h = h + self.dropout(self.cross(self.cross_norm(h), context.pairs[self.pair], context.mask))
        h = h + self.dropout(self.attention(self.self_norm(h)))
        out: Tensor = h + self.dropout(self.ffn(self.ffn_norm(h)))
        return out

    def step(self, h: Tensor, context: Context, past: Past) -> tuple[Tensor, Past]:
        """Run the next position of W beams that share a context, h [B, W, d]; `past` has their keys and values."""
        beams = h.shape[1]
        h = h + self.cross(self.cross_norm(h), context.pairs[self.pair], context.mask)
        seen, past = self.attention.extend(self.self_norm(h).flatten(0, 1).unsqueeze(1), past)
        h = h + seen.view(-1, beams, h.shape[2])
        return h + self.ffn(self.ffn_norm(h)), past


class Head(nn.Module):
    """Norm and linear over the codebook of one position."""

    def __init__(self, d: int, codebook: int, style: Style) -> None:
        super().__init__()
        self.norm = make_norm(style.norm, d, bias=style.bias)
        self.linear = nn.Linear(d, codebook, bias=style.bias)

    def forward(self, h: Tensor) -> Tensor:
        """[..., d] -> logits [..., codebook] in float32."""
        logits: Tensor = self.linear(self.norm(h))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class OneRec(nn.Module):
    """A history of semantic ids and the codes of the next -> the logits of every code, [B, codebook] per level."""

    def __init__(self, config: OneRecConfig) -> None:
        super().__init__()
        self.config = config
        self.codes = EmbeddingTables([(f"level {i + 1}", size) for i, size in enumerate(config.codebooks)], config.d)
        self.items = EmbeddingTables([("item", config.items)], config.d) if config.items else None
        self.begin = Seeds(1, config.d)
        self.context = ContextProcessor(config)
        self.blocks = nn.ModuleList(LazyBlock(config, index) for index in range(config.layers))
        self.heads = nn.ModuleList(Head(config.d, size, config.style) for size in config.codebooks)

    def forward(self, history: "Jagged", codes: Tensor, static: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the logits per level.

        Args:
            history: ragged rows of ids, oldest first, values int64 [total, history_width].
            codes: int64 [B, levels]; the last level is not read.
            static: user features [B, static], if the model has any.
        """
        context = self.encode(history, static)
        first = self.begin(codes.shape[0])
        h = torch.cat([first, self.codes.lookup(codes[:, :-1]).to(first.dtype)], 1) if self.config.levels > 1 else first
        h = h.to(compute_dtype(h))
        for block in self.blocks:
            h = block(h, context)
        return tuple(head(h[:, p]) for p, head in enumerate(self.heads))

    def encode(self, history: "Jagged", static: Tensor | None = None) -> Context:
        """Compute the context of every request from the latest `context` items of its history and its user features."""
        levels, width = self.config.levels, self.config.history_width
        if history.values.dim() != 2 or history.values.shape[1] != width:
            columns = f"{levels}-level ids" + (" and item numbers" if self.config.items else "")
            raise ValueError(f"a history of {columns} has values [total, {width}], got {tuple(history.values.shape)}")
        items = self.codes.lookup(history.values[:, :levels]).sum(1)
        if self.items is not None:
            items = items + self.items.lookup(history.values[:, levels:]).squeeze(1)
        items = items.to(compute_dtype(items))
        short, n_short = pad_recent(items, history.offsets, self.config.short)
        long, n_long = pad_recent(
            items, history.offsets, self.config.context - self.config.short, skip=self.config.short
        )
        context: Context = self.context((long, short), (n_long, n_short), static)
        return context

    def step(self, context: Context, codes: Tensor | None, past: list[Past] | None) -> tuple[Tensor, list[Past]]:
        """Decode one code: return logits [B, W, codebook] and the keys and values for the next step.

        The first step takes codes = past = None (one beam: BOS). Later ones take the codes [B, W] chosen last, and the
        past, which the caller reorders with `reorder` if beams were dropped or copied.
        """
        level = 0 if past is None or past[0] is None else past[0][0].shape[2]
        if codes is None:
            h = self.begin(context.mask.shape[0])
        else:
            names = self.codes.names[level - 1]
            h = self.codes.take(names, codes)
        h = h.to(compute_dtype(h))
        carried: list[Past] = []
        for block, before in zip(self.blocks, past or [None] * len(self.blocks), strict=True):
            h, after = block.step(h, context, before)  # type: ignore[operator]
            carried.append(after)
        logits: Tensor = self.heads[level](h)
        return logits, carried

    def update_balance(self, rate: float = 1e-3) -> None:
        """Balance every mixture of experts after an optimizer step; a no-op for a dense model."""
        for module in self.modules():
            if isinstance(module, MixtureOfExperts):
                module.update_balance(rate)

    def active_parameters(self) -> int:
        """Return the number of block parameters used by one decoded token.

        Tables, context processor, heads and idle experts are not counted.
        """
        total = 0
        for block in self.blocks:
            ffn = block.ffn
            total += sum(p.numel() for p in block.parameters())
            if isinstance(ffn, MixtureOfExperts):
                total += ffn.active_parameters() - sum(p.numel() for p in ffn.parameters())
        return total

    def example_inputs(self) -> tuple[object, ...]:
        """Return one request with a history of maximum length, on the meta device."""
        from loka.data.batch import Jagged

        values = torch.empty(self.config.context, self.config.history_width, dtype=torch.int64, device="meta")
        static = torch.empty(1, self.config.static, device="meta") if self.config.static else None
        return (
            Jagged(values, torch.empty(2, dtype=torch.int64, device="meta")),
            values[:1, : self.config.levels],
            static,
        )


def reorder(past: list[Past], parents: Tensor) -> list[Past]:
    """Reorder the past: beam w of request b continues beam parents[b, w]."""
    kept: list[Past] = []
    for pair in past:
        assert pair is not None  # a step has been made
        moved = []
        for t in pair:
            beams = t.view(parents.shape[0], t.shape[0] // parents.shape[0], *t.shape[1:])
            rows = torch.arange(parents.shape[0], device=t.device)[:, None]
            moved.append(beams[rows, parents].flatten(0, 1))
        kept.append((moved[0], moved[1]))
    return kept


def semantic_id_loss(logits: tuple[Tensor, ...], codes: Tensor, valid: tuple[Tensor, ...] | None = None) -> Tensor:
    """Return the mean cross-entropy over the levels of the id; codes int64 [B, levels].

    `valid` says which codes may follow the true ones before them, bool [B, codebook] per level (`Trie.follow`). Then
    only valid ids have a probability, the model need not learn to avoid others, and the sum over levels is the
    log-likelihood of an item. Decode such a model with `search(..., normalize="valid")`.
    """
    if valid is not None:
        logits = tuple(level.masked_fill(~mask, -math.inf) for level, mask in zip(logits, valid, strict=True))
    return torch.stack([F.cross_entropy(level, codes[:, i]) for i, level in enumerate(logits)]).mean()


def _published(d: int, layers: int, heads: int, experts: Experts | None = None) -> OneRecConfig:
    return OneRecConfig(
        codebooks=(8192, 8192, 8192),
        d=d,
        layers=layers,
        heads=heads,
        d_ff=4 * d,
        g_kv=heads,
        context=512,
        short=20,
        experts=experts,
    )


SIZES = {
    "tiny": OneRecConfig(),
    "tiny-moe": OneRecConfig(experts=Experts(routed=4, top=2, hidden=32, dense_blocks=1)),
    "small": OneRecConfig(codebooks=(256, 256, 256), d=128, layers=4, heads=4, d_ff=512, context=50, short=20),
    "0.1b": _published(640, 12, 10),
    "0.2b": _published(896, 12, 14),
    "0.5b": _published(1408, 14, 11),
    "1b": _published(1792, 18, 14),
    "2b": _published(2304, 22, 18),
    "4b": _published(2944, 26, 23),
    "8b": _published(3584, 34, 28),
    "4b-a0.5b": _published(1408, 14, 11, Experts(routed=53, top=3, hidden=1408, shared=1, dense_blocks=2)),
}
