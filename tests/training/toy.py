"""A data set and a model small enough to train in milliseconds, with the interfaces the loop expects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ROWS, WIDTH = 50, 4


@dataclass(frozen=True)
class ToyBatch:
    ids: Tensor
    dense: Tensor
    labels: Tensor

    @property
    def size(self) -> int:
        return self.ids.shape[0]

    def to(self, device: torch.device, *, non_blocking: bool = False) -> ToyBatch:
        return ToyBatch(self.ids.to(device), self.dense.to(device), self.labels.to(device))


class ToyBatches:
    def __init__(self, whole: ToyBatch, order: Tensor, batch_size: int, count: int) -> None:
        self.whole, self.order, self.batch_size, self.count = whole, order, batch_size, count
        self.position = 0

    def __iter__(self) -> ToyBatches:
        return self

    def __next__(self) -> ToyBatch:
        if self.position >= self.count:
            raise StopIteration
        index = self.order[self.position * self.batch_size : (self.position + 1) * self.batch_size]
        self.position += 1
        return ToyBatch(self.whole.ids[index], self.whole.dense[index], self.whole.labels[index])

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@dataclass(frozen=True)
class ToySplit:
    whole: ToyBatch

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool = False,
        rank: int = 0,
        world: int = 1,
        epoch: int = 0,
    ) -> ToyBatches:
        generator = torch.Generator().manual_seed(seed * 1000 + epoch)
        size = self.whole.size
        order = torch.randperm(size, generator=generator) if shuffle else torch.arange(size)
        order = order[rank::world]
        count = len(order) // batch_size if drop_last else -(-len(order) // batch_size)
        return ToyBatches(self.whole, order, batch_size, count)


@dataclass(frozen=True)
class ToyData:
    train: ToySplit
    valid: ToySplit | None


def make_data(examples: int = 400, *, labels: int = 1, seed: int = 7) -> ToyData:
    """Labels depend on both the id and the dense features, so learning lowers the loss."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, ROWS, (examples, 2), generator=generator)
    dense = torch.randn(examples, 3, generator=generator)
    taste = torch.randn(ROWS, labels, generator=generator)
    logits = taste[ids[:, 0]] + dense[:, :1] * 1.5
    y = (torch.rand(examples, labels, generator=generator) < torch.sigmoid(2 * logits)).float()
    half = examples * 3 // 4
    parts = [ToySplit(ToyBatch(ids[s], dense[s], y[s])) for s in (slice(0, half), slice(half, None))]
    return ToyData(*parts)


class ToyModel(nn.Module):
    """Sparse table, dense tower, dropout (so that random state matters)."""

    def __init__(self, labels: int = 1, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
        self.core = nn.Sequential(
            nn.Linear(WIDTH + 3, 16), nn.ReLU(), nn.Dropout(dropout), nn.LayerNorm(16), nn.Linear(16, labels)
        )

    def forward(self, batch: ToyBatch) -> Tensor:
        return self.core(torch.cat([self.table(batch.ids), batch.dense], dim=1))


def make_model(labels: int = 1, *, seed: int = 0, dropout: float = 0.1) -> ToyModel:
    torch.manual_seed(seed)
    return ToyModel(labels, dropout=dropout)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert torch.equal(left[name].reshape(-1).view(torch.uint8), right[name].reshape(-1).view(torch.uint8)), name
