"""The data structures of the scheduler: the policy, requests with deadlines, queues by context, batches."""

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from loka.serving.times import Bucket


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The deadline of the service and how the scheduler plans for it.

    Args:
        sla: seconds from arrival to answer.
        reserve: seconds of the SLA kept for reading, writing and waking up. A minimum: the scheduler raises it if
            sending answers takes longer.
        queue: largest number of waiting requests; further ones are shed.
        quantile: quantile of the learned batch times to plan with.

    Example:
        >>> Policy(sla=0.05).budget
        0.048
    """

    sla: float
    reserve: float = 0.002
    queue: int = 1024
    quantile: float = 0.95

    def __post_init__(self) -> None:
        if not (self.sla > 0 and math.isfinite(self.sla)):
            raise ValueError(f"sla is {self.sla}; expected a positive number of seconds")
        if not 0 <= self.reserve < self.sla:
            raise ValueError(f"reserve is {self.reserve} s; expected less than the SLA, {self.sla} s")
        if self.queue < 1:
            raise ValueError(f"queue is {self.queue}; expected room for at least one request")
        if not 0 < self.quantile < 1:
            raise ValueError(f"quantile is {self.quantile}; expected a share in (0, 1)")

    @property
    def budget(self) -> float:
        """Seconds of the SLA left for waiting and running, with the minimum reserve."""
        return round(self.sla - self.reserve, 9)


@dataclass(eq=False, slots=True)
class Entry:
    """A request in the scheduler.

    Args:
        job: the caller's object.
        units: its size in a batch.
        context: its context bucket.
        arrived, deadline: times on the caller's clock.
        number: order of arrival.

    Example:
        >>> Entry("job", units=1, context=16, arrived=0.0, deadline=0.05, number=1).order
        (0.05, 1)
    """

    job: Any
    units: int
    context: int
    arrived: float
    deadline: float
    number: int
    state: str = "waiting"  # waiting, running, done, cancelled, dropped
    trial: bool = False  # runs even if it is expected to be late

    @property
    def order(self) -> tuple[float, int]:
        """The sort key: earliest deadline first, then order of arrival."""
        return self.deadline, self.number


@dataclass(frozen=True)
class Shed:
    """A request that was not admitted.

    Args:
        reason: "late": it would miss its deadline; "others": it would make others miss theirs; "queue": no room.
        retry_after: seconds after which to retry.

    Example:
        >>> Shed("queue", 0.5).reason
        'queue'
    """

    reason: str
    retry_after: float


@dataclass(eq=False, slots=True)
class Batch:
    """Requests that run together in one bucket.

    Args:
        bucket: the shape they run in.
        entries: the requests.
        started: time at which the batch was handed out.
        expected: planned duration once it has begun, in seconds.
        begun: time at which the engine began it; before that, when it is expected to.

    Example:
        >>> Batch(Bucket(4, 16), [], started=0.0, expected=0.01, begun=0.0).units
        0
    """

    bucket: Bucket
    entries: list[Entry]
    started: float
    expected: float
    begun: float

    @property
    def units(self) -> int:
        """The number of units in use; the rest of the bucket is padding."""
        return sum(entry.units for entry in self.entries)


@dataclass
class Queues:
    """One list per context, earliest deadline first."""

    by_context: dict[int, list[Entry]] = field(default_factory=dict)

    def copy(self) -> "Queues":
        """Return a shallow copy: new lists of the same entries."""
        return Queues({context: list(entries) for context, entries in self.by_context.items() if entries})

    def add(self, entry: Entry) -> None:
        """Insert an entry by its deadline."""
        bisect.insort(self.by_context.setdefault(entry.context, []), entry, key=lambda e: e.order)

    def remove(self, entry: Entry) -> bool:
        """Remove an entry; return whether it was there."""
        waiting = self.by_context.get(entry.context, [])
        place = bisect.bisect_left(waiting, entry.order, key=lambda e: e.order)
        if place < len(waiting) and waiting[place] is entry:
            del waiting[place]
            return True
        return False

    def first(self) -> Entry | None:
        """Return the entry with the earliest deadline, or None."""
        heads = [entries[0] for entries in self.by_context.values() if entries]
        return min(heads, key=lambda e: e.order, default=None)

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entries in self.by_context.values() for entry in entries)

    def __len__(self) -> int:
        return sum(map(len, self.by_context.values()))


def fill(room: int, waiting: Sequence[Entry]) -> tuple[list[Entry], int]:
    """Return as many entries from the front as fit, and the room that is left."""
    taken = []
    for entry in waiting:
        if entry.units > room:
            break
        taken.append(entry)
        room -= entry.units
    return taken, room
