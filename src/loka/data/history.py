"""Features of the past, strictly before a time: counts, sums, last times and history windows, exact and vectorized.

Every feature of the past in this package comes from here, so the absence of leaks depends on this file only. Events
(key, time) are sorted once by key, then time, and packed into one integer per event:

    code = key * 2^32 + (time - origin)

The number of events of key k with time < t is then the distance between two binary searches, search(k, t) - search(k,
0), both on the left side: an event *at* t is never counted, nor is one of the same basket or the same second.
"""

import numpy as np

from loka.data.rows import Array

_SHIFT = 32


class Past:
    """Events by key, with queries about the time strictly before t."""

    def __init__(self, keys: Array, times: Array) -> None:
        """Index parallel arrays of keys (>= 0) and integer times. Simultaneous events of a key keep their order."""
        keys = keys.astype(np.int64, copy=False)
        times = times.astype(np.int64, copy=False)
        if len(keys) and (keys.min() < 0 or keys.max() >= 1 << 31):
            raise ValueError(f"keys must lie in [0, 2^31), got [{keys.min()}, {keys.max()}]")
        self._origin = int(times.min()) if len(times) else 0
        span = int(times.max()) - self._origin if len(times) else 0
        if span >= (1 << _SHIFT) - 1:
            raise ValueError(f"times must span less than 2^32 units, got {span}")
        codes = (keys << _SHIFT) + (times - self._origin)
        self.order = np.argsort(codes, kind="stable")
        """Positions of the events, sorted by key, then time: apply it to any column to index it by a window"""
        self._codes = codes[self.order]
        self._sums: dict[str, Array] = {}

    def add_sum(self, name: str, values: Array) -> None:
        """Register a column (parallel to the events) for `total`."""
        self._sums[name] = np.concatenate([[0.0], np.cumsum(values[self.order], dtype=np.float64)])

    def range_before(self, keys: Array, times: Array) -> tuple[Array, Array]:
        """Return [first, last) positions in sorted order of the events of each key strictly before each time."""
        base = keys.astype(np.int64) << _SHIFT
        offset = np.clip(times.astype(np.int64) - self._origin, 0, (1 << _SHIFT) - 1)
        return np.searchsorted(self._codes, base), np.searchsorted(self._codes, base + offset)

    def count(self, keys: Array, times: Array) -> Array:
        """Return how many events of each key are strictly before each time."""
        first, last = self.range_before(keys, times)
        return last - first

    def total(self, name: str, keys: Array, times: Array) -> Array:
        """Sum a registered column over the events of each key strictly before each time."""
        first, last = self.range_before(keys, times)
        return self._sums[name][last] - self._sums[name][first]

    def elapsed(self, keys: Array, times: Array, *, never: float) -> Array:
        """Return the time since the latest earlier event of each key, or `never`."""
        first, last = self.range_before(keys, times)
        if not len(self._codes):
            return np.full(len(keys), never)
        latest = (self._codes[np.maximum(last - 1, 0)] & ((1 << _SHIFT) - 1)) + self._origin
        return np.where(last > first, times - latest, never)

    def windows(self, keys: Array, times: Array, *, max_length: int) -> tuple[Array, Array]:
        """Return (start, length) of the most recent events strictly before each time, in sorted order."""
        first, last = self.range_before(keys, times)
        start = np.maximum(first, last - max_length)
        return start, last - start
