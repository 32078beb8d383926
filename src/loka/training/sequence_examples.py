"""Examples of sequence models: a section of a user's history, and what came next.

There are three kinds of examples of a split of `loka.data.SequenceData`, all windows into one shared array of events:

    whole histories     one per user, no target: every position predicts the next item
    all prefixes        one per position of every history: what came before it, and the item at it
    held-out targets    one per user of a validation or test split: the history, and the held-out item

A history is cut to its most recent `length` items. The order of an epoch only depends on (seed, epoch, rank, world).
The position in it can be saved and restored, so a resumed run sees the same examples as an uninterrupted one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loka.data.batch import Jagged
from loka.data.rows import Array
from loka.data.sequences import SequenceSplit, SequenceStream
from loka.data.stream import Order


@dataclass(frozen=True)
class SequenceExampleBatch:
    """A batch of examples. Without targets, `target` is all zero (padding is never a target)."""

    history: Jagged  # item ids, oldest first
    times: Tensor | None  # seconds, parallel to the history's values; None if the data has none
    asked: Tensor | None  # time of each request, which is that of the target, int64 [B]
    target: Tensor  # int64 [B]

    @property
    def size(self) -> int:
        """Number of examples."""
        return self.target.shape[0]

    def part(self, start: int, stop: int) -> SequenceExampleBatch:
        """Return examples start to stop - 1. `times` is indexed by events, not by examples."""
        offsets = self.history.offsets[start : stop + 1]
        events = slice(int(offsets[0]), int(offsets[-1]))
        return SequenceExampleBatch(
            history=Jagged(self.history.values[events], offsets - offsets[0]),
            times=None if self.times is None else self.times[events],
            asked=None if self.asked is None else self.asked[start:stop],
            target=self.target[start:stop],
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SequenceExampleBatch:
        """Copy every tensor to a device."""
        times, asked = (
            None if t is None else t.to(device, non_blocking=non_blocking) for t in (self.times, self.asked)
        )
        history = self.history.to(device, non_blocking=non_blocking)
        return SequenceExampleBatch(history, times, asked, self.target.to(device, non_blocking=non_blocking))


@dataclass(frozen=True)
class SequenceExamples:
    """Examples as index ranges: example i has events begin[i] ... end[i] - 1 and, if `has_targets`, target end[i]."""

    items: Tensor
    times: Tensor | None
    begin: Array
    end: Array
    has_targets: bool

    def __len__(self) -> int:
        return len(self.begin)

    def batches(
        self, batch_size: int, *, shuffle: bool, seed: int, drop_last: bool, rank: int, world: int, epoch: int
    ) -> SequenceStream[SequenceExampleBatch]:
        """Return one epoch of this rank's share."""
        order = Order(len(self), shuffle, seed, epoch, rank, world)
        return SequenceStream(self.cut, order, batch_size, drop_last=drop_last)

    def cut(self, index: Array) -> SequenceExampleBatch:
        """Build the batch of some examples."""
        begin, end = self.begin[index], self.end[index]
        offsets = np.concatenate([[0], np.cumsum(end - begin)])
        at = torch.from_numpy(np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], end - begin))
        last = torch.from_numpy(end)
        target = self.items[last] if self.has_targets else torch.zeros(len(index), dtype=torch.int64)
        return SequenceExampleBatch(
            history=Jagged(self.items[at], torch.from_numpy(offsets)),
            times=None if self.times is None else self.times[at],
            asked=None if self.times is None or not self.has_targets else self.times[last],
            target=target,
        )


def cut_histories(split: SequenceSplit, length: int) -> SequenceExamples:
    """Make one example per user with at least two items: the most recent `length`."""
    start, count = split.history
    keep = count > 1
    end = (start + count)[keep]
    return SequenceExamples(split.items, split.event_times, np.maximum(start[keep], end - length), end, False)


def cut_prefixes(split: SequenceSplit, length: int) -> SequenceExamples:
    """Make one example per item that is not the first of its history."""
    start, count = split.history
    count = np.maximum(count - 1, 0)
    first = np.repeat(start, count)
    place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    end = first + place + 1
    return SequenceExamples(split.items, split.event_times, np.maximum(first, end - length), end, True)


def cut_targets(split: SequenceSplit, length: int) -> SequenceExamples:
    """Make one example per user of a held-out split; of several held-out items (a basket) the first is the target."""
    (start, count), (target, targets) = split.history, split.targets
    kept = targets > 0
    start, count, target = start[kept], count[kept], target[kept]
    if (target != start + count).any():
        raise ValueError(f"targets of the {split.name} split do not follow their histories")
    return SequenceExamples(split.items, split.event_times, np.maximum(start, target - length), target, True)
