"""How long a batch takes, learned per bucket while it runs.

The last `window` durations of every bucket are kept and read as quantiles: a high one plans (who is admitted, how large a batch may be), the median says what
can no longer finish. A quantile of so many values is the smallest that at least that share of them does not exceed, so three values already answer, with
their largest. Memory is bounded by buckets times window.

One slow batch must not close a bucket for ever, as it would where its quantile keeps everybody out: a bucket that has not run for `NEGLECTED` batches of others forgets its
largest duration, and so is tried again in time.
"""

import math
from collections import deque
from typing import NamedTuple


class Bucket(NamedTuple):
    """A prepared shape: how many units a batch holds, and how long a context; 0 where there is none."""

    units: int
    context: int

    def __str__(self) -> str:
        return f"{self.units} x {self.context}" if self.context else str(self.units)


WINDOW = 64
NEGLECTED = 128


class BatchTimes:
    """How long batches of every bucket take, learned while the server runs.

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
            raise ValueError(f"window={window}: expected at least one duration a bucket")
        self.window = window
        self._kept: dict[Bucket, deque[float]] = {}
        self._sorted: dict[Bucket, list[float]] = {}
        self._rested: dict[Bucket, int] = {}

    def learn(self, bucket: Bucket, seconds: float) -> None:
        """Remember one batch."""
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise ValueError(f"a batch of {bucket} took {seconds} s: expected a finite, non-negative duration")
        kept = self._kept.setdefault(bucket, deque(maxlen=self.window))
        kept.append(seconds)
        self._sorted[bucket] = sorted(kept)
        for other in self._rested:
            self._rested[other] += 1
            if self._rested[other] >= NEGLECTED:
                self._forget(other)
        self._rested[bucket] = 0

    def _forget(self, bucket: Bucket) -> None:
        self._rested[bucket] = 0
        kept = self._kept[bucket]
        if len(kept) > 1:
            kept.remove(max(kept))
            self._sorted[bucket] = sorted(kept)

    def quantile(self, bucket: Bucket, q: float) -> float:
        """Seconds that a share `q` of this bucket's batches did not exceed; a bucket that never ran raises."""
        if bucket not in self._sorted:
            raise ValueError(
                f"bucket {bucket} has not run yet; hint: warm every bucket before the first request is offered"
            )
        values = self._sorted[bucket]
        return values[min(len(values) - 1, max(0, math.ceil(q * len(values)) - 1))]

    def known(self, bucket: Bucket) -> int:
        """How many durations of the bucket are kept."""
        return len(self._kept.get(bucket, ()))
