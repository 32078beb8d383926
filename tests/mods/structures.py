"""Structures as other libraries write them: what makes their models hard to rewrite, without the libraries. `tests/foreign` has the models themselves."""

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["STRUCTURES", "Structure"]


@dataclass(frozen=True)
class Structure:
    """A model and what it is called with."""

    model: nn.Module
    example: tuple[Any, ...] | dict[str, Any]

    def call(self) -> Any:
        return self.model(**self.example) if isinstance(self.example, dict) else self.model(*self.example)


class Tower(nn.Module):
    """Lists of parts walked by index, a batch norm behind a flag, an activation chosen at run time, one dropout for all."""

    def __init__(self, width: int, hidden: tuple[int, ...], use_bn: bool) -> None:
        super().__init__()
        widths = (width, *hidden)
        self.use_bn, self.dropout = use_bn, nn.Dropout(0.2)
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.bn = nn.ModuleList(nn.BatchNorm1d(width) for width in hidden) if use_bn else None
        self.activations = nn.ModuleList(nn.ReLU(inplace=True) for _ in hidden)

    def forward(self, inputs: Tensor) -> Tensor:
        for index in range(len(self.linears)):
            inputs = self.linears[index](inputs)
            if self.use_bn:
                inputs = self.bn[index](inputs)
            inputs = self.dropout(self.activations[index](inputs))
        return inputs


class Probability(nn.Module):
    """A bias of its own and a function behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, logit: Tensor) -> Tensor:
        return torch.sigmoid(logit + self.bias)


class WideAndDeep(nn.Module):
    """One matrix of ids and numbers, a logit summed in place from zeros, an auxiliary loss kept as an attribute."""

    def __init__(self, use_bn: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({f"c{i}": nn.Embedding(20, 8) for i in range(3)})
        self.wide = nn.Parameter(torch.randn(4, 1))
        self.dnn, self.dnn_linear, self.out = Tower(28, (40, 24), use_bn), nn.Linear(24, 1, bias=False), Probability()
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        found = [self.tables[f"c{i}"](x[:, i].long()) for i in range(3)]
        logit = torch.zeros(x.shape[0], 1)
        logit += x[:, 3:].matmul(self.wide)
        vectors = torch.stack(found, 1)
        logit += (vectors.sum(1).square() - vectors.square().sum(1)).sum(-1, keepdim=True)
        deep = self.dnn(torch.cat([vectors.flatten(1), x[:, 3:]], 1))
        self.kept = deep
        return self.out(logit + self.dnn_linear(deep))


class KeyedBags:
    """Features of an object of its own class."""

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        self._values, self._offsets = values, offsets


class Interaction(nn.Module):
    """Dense and sparse towers, products of pairs, functions as activations."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.project = nn.Linear(7, 40), nn.Linear(40, 16)
        self.bags, self.over, self.last = nn.EmbeddingBag(50, 16), nn.Linear(16 + 1, 40), nn.Linear(40, 1)
        self.activate: Callable[[Tensor], Tensor] = torch.relu

    def forward(self, dense: Tensor, sparse: KeyedBags) -> Tensor:
        x = self.activate(self.project(self.activate(self.dense(dense))))
        stacked = torch.stack([x, self.bags(sparse._values, sparse._offsets)], 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))[:, 0, 1:]
        return self.last(self.activate(self.over(torch.cat([x, products], 1))))


class Conv1D(nn.Module):
    """A linear with its weight the other way round."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(0.1 * torch.randn(width_in, width_out)),
            nn.Parameter(torch.zeros(width_out)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class RootNorm(nn.Module):
    """An RMSNorm under the name of another norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x


RootNorm.__name__ = "RootLayerNorm"


class Answer(OrderedDict):
    """A dictionary with attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def returning(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        found = forward(self, *args, **kwargs)
        return found if return_dict else tuple(found.values())

    return wrapped


class DecoderBlock(nn.Module):
    """Two residuals in one forward, an optional mask, a cache that is handed out."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), RootNorm(d)
        self.qkv, self.out = Conv1D(d, 3 * d), nn.Linear(d, d)
        self.up, self.down, self.drop = nn.Linear(d, 50), nn.Linear(50, d), nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor | None = None, use_cache: bool = False) -> tuple[Tensor, Any]:
        q, k, v = self.qkv(self.ln_1(x)).chunk(3, -1)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1 if self.training else 0.0)
        x = x + self.drop(self.out(seen))
        x = x + self.drop(self.down(F.gelu(self.up(self.ln_2(x)))))
        return x, (k, v) if use_cache else None


class Decoder(nn.Module):
    """A decorated forward with many options, a head tied to the embedding, a loss computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(30, 24), nn.ModuleList(DecoderBlock(24) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 30, bias=False)
        self.head.weight = self.embed.weight

    @returning
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, use_cache: bool = True) -> Answer:
        x, caches = self.embed(input_ids), []
        for block in self.blocks:
            x, cache = block(x, use_cache=use_cache)
            caches.append(cache)
        logits = self.head(self.norm(x))
        answer = Answer(logits=logits, past=caches)
        if labels is not None:
            answer["loss"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return answer


class SequenceLayer(nn.Module):
    """Post-norm with helpers that are public, a function chosen from a dictionary by name."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.query, self.dense, self.inner = nn.Linear(d, d), nn.Linear(d, 50), nn.Linear(50, d)
        self.LayerNorm, self.dropout, self.heads, self.act = nn.LayerNorm(d, eps=1e-12), nn.Dropout(0.1), 2, "gelu"

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)

    def choose(self, name: str) -> Callable[[Tensor], Tensor]:
        return {"gelu": F.gelu, "relu": F.relu}[name]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.split(self.query(x))
        x = x + (torch.softmax(q @ q.transpose(-1, -2) + mask, -1) @ q).transpose(1, 2).flatten(2)
        return self.LayerNorm(x + self.dropout(self.inner(self.choose(self.act)(self.dense(x)))))


class Recommender(nn.Module):
    """A padded history, a mask made in forward, the state at the last item; scores against the embedding's own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.layers = (
            nn.Embedding(40, 24, padding_idx=0),
            nn.ModuleList(SequenceLayer(24) for _ in range(2)),
        )
        self.LayerNorm = nn.LayerNorm(24)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, seq: Tensor, lengths: Tensor) -> Tensor:
        mask = (seq == 0)[:, None, None, :] * -10000.0
        x = self.LayerNorm(self.items(seq))
        for layer in self.layers:
            x = layer(x, mask)
        last = x.gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, -1, x.shape[-1])).squeeze(1)
        return last @ self.items.weight.T


class Attentive(nn.Module):
    """torch's own attention with batches in the middle, an optional residual, a prediction on top."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(30, 8), nn.Linear(8, 12)
        self.attentions = nn.ModuleList(nn.MultiheadAttention(12, 2, dropout=0.1) for _ in range(2))
        self.residual, self.use_residual, self.last = nn.Linear(8, 12), True, nn.Linear(36, 1)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.embed(ids)
        x = self.up(embedded).transpose(0, 1)
        for attention in self.attentions:
            x, _ = attention(x, x, x)
        x = x.transpose(0, 1)
        if self.use_residual:
            x = x + self.residual(embedded)
        return torch.sigmoid(self.last(F.relu(x).flatten(1)).squeeze(1))


def _ids(high: int, *shape: int) -> Tensor:
    return torch.randint(1, high, shape)


def _table(use_bn: bool) -> Structure:
    return Structure(WideAndDeep(use_bn), (torch.cat([_ids(20, 16, 3).float(), torch.randn(16, 4)], 1),))


def _padded() -> Structure:
    lengths = _ids(9, 16)
    return Structure(Recommender(), (_ids(40, 16, 8) * (torch.arange(8) < lengths[:, None]), lengths))


STRUCTURES: dict[str, Callable[[], Structure]] = {
    "wide and deep": lambda: _table(False),
    "wide and deep, batch norm": lambda: _table(True),
    "interaction": lambda: Structure(
        Interaction(), (torch.randn(16, 7), KeyedBags(_ids(50, 40), torch.arange(16) * 2))
    ),
    "decoder": lambda: Structure(Decoder(), {"input_ids": _ids(30, 4, 6), "labels": _ids(30, 4, 6)}),
    "recommender": _padded,
    "attentive": lambda: Structure(Attentive(), (_ids(30, 16, 3),)),
}
