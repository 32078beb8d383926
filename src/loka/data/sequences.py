"""Sequence data: what each user did, in order, for next-item and next-basket models.

Items have ids 1..n_items; 0 is padding. There are two ways to hold items out, both leak-free by construction:

- leave last out (the default, if only the order is known): the last item of a user is the test target, the one before it
  the validation target, everything before is for training;
- by time (if baskets are known): the first basket after a given time is the target, everything before that time is
  history. Items inside a basket have no order, so the target is a set.

A validation history ends before the validation target, a test history before the test target (it contains the
validation target). All events are kept in memory (about a million). Batches are formed by user, in a deterministic,
resumable order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loka.data.batch import Jagged
from loka.data.cache import CacheWriter, Manifest
from loka.data.columns import read_ranges
from loka.data.faults import DataError
from loka.data.rows import Array, Windows
from loka.data.stream import B, Order, Stream


@dataclass(frozen=True)
class SequenceBatch:
    """A batch of users: their histories, and what came next."""

    users: Tensor  # int64 [B]
    history: Jagged  # item ids, oldest first, at most max_length, the most recent ones
    times: Jagged | None  # seconds, parallel to the history; None if the data has none
    targets: Jagged  # held-out items: one per user, or a basket; empty rows in the training split

    def to(self, device: torch.device | str) -> SequenceBatch:
        """Copy every tensor to a device."""
        times = None if self.times is None else self.times.to(device)
        return SequenceBatch(self.users.to(device), self.history.to(device), times, self.targets.to(device))


@dataclass(frozen=True)
class SequenceSplit:
    """One split: windows into the shared events for history and target, one row per user."""

    name: str
    items: Tensor
    event_times: Tensor | None
    users: Array
    history: tuple[Array, Array]  # (start, length) into the events
    targets: tuple[Array, Array]

    def __len__(self) -> int:
        return len(self.users)

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        max_length: int = 200,
        drop_last: bool = False,
        epoch: int = 0,
    ) -> SequenceStream[SequenceBatch]:
        """Iterate one epoch over the users. The order depends only on (seed, epoch)."""
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        return SequenceStream(
            lambda index: self.cut(index, max_length), Order(len(self), shuffle, seed, epoch), batch_size,
            drop_last=drop_last, split=self.name, events=self.items.numel(), max_length=max_length,
        )  # fmt: skip

    def cut(self, index: Array, max_length: int) -> SequenceBatch:
        """Make the batch of some users."""
        start, length = self.history[0][index], self.history[1][index]
        kept = np.minimum(length, max_length)
        start = start + length - kept
        times = None if self.event_times is None else _gather(self.event_times, start, kept)
        return SequenceBatch(
            users=torch.from_numpy(self.users[index]),
            history=_gather(self.items, start, kept),
            times=times,
            targets=_gather(self.items, self.targets[0][index], self.targets[1][index]),
        )


class SequenceStream(Stream[B]):
    """The batches that `cut` makes of row numbers.

    Shuffled rows have an order that depends only on (seed, epoch); they are dealt to the ranks one by one. `drop_last`
    also drops rows that would make the ranks' counts differ.
    """

    def __init__(
        self, cut: Callable[[Array], B], order: Order, batch_size: int, *, drop_last: bool, **identity: Any
    ) -> None:
        rows = np.arange(order.examples)
        if order.shuffle:
            np.random.default_rng([order.seed, order.epoch]).shuffle(rows)
        equal = order.examples // order.world * order.world if drop_last else None
        self._make, self._rows = cut, rows[:equal][order.rank :: order.world]
        super().__init__(order, len(self._rows), batch_size, drop_last=drop_last, **identity)

    def _cut(self, start: int, stop: int) -> B:
        return self._make(self._rows[start:stop])


@dataclass(frozen=True)
class SequenceData:
    """All events of all users, and how they are split.

    Args:
        name: name of the data set.
        items: row u has the items of user u, oldest first, ids >= 1.
        n_items: largest id.
        times: int64 [events] seconds, parallel to items.values; None if only the order is known.
        baskets: int64 [events], increasing within a user; None if every event is its own basket.
        split_times: first second of (valid, test); None: leave last out.
        item_keys: the publisher's id of item i at [i]; [0] is padding.
        titles: title of item i at [i]; [0] is empty.
        texts: all text about item i at [i]; [0] is empty.
        folder: folder of the cache.
        semantic_id_names: names of the semantic-ID indexes in the cache.
        info: provenance for reports.

    Example:
        >>> load_sequences("ml-1m").n_users
    """

    name: str
    items: Jagged
    n_items: int
    times: Tensor | None = None
    baskets: Tensor | None = None
    split_times: tuple[int, int] | None = None
    item_keys: tuple[str, ...] = ()
    titles: tuple[str, ...] | None = None
    texts: tuple[str, ...] | None = None
    folder: Path | None = None
    semantic_id_names: tuple[str, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, column in (("times", self.times), ("baskets", self.baskets)):
            if column is not None and column.shape != self.items.values.shape:
                raise ValueError(f"{name} has shape {tuple(column.shape)}, items {tuple(self.items.values.shape)}")
        if self.split_times is not None and (self.times is None or self.baskets is None):
            raise ValueError("a split by time needs times and baskets")

    @property
    def n_users(self) -> int:
        """Number of users."""
        return self.items.rows

    @cached_property
    def train(self) -> SequenceSplit:
        """The training histories; no targets, as every position predicts the next."""
        first, last = self._bounds()
        end = self._before(self.split_times[0]) if self.split_times else np.maximum(last - 2, first)
        keep = np.flatnonzero(end > first)
        return self._split("train", keep, first, end, end, end)

    @cached_property
    def valid(self) -> SequenceSplit:
        """Histories and the validation targets."""
        return self._held_out("valid", 1)

    @cached_property
    def test(self) -> SequenceSplit:
        """Histories and the test targets."""
        return self._held_out("test", 0)

    def semantic_ids(self, name: str) -> dict[int, tuple[int, ...]]:
        """Read one of the semantic-ID indexes that came with the data: item id -> codes, one per level."""
        if self.folder is None or name not in self.semantic_id_names:
            raise ValueError(f"{self.name} has no semantic-ID index {name!r}; it has {list(self.semantic_id_names)}")
        from loka.data.amazon import read_semantic_ids

        return read_semantic_ids(self.folder / "assets" / f"semantic_ids.{name}.json")

    def _bounds(self) -> tuple[Array, Array]:
        offsets = self.items.offsets.numpy()
        return offsets[:-1], offsets[1:]

    def _before(self, moment: int) -> Array:
        """Return per user the first event at or after a time."""
        assert self.times is not None
        first, _ = self._bounds()
        earlier = np.concatenate([[0], np.cumsum(self.times.numpy() < moment)])
        passed: Array = earlier[self.items.offsets.numpy()[1:]] - earlier[first]
        return first + passed

    def _held_out(self, name: str, from_end: int) -> SequenceSplit:
        first, last = self._bounds()
        if self.split_times is None:
            begin = last - 1 - from_end
            keep = np.flatnonzero(begin > first)
            return self._split(name, keep, first, begin, begin, begin + 1)
        assert self.baskets is not None
        begin = self._before(self.split_times[1 - from_end])
        limit = self._before(self.split_times[1]) if from_end else last
        baskets = self.baskets.numpy()
        changes = np.flatnonzero(np.diff(baskets, prepend=baskets[:1] - 1))
        following = np.searchsorted(changes, begin, side="right")
        end = np.minimum(np.append(changes, len(baskets))[following], last)
        keep = np.flatnonzero((begin > first) & (begin < limit))
        return self._split(name, keep, first, begin, begin, end)

    def _split(
        self, name: str, keep: Array, first: Array, end: Array, target: Array, target_end: Array
    ) -> SequenceSplit:
        history = (first[keep], (end - first)[keep])
        targets = (target[keep], (target_end - target)[keep])
        return SequenceSplit(name, self.items.values, self.times, keep.astype(np.int64), history, targets)


def write_sequences(
    writer: CacheWriter,
    *,
    users: Array,
    items: Array,
    times: Array | None = None,
    baskets: Array | None = None,
    item_keys: list[str],
    titles: list[str] | None = None,
    texts: list[str] | None = None,
) -> None:
    """Write events, sorted by user and then order, into a cache. Users are 0..n-1, items 1..len(item_keys)."""
    if len(items) and (items.min() < 1 or items.max() > len(item_keys)):
        raise ValueError(f"item ids must lie in [1, {len(item_keys)}], got [{items.min()}, {items.max()}]")
    counts = np.bincount(users)
    writer.append("events/items", items, np.int32)
    writer.append("events/offsets", np.concatenate([[0], np.cumsum(counts)]), np.int64)
    for name, column in (("times", times), ("baskets", baskets)):
        if column is not None:
            writer.append(f"events/{name}", column, np.int64)
    writer.add_asset("item_keys.json", json.dumps(["", *item_keys], ensure_ascii=False).encode())
    for name, words in (("titles", titles), ("texts", texts)):
        if words is not None:
            writer.add_asset(f"{name}.json", json.dumps(["", *words], ensure_ascii=False).encode())
    writer.facts |= {"users": len(counts), "items": len(item_keys), "events": len(items)}


def open_sequences(folder: Path, manifest: Manifest) -> SequenceData:
    """Make a SequenceData from a checked cache."""
    if manifest.kind != "sequences":
        raise DataError(f"{folder}: a cache of kind {manifest.kind!r}, expected 'sequences'")
    columns = {
        name: torch.from_numpy(read_ranges(folder, column, [(0, column.rows)]).astype(np.int64))
        for name, column in manifest.columns.items()
    }
    texts = {
        name: tuple(json.loads((folder / manifest.assets[f"{name}.json"].path).read_text(encoding="utf-8")))
        for name in ("item_keys", "titles", "texts")
        if f"{name}.json" in manifest.assets
    }
    prefix, suffix = "semantic_ids.", ".json"
    indexes = tuple(a[len(prefix) : -len(suffix)] for a in manifest.assets if a.startswith(prefix))
    split_times = manifest.facts.get("split_times")
    return SequenceData(
        name=manifest.name,
        items=Jagged(columns["events/items"], columns["events/offsets"]),
        n_items=len(texts["item_keys"]) - 1,
        times=columns.get("events/times"),
        baskets=columns.get("events/baskets"),
        split_times=None if split_times is None else (split_times[0], split_times[1]),
        item_keys=texts["item_keys"],
        titles=texts.get("titles"),
        texts=texts.get("texts"),
        folder=folder,
        semantic_id_names=indexes,
        info={
            "folder": str(folder),
            "options": manifest.options,
            "bad_rows": manifest.bad_rows,
            "facts": manifest.facts,
        },
    )


def _gather(values: Tensor, start: Array, length: Array) -> Jagged:
    gathered, offsets = Windows(values.numpy(), start, length).gather()
    return Jagged(torch.from_numpy(gathered), torch.from_numpy(offsets))
