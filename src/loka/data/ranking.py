"""A ranking data set: a schema and three splits that stream batches."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loka.data.rows import Source
from loka.data.schema import Schema
from loka.data.stream import BatchStream, Order


@dataclass(frozen=True)
class Split:
    """One part of a data set; `len(split)` is its number of examples."""

    name: str
    schema: Schema
    source: Source

    def __len__(self) -> int:
        return len(self.source)

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
    ) -> BatchStream:
        """Iterate one epoch. The order depends only on (seed, epoch): pass the epoch's number for a new order."""
        order = Order(len(self), shuffle, seed, epoch, rank, world)
        return BatchStream(self.source, order, batch_size, drop_last=drop_last)


@dataclass(frozen=True)
class RankingData:
    """A ranking data set: its schema, its splits, and where they came from.

    Args:
        name: name of the data set.
        schema: its columns.
        train: the training split.
        valid: the validation split, later in time.
        test: the test split, last in time.
        info: provenance for reports: options, source checksums, bad rows, cache folder.

    Example:
        >>> load("complete-journey").schema.labels
    """

    name: str
    schema: Schema
    train: Split
    valid: Split
    test: Split
    info: Mapping[str, Any] = field(default_factory=dict)

    def split(self, name: str) -> Split:
        """Return a split by its name."""
        splits = {"train": self.train, "valid": self.valid, "test": self.test}
        if name not in splits:
            raise ValueError(f"no split {name!r}; the splits are {sorted(splits)}")
        return splits[name]
