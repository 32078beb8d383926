"""Examples of sequence models: a stretch of a user's history, and what came next.

Three ways to cut examples from a split of `loka.data.SequenceData`, all windows into one shared array of events:

    whole histories     one per user, no target: every position is asked for the next (a model that learns all positions at once)
    all prefixes        one per position of every history: what came before it, and the item at it
    held-out targets    one per user of a validation or test split: the history, and the item that was held out

A history is cut to the most recent `length` items. The order of an epoch depends on (seed, epoch, rank, world) alone, and the position in it
can be saved and restored, so a resumed run sees what an unbroken one would have seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from loka.data.batch import Jagged
    from loka.data.sequences import SequenceSplit, SequenceStream

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SequenceExampleBatch:
    """Some examples; without targets `target` is all zero (padding is never a target)."""

    history: Jagged  # item ids, oldest first
    times: Tensor | None  # seconds, parallel to the history's values; None where the data has none
    asked: Tensor | None  # when each request was made, int64 [B]: the time of the target
    target: Tensor  # int64 [B]

    @property
    def size(self) -> int:
        """Number of examples."""
        return self.target.shape[0]

    def part(self, start: int, stop: int) -> SequenceExampleBatch:
        """Examples start to stop - 1: times lie beside the events of a history, not beside examples."""
        from loka.data.batch import Jagged

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
        from loka.data.batch import Jagged

        history = Jagged(
            *(t.to(device, non_blocking=non_blocking) for t in (self.history.values, self.history.offsets))
        )
        times, asked = (
            None if t is None else t.to(device, non_blocking=non_blocking) for t in (self.times, self.asked)
        )
        return SequenceExampleBatch(history, times, asked, self.target.to(device, non_blocking=non_blocking))


@dataclass(frozen=True)
class SequenceExamples:
    """Example i reads events begin[i] ... end[i] - 1 and, where `has_targets`, is asked for event end[i]."""

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
        """One epoch of this rank's share."""
        from loka.data.sequences import SequenceStream

        return SequenceStream(
            self.cut, len(self), batch_size, shuffle=shuffle, seed=seed, epoch=epoch, drop_last=drop_last, rank=rank,
            world=world,
        )  # fmt: skip

    def cut(self, index: Array) -> SequenceExampleBatch:
        """The batch of some examples."""
        from loka.data.batch import Jagged

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
    """One example per user with at least two items: its most recent `length`."""
    start, count = split.history
    keep = count > 1
    end = (start + count)[keep]
    return SequenceExamples(split.items, split.event_times, np.maximum(start[keep], end - length), end, False)


def cut_prefixes(split: SequenceSplit, length: int) -> SequenceExamples:
    """One example per item that has something before it."""
    start, count = split.history
    count = np.maximum(count - 1, 0)
    first = np.repeat(start, count)
    place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    end = first + place + 1
    return SequenceExamples(split.items, split.event_times, np.maximum(first, end - length), end, True)


def cut_targets(split: SequenceSplit, length: int) -> SequenceExamples:
    """One example per user of a held-out split that has targets; where several are held out at once, as baskets are, the first is the next item."""
    (start, count), (target, targets) = split.history, split.targets
    kept = targets > 0
    start, count, target = start[kept], count[kept], target[kept]
    if (target != start + count).any():
        raise ValueError(f"targets of the {split.name} split do not follow their histories")
    return SequenceExamples(split.items, split.event_times, np.maximum(start, target - length), target, True)
