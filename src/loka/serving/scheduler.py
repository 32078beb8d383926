"""Deadline-aware batching and admission, as plain functions of a clock that the caller holds.

A model runs one batch after another, each in one of a few prepared shapes (buckets of units x context length; a unit is
a request of a generative model or a row of a ranker). Every request has a deadline, by default its arrival plus the
SLA. The rules:

    idle        an idle engine runs waiting requests at once; it does not wait to fill a batch
    ahead       a device that works through a queue of its own gets the next batch before the running one ends, so that it
                does not wait while the host lays a batch out. The next batch is handed out when the running one has at
                most `lead` left: twice the time of a layout, and at least a share `EARLY` of the SLA. Earlier would gain
                nothing, and who is handed out can no longer be dropped, cancelled or overtaken. Plans count from when
                the device is free:  now + max(layout, what is left of the batches that were handed out)
    order       earliest deadline first; there is one queue per context, and the one whose head is due first runs
    cap         a batch of context c holds at most `cap(c)` units, the most for which a request that arrives just after
                its start still meets the SLA:
                ahead(batch) + q(batch) + max(q(batch), q(smallest batch of any context)) <= SLA - reserve
                where ahead(batch) = min(lead, q(batch)), or 0 if batches are not handed out ahead
    size        the first bucket of the fastest way to clear the queue:  f(n) = min over buckets b of  q(b) + f(n - b),
                f(0) = 0, so that a batch is padded only if that is cheaper than another batch. A smaller bucket if that
                saves the head and makes no other request late. Free units are filled from queues of shorter contexts,
                which costs nothing
    admission   a new request is accepted or shed at once. The queue is simulated with the learned times; a batch that
                does not start now takes as long as one at the cap, since later arrivals may fill it. The request is
                shed, with a time to retry, if it would be late or would make an admitted request late
    trial       an idle engine with an empty queue accepts a request that is in time at the median, or else one every
                `TRIAL` SLAs whatever the learned times: otherwise one slow phase would shed requests forever
    drop        when a batch starts, requests that cannot finish in time even in the smallest bucket at its median time
                are dropped, and so are those of the batch that would be late in it at its median time, sending included:
                after a moment in which the machine stood still, answering them late would make all behind them late too
    cancel      a cancelled request leaves its queue; one that is already running is finished

q is a high quantile of the learned times (loka.serving.times), of a layout if that takes longer. A batch that has run
past its quantile is expected to take as long again as it is late, so requests that would wait for a hanging engine are
shed. The times around batches are learned too (loka.serving.margins): admission keeps the reserve and the drift free.
Time never goes backwards: an earlier `now` counts as the latest one seen.

There are no threads and no sleeping here, so that every rule can be tested on a virtual clock: the caller calls
`offer`, `start`, `launched`, `finish` and `cancel` with the current time.
"""

import bisect
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from loka.serving.margins import MEDIAN, Margins
from loka.serving.queues import Batch, Entry, Policy, Queues, Shed, fill
from loka.serving.times import BatchTimes, Bucket

TRIAL = 10
EARLY = 0.05


@dataclass(slots=True)
class _Line:
    """The waiting requests of one context, run one full batch after another.

    For each of them, in their order: the seconds until its batch ends, and the room that is left behind it.
    """

    seconds: list[float]
    rooms: list[int]


class Scheduler:
    """Queues, admission and batches of one engine.

    Args:
        buckets: (units, context) shapes that the engine has prepared.
        policy: the SLA and how to plan for it.
        times: batch durations; every bucket must have some.
        ahead: hand out the next batch before the running one ends.

    Example:
        >>> times = BatchTimes()
        >>> times.learn((1, 16), 0.010)
        >>> scheduler = Scheduler([(1, 16)], policy=Policy(sla=0.05), times=times)
        >>> entry = scheduler.offer("job", now=0.0)
        >>> batch, dropped = scheduler.start(now=0.0)
        >>> batch.entries[0] is entry, batch.bucket
        (True, Bucket(units=1, context=16))
        >>> scheduler.finish(now=0.010)
    """

    def __init__(self, buckets: Iterable[Bucket], *, policy: Policy, times: BatchTimes, ahead: bool = False) -> None:
        self.buckets = sorted({Bucket(*b) for b in buckets}, key=lambda b: (b.context, b.units))
        if not self.buckets:
            raise ValueError("a scheduler needs at least one bucket")
        self.policy, self.times, self.ahead, self.margins = policy, times, ahead, Margins(policy)
        self.sizes = {c: [b for b in self.buckets if b.context == c] for c in sorted({c for _, c in self.buckets})}
        self.contexts = list(self.sizes)
        self.flying: deque[Batch] = deque()  # handed out and not ended, the running one first
        self._queues = Queues()
        self._lines: dict[int, _Line] = {}
        self._most = {context: sizes[-1].units for context, sizes in self.sizes.items()}
        self._full: dict[tuple[int, int], tuple[float, int]] = {}  # (context, units) -> `_full_batch`
        self._now = self._tried = -math.inf
        self._count = 0
        self._caps: dict[int, list[Bucket]] = {}
        self._first_buckets: dict[int, list[Bucket]] = {}
        self._refresh()

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._queues)

    @property
    def running(self) -> Batch | None:
        """The batch that runs, or that is laid out for an idle engine."""
        return self.flying[0] if self.flying else None

    @property
    def lead(self) -> float:
        """Seconds before the end of a batch at which the next one is handed out, if `ahead`."""
        return max(EARLY * self.policy.sla, 2 * self.margins.layout)

    def waiting(self) -> list[Entry]:
        """Return the waiting requests, earliest deadline first."""
        return sorted(self._queues, key=lambda e: e.order)

    def most_units(self, context: int | None = None) -> int:
        """Return the units of the largest bucket; a request with more can never run."""
        return max(self._most.values()) if context is None else self._most[context]

    def cap(self, context: int) -> int:
        """Return the largest number of units that a batch of this context may hold under the SLA."""
        return self._caps[context][-1].units

    def context_for(self, length: int) -> int:
        """Return the smallest context that holds `length` items, or the longest, to which longer histories are cut."""
        place = bisect.bisect_left(self.contexts, length)
        return self.contexts[min(place, len(self.contexts) - 1)]

    def offer(
        self, job: Any, *, now: float, units: int = 1, length: int = 0, deadline: float | None = None
    ) -> Entry | Shed:
        """Admit a request or shed it at once. Raises ValueError for a request that can never run."""
        context = self.context_for(length)
        if not 1 <= units <= self.most_units(context):
            raise ValueError(
                f"a request of {units} units; the buckets of context {context} hold 1 to {self.most_units(context)}"
            )
        now = self._advance(now)
        entry = self._make_entry(job, units, context, now, now + self.policy.sla if deadline is None else deadline)
        if len(self._queues) >= self.policy.queue:
            return Shed("queue", self._wait_for_all(now))
        if (shed := self._check_admission(entry, now)) is not None:
            return shed
        self._add(entry)
        return entry

    def restore(self, job: Any, *, units: int, length: int, arrived: float, deadline: float) -> Entry:
        """Queue a request that was already admitted by the scheduler that this one replaces."""
        entry = self._make_entry(job, units, self.context_for(length), arrived, deadline)
        self._add(entry)
        return entry

    def cancel(self, entry: Entry) -> bool:
        """Remove a request from its queue; return False if it is already running or finished."""
        if entry.state == "waiting" and self._queues.remove(entry):
            self._lines.pop(entry.context, None)
            entry.state = "cancelled"
            return True
        return False

    def delay(self, *, now: float) -> float:
        """Return the seconds until `start` may hand out a batch; infinity: not before one has ended."""
        if not self.flying:
            return 0.0
        if not self.ahead or len(self.flying) > 1:
            return math.inf
        (batch,) = self.flying
        return max(0.0, batch.begun + self.times.quantile(batch.bucket, MEDIAN) - self.lead - self._advance(now))

    def start(self, *, now: float) -> tuple[Batch | None, list[Entry]]:
        """Return the batch to hand out now, if it is time and requests wait, and the requests that were dropped."""
        now = self._advance(now)
        if self.delay(now=now) > 0:
            return None, []
        begin = self._next_begin(now)
        dropped = self._drop(self._queues, begin + self.margins.leaving)
        self._lines.clear()
        for entry in dropped:
            entry.state = "dropped"
        while (chosen := self._choose(self._queues, begin)) is not None:
            bucket, entries = chosen
            end = begin + self.times.quantile(bucket, MEDIAN) + self.margins.leaving
            lost = [entry for entry in entries if end > entry.deadline and not entry.trial]
            if not lost:
                break
            for entry in lost:
                self._queues.remove(entry)
                entry.state = "dropped"
            dropped += lost
        if chosen is None:
            return None, dropped
        for entry in entries:
            self._queues.remove(entry)
            entry.state = "running"
        self.flying.append(batch := Batch(bucket, entries, now, self._planned_time(bucket), begin))
        return batch, dropped

    def launched(self, *, now: float, since: float | None = None) -> None:
        """Record that the batch that was handed out last is laid out and queued on its device.

        The layout began at `since`, by default when the batch was handed out. If the host had to wait before, that
        counts as time of the batch.
        """
        now, batch = self._advance(now), self.flying[-1]
        laid = now - (batch.started if since is None else min(since, now))
        self.margins.learn_layout(laid)
        if batch is self.running:
            batch.begun = batch.started + laid

    def finish(self, *, now: float, learn: bool = True) -> None:
        """Record that the running batch has ended; `learn=False` if it failed and its duration is meaningless."""
        now = self._advance(now)
        if not self.flying:
            raise ValueError("no batch is running")
        batch = self.flying.popleft()
        if self.flying:
            self.flying[0].begun = now
        if learn:
            took = max(0.0, now - batch.begun)
            self.times.learn(batch.bucket, took)
            self.margins.learn_batch(now, took - batch.expected)
            self.margins.refresh()
            self._refresh()
        for entry in batch.entries:
            entry.state = "done"

    def _make_entry(self, job: Any, units: int, context: int, arrived: float, deadline: float) -> Entry:
        self._count += 1
        return Entry(job, units, context, arrived, deadline, self._count)

    def _add(self, entry: Entry) -> None:
        line = self._lines.get(entry.context)
        if line is not None:
            waiting = self._queues.by_context.get(entry.context, [])
            place = self._place(waiting, entry)
            behind = self._walk(line, place, [entry, *waiting[place:]])
            line.seconds[place:], line.rooms[place:] = behind.seconds, behind.rooms
        self._queues.add(entry)

    def _place(self, waiting: list[Entry], entry: Entry) -> int:
        """Return where a newcomer belongs: nearly always at the end, or close to it if several fronts read requests."""
        place = len(waiting)
        while place and waiting[place - 1].order > entry.order:
            place -= 1
        return place

    def _line(self, context: int) -> _Line:
        """Return the line of a context. It is kept: walking along a long queue for every request costs more than HTTP."""
        line = self._lines.get(context)
        if line is None:
            line = self._lines[context] = self._walk(_Line([], []), 0, self._queues.by_context.get(context, []))
        return line

    def _walk(self, line: _Line, place: int, entries: list[Entry]) -> _Line:
        """Return how the line would go on with these entries from this place on."""
        seconds, room = (line.seconds[place - 1], line.rooms[place - 1]) if place else (0.0, 0)
        out = _Line([], [])
        for entry in entries:
            if entry.units > room:
                takes, room = self._full_batch(entry)
                seconds += takes
            room -= entry.units
            out.seconds.append(seconds)
            out.rooms.append(room)
        return out

    def _full_batch(self, head: Entry) -> tuple[float, int]:
        """Return the time and the units of a batch with this head that later arrivals may fill."""
        found = self._full.get((head.context, head.units))
        if found is None:
            buckets = self._buckets_for(head)
            found = self._full[head.context, head.units] = max(map(self._planned_time, buckets)), buckets[-1].units
        return found

    def _advance(self, now: float) -> float:
        self._now = max(self._now, now)
        return self._now

    def _planned_time(self, bucket: Bucket) -> float:
        return max(self.times.quantile(bucket, self.policy.quantile), self.margins.layout)

    def _refresh(self) -> None:
        """Update the buckets that the SLA allows for each context (at least the smallest), and `_first_buckets`."""
        least = max(self._planned_time(sizes[0]) for sizes in self.sizes.values())
        for context, sizes in self.sizes.items():
            fitting = [b for b in sizes if self._worst_case(b, least) <= self.policy.sla - self.margins.reserve]
            self._caps[context] = sizes[: max(1, sizes.index(fitting[-1]) + 1 if fitting else 1)]
            self._first_buckets[context] = self._find_first_buckets(self._caps[context])
        self._lines.clear()
        self._full.clear()

    def _worst_case(self, bucket: Bucket, least: float) -> float:
        """Return the seconds of a request that just missed a batch of this bucket, if the next one is of its size."""
        takes = self._planned_time(bucket)
        return (min(self.lead, takes) if self.ahead else 0.0) + takes + max(takes, least)

    def _find_first_buckets(self, sizes: list[Bucket]) -> list[Bucket]:
        """Return the bucket to run first if 1, 2, ... times the smallest bucket's units wait; the larger at a tie."""
        step, best = sizes[0].units, [0.0]
        first: list[Bucket] = []
        for count in range(1, math.ceil(sizes[-1].units / step) + 1):
            costs = [(self._planned_time(b) + best[max(0, count - b.units // step)], -b.units, b) for b in sizes]
            cost, _, bucket = min(costs)
            best.append(cost)
            first.append(bucket)
        return first

    def _buckets_for(self, entry: Entry) -> list[Bucket]:
        """Return the buckets for a batch with this head: up to the cap, or else the smallest that holds the head."""
        allowed = [b for b in self._caps[entry.context] if b.units >= entry.units]
        return allowed or [next(b for b in self.sizes[entry.context] if b.units >= entry.units)]

    def _check_admission(self, entry: Entry, now: float) -> Shed | None:
        end, late = self._predict(entry, now)
        limit = entry.deadline - self.margins.admission
        if end > limit:
            return None if self._allow_trial(entry, now, limit) else Shed("late", end - limit)
        if late:
            return Shed("others", self._remaining(now) + self._planned_time(self._buckets_for(entry)[0]))
        return None

    def _predict(self, entry: Entry, now: float) -> tuple[float, int]:
        """Return when the newcomer ends, and how many more requests would be late with it.

        Where only its context waits, as with every busy ranker, only those behind it are looked at: the same result as
        that of `_simulate`, at once.
        """
        alone = all(context == entry.context for context, waiting in self._queues.by_context.items() if waiting)
        if not self.flying or not alone:
            end, late = self._simulate(self._queues, entry, now)
            return end, late and max(0, late - self._simulate(self._queues, None, now)[1])
        line, waiting = self._line(entry.context), self._queues.by_context.get(entry.context, [])
        place, free = self._place(waiting, entry), self._next_begin(now)
        behind = self._walk(line, place, [entry, *waiting[place:]]).seconds
        more = 0
        for other, before, after in zip(waiting[place:], line.seconds[place:], behind[1:], strict=True):
            limit = other.deadline - self.margins.admission
            more += (free + after > limit) - (free + before > limit)
        return free + behind[0], max(0, more)

    def _allow_trial(self, entry: Entry, now: float, limit: float) -> bool:
        if self.flying or len(self._queues):
            return False
        if self._next_begin(now) + self.times.quantile(self._smallest_bucket(entry), MEDIAN) <= limit:
            return True
        if now - self._tried < TRIAL * self.policy.sla:
            return False
        self._tried, entry.trial = now, True
        return True

    def _wait_for_all(self, now: float) -> float:
        return self._remaining(now) + sum(
            self._planned_time(self._caps[c][-1]) * math.ceil(sum(e.units for e in waiting) / self.cap(c))
            for c, waiting in self._queues.by_context.items()
        )

    def _remaining(self, now: float) -> float:
        """Return the seconds until the engine is free; a late batch is expected to take as long again as it is late."""
        if not self.flying:
            return 0.0
        first, *others = self.flying
        return abs(first.expected - (now - first.begun)) + sum(batch.expected for batch in others)

    def _next_begin(self, now: float) -> float:
        """Return when the engine can begin a batch that is handed out now, or as soon as that is allowed."""
        return now + max(self.margins.layout, self._remaining(now))

    def _simulate(self, queues: Queues, newcomer: Entry | None, at: float, *, begun: bool = False) -> tuple[float, int]:
        """Simulate the queues; return when the newcomer ends and how many requests are late.

        A batch that starts now takes the time of its bucket; later ones take as long as one at the cap.
        """
        queues = queues.copy()
        if newcomer is not None:
            queues.remove(newcomer)
            queues.add(newcomer)
        if not begun:
            at = self._next_begin(at)
        starts_now = not self.flying and not begun
        end, late = math.inf, 0
        while (head := queues.first()) is not None:
            full = self._buckets_for(head)[-1]
            bucket, entries = self._gather(queues, head, self._first_bucket(queues, head) if starts_now else full)
            at += self._planned_time(bucket) if starts_now else self._full_batch(head)[0]
            starts_now = False
            for entry in entries:
                queues.remove(entry)
                late += at > entry.deadline - self.margins.admission
                if entry is newcomer:
                    end = at
        return end, late

    def _drop(self, queues: Queues, now: float) -> list[Entry]:
        medians = {bucket: self.times.quantile(bucket, MEDIAN) for bucket in self.buckets}
        safe = now + max(medians.values())
        gone = []
        for waiting in queues.by_context.values():
            for entry in waiting:
                if entry.deadline >= safe:  # and so are all behind it
                    break
                if not entry.trial and now + medians[self._smallest_bucket(entry)] > entry.deadline:
                    gone.append(entry)
        for entry in gone:
            queues.remove(entry)
        return gone

    def _smallest_bucket(self, entry: Entry) -> Bucket:
        return next(b for b in self.sizes[entry.context] if b.units >= entry.units)

    def _choose(self, queues: Queues, now: float) -> tuple[Bucket, list[Entry]] | None:
        """Return the next batch by the rules of this module, without changing the queues."""
        head = queues.first()
        if head is None:
            return None
        left = head.deadline - self.margins.reserve - now
        wanted = self._first_bucket(queues, head)
        chosen = self._gather(queues, head, wanted)
        if self._planned_time(chosen[0]) > left:
            timely = [b for b in self._buckets_for(head) if b < wanted and self._planned_time(b) <= left]
            if timely:
                smaller = self._gather(queues, head, timely[-1])
                chosen = min(chosen, smaller, key=lambda found: self._count_late(queues, found, now))
        return chosen

    def _count_late(self, queues: Queues, chosen: tuple[Bucket, list[Entry]], now: float) -> int:
        """Return how many requests would be late if this batch began now."""
        rest, end = queues.copy(), now + self._planned_time(chosen[0])
        for entry in chosen[1]:
            rest.remove(entry)
        own = sum(end > entry.deadline - self.margins.reserve for entry in chosen[1])
        return own + self._simulate(rest, None, end, begun=True)[1]

    def _gather(self, queues: Queues, head: Entry, bucket: Bucket) -> tuple[Bucket, list[Entry]]:
        """Return the smallest bucket, up to this one, that holds the requests that fit, and the requests of the batch.

        Free units are filled with requests of shorter contexts.
        """
        taken, free = fill(bucket.units, queues.by_context[head.context])
        used = bucket.units - free
        bucket = next(b for b in self.sizes[head.context] if b.units >= used)
        free = bucket.units - used
        for context in reversed(self.contexts[: self.contexts.index(head.context)]):
            more, free = fill(free, queues.by_context.get(context, []))
            taken += more
        return bucket, taken

    def _first_bucket(self, queues: Queues, head: Entry) -> Bucket:
        """Return the first bucket of the fastest way to clear the head's queue."""
        first, step, units = self._first_buckets[head.context], self.sizes[head.context][0].units, 0
        for entry in queues.by_context[head.context]:
            units += entry.units
            if units >= len(first) * step:
                break
        wanted = first[min(len(first), math.ceil(units / step)) - 1]
        return max(wanted, self._buckets_for(head)[0])
