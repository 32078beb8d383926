"""Stream batches in a deterministic order, with bounded memory and an exact mid-epoch resume.

The order is a pure function of (examples, seed, epoch, rank, world), so the saved state is one number: how many
examples this rank has consumed. Shuffling a set that does not fit in memory, without random reads:

1. cut the examples into chunks of 4,096 neighbours and permute the chunks (the only thing kept per epoch: 8 bytes per
chunk); 2. lay the permuted chunks end to end and give rank r the r-th of `world` equal stretches; 3. read 16 chunks at
a time (a window of 65,536 examples) and permute the examples inside the window.

Neighbours in the file may meet in one window, but a window mixes 16 chunks from all over the file, so a file sorted by
time is well mixed. It is not a uniform permutation of the whole set, deliberately: that would need random reads.

Across ranks the counts differ by at most one example; with drop_last every rank sees exactly the same number of
batches, which is what collective training needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np

from loka.data.batch import Batch
from loka.data.rows import Array, Rows, Source, make_batch

B = TypeVar("B")
CHUNK = 4096
WINDOW = 16 * CHUNK
_CHUNKS_STREAM, _ROWS_STREAM = 0, 1


@dataclass(frozen=True)
class Order:
    """The order in which one rank visits `examples` rows in one epoch."""

    examples: int
    shuffle: bool
    seed: int
    epoch: int = 0
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.seed < 0 or self.epoch < 0:
            raise ValueError(f"seed and epoch must not be negative, got seed={self.seed} epoch={self.epoch}")
        if self.world < 1 or not 0 <= self.rank < self.world:
            raise ValueError(f"rank must lie in [0, world), got rank={self.rank} world={self.world}")

    def bounds(self, *, equal: bool) -> tuple[int, int]:
        """Return this rank's stretch [low, high) of the permuted rows; `equal` gives every rank the same count."""
        low = self.rank * self.examples // self.world
        high = (self.rank + 1) * self.examples // self.world
        return low, low + self.examples // self.world if equal else high

    def chunks(self) -> tuple[Array, Array]:
        """Return (chunk numbers in visiting order, their cumulative sizes starting with 0)."""
        count = -(-self.examples // CHUNK)
        order = np.arange(count, dtype=np.int64)
        if self.shuffle:
            np.random.default_rng([self.seed, self.epoch, _CHUNKS_STREAM]).shuffle(order)
        sizes = np.minimum(CHUNK, self.examples - order * CHUNK)
        return order, np.concatenate([[0], np.cumsum(sizes)])

    def permutation(self, window: int, size: int) -> Array:
        """Return the order of the rows inside one window."""
        rng = np.random.default_rng([self.seed, self.epoch, _ROWS_STREAM, self.rank, self.world, window])
        return rng.permutation(size)


class Stream(ABC, Generic[B]):
    """Iterator over the batches of one rank's rows in one epoch; `state_dict` and `load_state_dict` save and restore
    the position.

    Args:
        order: which rows, and of which rank.
        rows: how many of them are this rank's.
        batch_size: rows in a batch.
        drop_last: drop an incomplete batch.
        identity: what else a saved position must match, as plain values that are safe for JSON.
    """

    def __init__(self, order: Order, rows: int, batch_size: int, *, drop_last: bool, **identity: Any) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self._order, self._batch_size = order, batch_size
        self._count = rows - rows % batch_size if drop_last else rows
        self._position = 0
        self._identity = {"batch_size": batch_size, "drop_last": drop_last, **asdict(order), **identity}

    @abstractmethod
    def _cut(self, start: int, stop: int) -> B:
        """Make the batch of this rank's rows [start, stop), in the order of visits."""

    def __len__(self) -> int:
        """Return the number of batches in the whole epoch, whatever the position."""
        return -(-self._count // self._batch_size)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> B:
        if self._position >= self._count:
            raise StopIteration
        stop = min(self._position + self._batch_size, self._count)
        batch = self._cut(self._position, stop)
        self._position = stop
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the identity of the stream."""
        return {"position": self._position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state` was saved. Raises if it is from another stream."""
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise ValueError(f"stream state lacks {missing}; expected the keys {sorted(self.state_dict())}")
        differing = [f"{k}: saved {state[k]!r}, here {v!r}" for k, v in self._identity.items() if state[k] != v]
        if differing:
            raise ValueError(
                "stream state belongs to another stream (" + "; ".join(differing) + "); "
                "make the stream with the saved arguments, or start the epoch again"
            )
        position = state["position"]
        if not isinstance(position, int) or not 0 <= position <= self._count:
            raise ValueError(f"stream position must be an integer in [0, {self._count}], got {position!r}")
        self._position = position


class BatchStream(Stream[Batch]):
    """Iterator over the batches of one epoch; `state_dict` and `load_state_dict` save and restore the position."""

    def __init__(self, source: Source, order: Order, batch_size: int, *, drop_last: bool = False) -> None:
        self._low, high = order.bounds(equal=drop_last)
        super().__init__(order, high - self._low, batch_size, drop_last=drop_last, data=source.fingerprint())
        self._source = source
        self._chunks, self._ends = order.chunks()
        self._window: tuple[int, Rows] | None = None

    def _cut(self, start: int, stop: int) -> Batch:
        pieces, at = [], start
        while at < stop:
            number, offset = divmod(at, WINDOW)
            rows = self._read(number)
            taken = min(stop - at, len(rows) - offset)
            pieces.append(rows.take(slice(offset, offset + taken)))
            at += taken
        if stop == self._count:
            self._window = None  # a stream at its end holds no rows
        return make_batch(pieces)

    def _read(self, number: int) -> Rows:
        if self._window is not None and self._window[0] == number:
            return self._window[1]
        self._window = None  # free the old window before reading the next, so that only one is in memory
        start = self._low + number * WINDOW
        stop = min(start + WINDOW, self._low + self._count)
        rows = self._source.read(self._ranges(start, stop))
        if self._order.shuffle:
            rows = rows.take(self._order.permutation(number, len(rows)))
        self._window = (number, rows)
        return rows

    def _ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Translate a stretch of the permuted rows into ranges of the source, merging neighbours."""
        ranges: list[tuple[int, int]] = []
        index = int(np.searchsorted(self._ends, start, side="right")) - 1
        while start < stop:
            skipped = start - int(self._ends[index])
            taken = min(stop, int(self._ends[index + 1])) - start
            first = int(self._chunks[index]) * CHUNK + skipped
            if ranges and ranges[-1][1] == first:
                ranges[-1] = (ranges[-1][0], first + taken)
            else:
                ranges.append((first, first + taken))
            start += taken
            index += 1
        return ranges
