"""HSTU: a sequence model with pointwise attention over ragged histories.

Zhai et al., "Actions Speak Louder than Words", 2024.

    U, V, Q, K = split(SiLU(f1(Norm(X))))
    A V        = (1 / n) sum_{j <= i} SiLU(<Q_i, K_j> + rab_ij) V_j
    Y          = X + f2(Norm(A V) * U)

There is no softmax; rab = position + log-bucketed time bias. Rows are never padded: X is [total, d] over all positions
of the batch. The time bias depends on the difference between the time of the request (the next event's time, known when
the request arrives; at the end of a row the last event's own) and the time of each past event. n is the model's maximum
length, as in the published code: a row's own length would leak to early positions how much is to come.

Scores of all items are products with the item table, by default cosines over a temperature, as in the published
experiments. Item 0 is padding and never a target.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.models.ranker import PLAIN, check_positive
from loka.nn import EmbeddingTables, Style, make_norm
from loka.nn.activation import make_activation
from loka.nn.mix import compute_dtype
from loka.nn.silu_attention import BACKENDS, AttentionBackend, SiluAttention, locate

if TYPE_CHECKING:
    from loka.data.batch import Jagged


@dataclass(frozen=True, kw_only=True)
class HSTUConfig:
    """items: rows of the item table, padding included; d_qk, d_v: widths per head; attention: the backend."""

    items: int = 100
    d: int = 16
    layers: int = 2
    heads: int = 2
    d_qk: int = 8
    d_v: int = 8
    max_length: int = 32
    time_buckets: int = 64
    bias_per_head: bool = False
    cosine: bool = True
    temperature: float = 0.05
    attention: AttentionBackend = "auto"
    style: Style = PLAIN

    def __post_init__(self) -> None:
        check_positive(self)
        if self.items < 2:
            raise ValueError(f"HSTUConfig.items is {self.items}; item 0 is padding, so at least 2 are needed")
        if self.temperature <= 0:
            raise ValueError(f"HSTUConfig.temperature is {self.temperature}; expected a positive number")
        if self.attention not in BACKENDS:
            raise ValueError(f"HSTUConfig.attention is {self.attention!r}; expected one of {', '.join(BACKENDS)}")


class RelativeBias(nn.Module):
    """One learned number per distance (or bucket), for all heads or for each one: `weight` [1 or H, entries]."""

    def __init__(self, entries: int, heads: int, *, per_head: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads if per_head else 1, entries))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self) -> Tensor:
        """Return [H, entries], or [1, entries] for all heads."""
        return self.weight


class HSTULayer(nn.Module):
    """X + f2(Norm(A V) * U) over x [total, d]."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        h, style = config.heads, config.style
        self.heads = h
        self.widths = (h * config.d_v, h * config.d_v, h * config.d_qk, h * config.d_qk)
        self.norm = make_norm(style.norm, config.d, bias=style.bias)
        self.uvqk = nn.Linear(config.d, sum(self.widths), bias=style.bias)
        self.activation = make_activation("hard_swish" if style.activation == "hard_swish" else "silu")
        self.position_bias = RelativeBias(config.max_length, h, per_head=config.bias_per_head)
        self.time_bias = RelativeBias(config.time_buckets, h, per_head=config.bias_per_head)
        self.attention = SiluAttention(config.max_length, backend=config.attention)
        self.out_norm = make_norm(style.norm, h * config.d_v, bias=style.bias)
        self.dropout = nn.Dropout(style.dropout) if style.dropout else nn.Identity()
        self.out = nn.Linear(h * config.d_v, config.d, bias=style.bias)

    def forward(self, x: Tensor, offsets: Tensor, times: Tensor | None, query_times: Tensor | None) -> Tensor:
        """Run one layer; without times there is no time bias."""
        u, v, q, k = torch.split(self.activation(self.uvqk(self.norm(x))), list(self.widths), dim=1)
        q, k, v = (t.view(t.shape[0], self.heads, t.shape[1] // self.heads) for t in (q, k, v))
        time_bias = None if times is None else self.time_bias()
        seen = self.attention(q, k, v, offsets, self.position_bias(), time_bias, times, query_times)
        out: Tensor = x + self.out(self.dropout(self.out_norm(seen.flatten(1)) * u))
        return out


class ItemScores(nn.Module):
    """Scores of all items: h E^T, or the cosine of h and every row of E over a temperature."""

    def __init__(self, *, cosine: bool, temperature: float) -> None:
        super().__init__()
        self.cosine, self.temperature = cosine, temperature

    def forward(self, h: Tensor, items: Tensor) -> Tensor:
        """h [N, d], items [items, d] -> [N, items]."""
        items = items.to(h.dtype)
        if not self.cosine:
            return torch.mm(h, items.t())
        return torch.mm(F.normalize(h, dim=-1), F.normalize(items, dim=-1).t()) / self.temperature


class HSTU(nn.Module):
    """Ragged histories of item ids, oldest first -> scores of the next item."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.config = config
        self.items = EmbeddingTables([("item", config.items)], config.d)
        self.positions = nn.Embedding(config.max_length, config.d)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.dropout = nn.Dropout(config.style.dropout) if config.style.dropout else nn.Identity()
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.layers))
        self.norm = make_norm(config.style.norm, config.d, bias=config.style.bias)
        self.scores = ItemScores(cosine=config.cosine, temperature=config.temperature)

    def forward(
        self, items: "Jagged", times: Tensor | None = None, query_times: Tensor | None = None, *, last: bool = False
    ) -> Tensor:
        """Return float32 scores [total, items] after every position or, with `last`, [B, items] after each row.

        `times` int64 [total] are those of the events, `query_times` those of the requests. All scores of an empty row
        are 0.
        """
        h = self.encode(items, times, query_times)
        if last:
            h = take_last(h, items.offsets)
        scores: Tensor = self.scores(h, self.items.table.weight)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def encode(self, items: "Jagged", times: Tensor | None = None, query_times: Tensor | None = None) -> Tensor:
        """Return the state after every position, [total, d]."""
        values, offsets = items.values, items.offsets
        self._check_lengths(offsets)
        if query_times is None and times is not None:
            query_times = next_times(times, offsets)
        _, place = locate(offsets, values.shape[0])
        x = self.items.lookup(values[:, None]).squeeze(1) * self.config.d**0.5 + self.positions(place)
        x = self.dropout(x.to(compute_dtype(x)))
        for layer in self.layers:
            x = layer(x, offsets, times, query_times)
        out: Tensor = self.norm(x)
        return out

    def _check_lengths(self, offsets: Tensor) -> None:
        if offsets.device.type == "meta" or (offsets.is_cuda and not self.items.check_on_gpu):
            return
        limit = self.config.max_length
        too_long = (offsets[1:] - offsets[:-1] > limit).any()
        if torch.compiler.is_compiling():
            torch._assert_async(~too_long, f"a history is longer than max_length = {limit}")
        elif too_long:
            seen = int((offsets[1:] - offsets[:-1]).max())
            raise ValueError(
                f"a history has {seen} items, the model takes max_length = {limit}; keep the most recent {limit}"
            )

    def example_inputs(self) -> "tuple[Jagged, Tensor]":
        """Return one row of maximum length, on the meta device."""
        from loka.data.batch import Jagged

        values = torch.empty(self.config.max_length, dtype=torch.int64, device="meta")
        return Jagged(values, torch.empty(2, dtype=torch.int64, device="meta")), values


def next_times(times: Tensor, offsets: Tensor) -> Tensor:
    """Return the time of the next event of the same row; at the end of a row the event's own."""
    final = times.new_zeros(times.shape[0] + 1, dtype=torch.bool).index_fill(0, offsets, True)[1:]
    return torch.where(final, times, times.roll(-1))


def take_last(h: Tensor, offsets: Tensor) -> Tensor:
    """Return the last position of every row, [B, d]; zero for an empty row."""
    empty = offsets[1:] == offsets[:-1]
    padded = torch.cat([h, h.new_zeros(1, h.shape[1])])
    return padded[torch.where(empty, h.shape[0], offsets[1:] - 1)]


def next_item_loss(scores: Tensor, items: "Jagged") -> Tensor:
    """Return the mean cross-entropy of the next items; the last position of a row, and padding (0), have no target."""
    final = items.values.new_zeros(items.values.shape[0] + 1, dtype=torch.bool).index_fill(0, items.offsets, True)[1:]
    target = torch.where(final, 0, items.values.roll(-1))
    total = F.cross_entropy(scores, target, ignore_index=0, reduction="sum")
    return total / (target != 0).sum().clamp(min=1)


SIZES = {
    "tiny": HSTUConfig(),
    "small": HSTUConfig(items=4000, d=64, layers=2, heads=2, d_qk=32, d_v=32, max_length=200),
    "base": HSTUConfig(items=4000, d=256, layers=4, heads=4, d_qk=64, d_v=64, max_length=256),
    "large": HSTUConfig(items=4000, d=256, layers=16, heads=8, d_qk=32, d_v=32, max_length=512),
    "xlarge": HSTUConfig(items=100_000, d=1024, layers=12, heads=8, d_qk=128, d_v=128, max_length=1024),
}
