"""Learn how long batches take, per bucket, while the server runs.

The last `window` durations of every bucket are kept and read as quantiles: a high one for planning (admission, size of
batches), the median for dropping requests that can no longer finish in time. The q-quantile is the smallest value that
at least a share q of the values does not exceed, so a high quantile of three values is their largest. Memory is bounded
by buckets times window.

One slow batch must not exclude a bucket forever, which would happen if its quantile kept all requests out: a bucket
that has not run during `NEGLECTED` batches of others forgets its largest duration, and so is tried again eventually.
"""

import math
from collections import deque
from typing import NamedTuple


class Bucket(NamedTuple):
    """A prepared shape: the units of a batch, and the context length (0 for models without one)."""

    units: int
    context: int

    def __str__(self) -> str:
        return f"{self.units} x {self.context}" if self.context else str(self.units)


WINDOW = 64
NEGLECTED = 128  # batches


class BatchTimes:
    """The durations of the batches of every bucket, learned while the server runs.

    Args:
        window: durations kept per bucket; older ones are forgotten.

    Example:
        >>> times = BatchTimes()
        >>> for seconds in (0.010, 0.011, 0.030):
        ...     times.learn((4, 512), seconds)
        >>> times.quantile((4, 512), 0.5)
        0.011
    """

    def __init__(self, *, window: int = WINDOW) -> None:
        if window < 1:
            raise ValueError(f"window={window}: expected at least one duration per bucket")
        self.window = window
        self._kept: dict[Bucket, deque[float]] = {}
        self._sorted: dict[Bucket, list[float]] = {}
        self._rested: dict[Bucket, int] = {}  # batches of other buckets since it last ran

    def learn(self, bucket: Bucket, seconds: float) -> None:
        """Record the duration of one batch."""
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise ValueError(f"a batch of {bucket} took {seconds} s: expected a finite, non-negative duration")
        kept = self._kept.setdefault(bucket, deque(maxlen=self.window))
        kept.append(seconds)
        self._sorted[bucket] = sorted(kept)
        for other in self._rested:
            self._rested[other] += 1
            if self._rested[other] >= NEGLECTED:
                self._forget_largest(other)
        self._rested[bucket] = 0

    def _forget_largest(self, bucket: Bucket) -> None:
        self._rested[bucket] = 0
        kept = self._kept[bucket]
        if len(kept) > 1:
            kept.remove(max(kept))
            self._sorted[bucket] = sorted(kept)

    def quantile(self, bucket: Bucket, q: float) -> float:
        """Return the seconds that a share `q` of this bucket's batches did not exceed; raises if it never ran."""
        if bucket not in self._sorted:
            raise ValueError(
                f"bucket {bucket} has not run yet; hint: warm every bucket before the first request is offered"
            )
        values = self._sorted[bucket]
        return values[min(len(values) - 1, max(0, math.ceil(q * len(values)) - 1))]

    def known(self, bucket: Bucket) -> int:
        """Return the number of durations kept for the bucket."""
        return len(self._kept.get(bucket, ()))
