"""Who runs when: the batching of a server with deadlines, as plain functions of a clock that the caller holds.

A model runs one batch at a time, in one of a few prepared shapes (buckets of units x context length; a unit is a request of a generative model or a row of
a ranker). Every request has a deadline, by default its arrival plus the service level (SLA). The rules:

    idle        an idle engine runs what is there at once; nobody waits for company
    order       earliest deadline first; one queue per context bucket, and the queue whose head is due first runs
    cap         a batch of context c holds at most `cap(c)` units, the most for which somebody who arrives just after it began
                still meets the SLA:  q(batch) + max(q(batch), q(smallest batch of any context)) <= SLA - reserve
    size        the first bucket of the quickest way to clear the queue:  f(n) = min over buckets b of  q(b) + f(n - b), f(0) = 0,
                so that padding is bought only where it is cheaper than another batch; a smaller one where that saves the head
                and makes nobody else late. Free places are filled from queues of shorter contexts, which costs nothing
    admission   a newcomer is told at once whether it will be in time: the queue is played forward with learned times, every
                batch that is not begun at once as long as one at the cap, since later arrivals may fill it. If the newcomer
                would be late, or make an admitted request late, it is shed, with the time to come back
    trial       an idle engine with nobody waiting takes a request that is in time at the median, or else one every `TRIAL` SLAs whatever was
                learned: a slow moment must be able to end
    giving up   a request that cannot end in time even in the smallest bucket at its median time is dropped when a batch begins
    leaving     a cancelled request leaves its queue; one whose batch runs is finished with it

q is a high quantile of the learned times (loka.serving.times). A batch that has run past its quantile is expected to take as long again as it is late, so an
engine that hangs sheds everybody who would wait for it. The reserve is learned too: what answers need to leave after their batch. Time never goes back: an earlier
`now` counts as the latest one seen.

There are no threads and no sleeping here: `offer`, `start`, `finish`, `cancel` and `now` are all there is, so that every rule can be tested on a virtual clock.
"""

import bisect
import math
from collections import deque
from collections.abc import Iterable
from typing import Any

from loka.serving.queues import Batch, Entry, Policy, Queues, Shed, fill
from loka.serving.times import BatchTimes, Bucket

MEDIAN = 0.5
TRIAL = 10
SENT = 256  # answers whose way out is remembered
MOST = 0.25  # of the SLA, for the reserve: beyond it the machine is overloaded, and waiting less does not help


class Scheduler:
    """Queues, admission and batches of one engine.

    Args:
        buckets: (units, context) shapes that the engine has prepared.
        policy: the promise.
        times: durations, with every bucket warmed.

    Example:
        >>> times = BatchTimes()
        >>> times.learn((1, 16), 0.010)
        >>> scheduler = Scheduler([(1, 16)], policy=Policy(sla=0.05), times=times)
        >>> entry = scheduler.offer("job", now=0.0)
        >>> batch, dropped = scheduler.start(now=0.0)
        >>> batch.entries[0] is entry, batch.bucket
        (True, (1, 16))
        >>> scheduler.finish(now=0.010)
    """

    def __init__(self, buckets: Iterable[Bucket], *, policy: Policy, times: BatchTimes) -> None:
        self.buckets = sorted({Bucket(*b) for b in buckets}, key=lambda b: (b.context, b.units))
        if not self.buckets:
            raise ValueError("a scheduler needs at least one bucket")
        self.policy, self.times, self.reserve = policy, times, policy.reserve
        self._sent: deque[float] = deque(maxlen=SENT)
        self.sizes = {c: [b for b in self.buckets if b.context == c] for c in sorted({c for _, c in self.buckets})}
        self.contexts = list(self.sizes)
        self.running: Batch | None = None
        self._queues = Queues()
        self._now = self._tried = -math.inf
        self._count = 0
        self._caps: dict[int, list[Bucket]] = {}
        self._ways: dict[int, list[Bucket]] = {}
        self._refresh()

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queues)

    def waiting(self) -> list[Entry]:
        """Who waits, earliest deadline first."""
        return sorted(self._queues, key=lambda e: e.order)

    def most_units(self, context: int | None = None) -> int:
        """Units of the largest bucket: a request with more can never run."""
        return max(units for units, c in self.buckets if context is None or c == context)

    def cap(self, context: int) -> int:
        """Units that a batch of this context may hold under the SLA."""
        return self._caps[context][-1].units

    def context_for(self, length: int) -> int:
        """The smallest context bucket that holds so many items; a longer history is cut to the longest."""
        place = bisect.bisect_left(self.contexts, length)
        return self.contexts[min(place, len(self.contexts) - 1)]

    def offer(
        self, job: Any, *, now: float, units: int = 1, length: int = 0, deadline: float | None = None
    ) -> Entry | Shed:
        """Admit a request, or shed it at once; what can never run raises."""
        context = self.context_for(length)
        if not 1 <= units <= self.most_units(context):
            raise ValueError(
                f"a request of {units} units; the buckets of context {context} hold 1 to {self.most_units(context)}"
            )
        now = self._advance(now)
        entry = self._make(job, units, context, now, now + self.policy.sla if deadline is None else deadline)
        if len(self._queues) >= self.policy.queue:
            return Shed("queue", self._wait_for_all(now))
        if (shed := self._judge(entry, now)) is not None:
            return shed
        self._queues.add(entry)
        return entry

    def restore(self, job: Any, *, units: int, length: int, arrived: float, deadline: float) -> Entry:
        """Queue a request that was admitted before, by a scheduler that this one replaces."""
        entry = self._make(job, units, self.context_for(length), arrived, deadline)
        self._queues.add(entry)
        return entry

    def cancel(self, entry: Entry) -> bool:
        """Leave the queue; False when the request runs already or is finished."""
        if entry.state == "waiting" and self._queues.remove(entry):
            entry.state = "cancelled"
            return True
        return False

    def start(self, *, now: float) -> tuple[Batch | None, list[Entry]]:
        """The batch to run now, if the engine is idle and somebody waits; and who was given up."""
        now = self._advance(now)
        if self.running is not None:
            return None, []
        dropped = self._drop(self._queues, now)
        for entry in dropped:
            entry.state = "dropped"
        chosen = self._choose(self._queues, now)
        if chosen is None:
            return None, dropped
        bucket, entries = chosen
        for entry in entries:
            self._queues.remove(entry)
            entry.state = "running"
        self.running = Batch(bucket, entries, now, self._plan(bucket))
        return self.running, dropped

    def finish(self, *, now: float, learn: bool = True) -> None:
        """The running batch has ended; `learn=False` when it failed, whose duration says nothing."""
        now = self._advance(now)
        if self.running is None:
            raise ValueError("no batch is running")
        if learn:
            self.times.learn(self.running.bucket, now - self.running.started)
            if self._sent:
                usual = sorted(self._sent)[math.ceil(self.policy.quantile * len(self._sent)) - 1]
                self.reserve = max(self.policy.reserve, min(usual + self.policy.reserve / 2, MOST * self.policy.sla))
            self._refresh()
        for entry in self.running.entries:
            entry.state = "done"
        self.running = None

    def learn_sending(self, seconds: float) -> None:
        """How long after its batch an answer had left. On a busy machine that is more than any constant, and all of it is taken from the deadline."""
        self._sent.append(seconds)

    def _make(self, job: Any, units: int, context: int, arrived: float, deadline: float) -> Entry:
        self._count += 1
        return Entry(job, units, context, arrived, deadline, self._count)

    def _advance(self, now: float) -> float:
        self._now = max(self._now, now)
        return self._now

    def _plan(self, bucket: Bucket) -> float:
        return self.times.quantile(bucket, self.policy.quantile)

    def _refresh(self) -> None:
        """The buckets of each context that the SLA allows, at least the smallest; and the quickest way through a queue."""
        least = max(self._plan(sizes[0]) for sizes in self.sizes.values())
        for context, sizes in self.sizes.items():
            fitting = [b for b in sizes if self._plan(b) + max(self._plan(b), least) <= self.policy.sla - self.reserve]
            self._caps[context] = sizes[: max(1, sizes.index(fitting[-1]) + 1 if fitting else 1)]
            self._ways[context] = self._find_ways(self._caps[context])

    def _find_ways(self, sizes: list[Bucket]) -> list[Bucket]:
        """The first bucket to run for 1, 2, ... times the smallest bucket's units, up to the largest; the larger one at a tie."""
        step, best = sizes[0].units, [0.0]
        ways: list[Bucket] = []
        for count in range(1, math.ceil(sizes[-1].units / step) + 1):
            costs = [(self._plan(b) + best[max(0, count - b.units // step)], -b.units, b) for b in sizes]
            cost, _, bucket = min(costs)
            best.append(cost)
            ways.append(bucket)
        return ways

    def _sizes_for(self, entry: Entry) -> list[Bucket]:
        """Buckets a batch with this head may use: up to the cap, or the smallest that holds it when it alone is larger."""
        allowed = [b for b in self._caps[entry.context] if b.units >= entry.units]
        return allowed or [next(b for b in self.sizes[entry.context] if b.units >= entry.units)]

    def _judge(self, entry: Entry, now: float) -> Shed | None:
        end, late = self._play(self._queues, entry, now)
        limit = entry.deadline - self.reserve
        if end > limit:
            return None if self._try(entry, now, limit) else Shed("late", end - limit)
        if late and late > self._play(self._queues, None, now)[1]:
            return Shed("others", self._remaining(now) + self._plan(self._sizes_for(entry)[0]))
        return None

    def _try(self, entry: Entry, now: float, limit: float) -> bool:
        if self.running is not None or len(self._queues):
            return False
        if now + self.times.quantile(self._smallest(entry), MEDIAN) <= limit:
            return True
        if now - self._tried < TRIAL * self.policy.sla:
            return False
        self._tried, entry.trial = now, True
        return True

    def _wait_for_all(self, now: float) -> float:
        return self._remaining(now) + sum(
            self._plan(self._caps[c][-1]) * math.ceil(sum(e.units for e in waiting) / self.cap(c))
            for c, waiting in self._queues.by_context.items()
        )

    def _remaining(self, now: float) -> float:
        """Seconds until the engine is free; a batch that overran is expected to overrun as much again."""
        if self.running is None:
            return 0.0
        return abs(self.running.expected - (now - self.running.started))

    def _play(self, queues: Queues, newcomer: Entry | None, at: float, *, begun: bool = False) -> tuple[float, int]:
        """Run the queues forward: when the newcomer ends, and how many end late. A batch that begins at once takes what it takes."""
        queues = queues.copy()
        if newcomer is not None:
            queues.remove(newcomer)
            queues.add(newcomer)
        at, now_or_never = at + self._remaining(at), self.running is None and not begun
        end, late = math.inf, 0
        while (head := queues.first()) is not None:
            full = self._sizes_for(head)[-1]
            bucket, entries = self._gather(queues, head, self._quickest(queues, head) if now_or_never else full)
            at += self._plan(bucket) if now_or_never else max(map(self._plan, self._sizes_for(head)))
            now_or_never = False
            for entry in entries:
                queues.remove(entry)
                late += at > entry.deadline - self.reserve
                if entry is newcomer:
                    end = at
        return end, late

    def _drop(self, queues: Queues, now: float) -> list[Entry]:
        gone = [
            entry
            for entry in queues
            if not entry.trial and now + self.times.quantile(self._smallest(entry), MEDIAN) > entry.deadline
        ]
        for entry in gone:
            queues.remove(entry)
        return gone

    def _smallest(self, entry: Entry) -> Bucket:
        return next(b for b in self.sizes[entry.context] if b.units >= entry.units)

    def _choose(self, queues: Queues, now: float) -> tuple[Bucket, list[Entry]] | None:
        """The next batch by the rules above; the queues stay as they are."""
        head = queues.first()
        if head is None:
            return None
        left = head.deadline - self.reserve - now
        wanted = self._quickest(queues, head)
        chosen = self._gather(queues, head, wanted)
        if self._plan(chosen[0]) > left:
            timely = [b for b in self._sizes_for(head) if b < wanted and self._plan(b) <= left]
            if timely:
                smaller = self._gather(queues, head, timely[-1])
                chosen = min(chosen, smaller, key=lambda found: self._count_late(queues, found, now))
        return chosen

    def _count_late(self, queues: Queues, chosen: tuple[Bucket, list[Entry]], now: float) -> int:
        """How many would be late if this ran now."""
        rest, end = queues.copy(), now + self._plan(chosen[0])
        for entry in chosen[1]:
            rest.remove(entry)
        own = sum(end > entry.deadline - self.reserve for entry in chosen[1])
        return own + self._play(rest, None, end, begun=True)[1]

    def _gather(self, queues: Queues, head: Entry, bucket: Bucket) -> tuple[Bucket, list[Entry]]:
        """The requests of a batch in this bucket, or in a smaller one if that holds what fits; then whoever is shorter."""
        taken, free = fill(bucket.units, queues.by_context[head.context])
        used = bucket.units - free
        bucket = next(b for b in self.sizes[head.context] if b.units >= used)
        free = bucket.units - used
        for context in reversed(self.contexts[: self.contexts.index(head.context)]):
            more, free = fill(free, queues.by_context.get(context, []))
            taken += more
        return bucket, taken

    def _quickest(self, queues: Queues, head: Entry) -> Bucket:
        """The bucket that begins the quickest way to clear the head's queue."""
        ways, step, units = self._ways[head.context], self.sizes[head.context][0].units, 0
        for entry in queues.by_context[head.context]:
            units += entry.units
            if units >= len(ways) * step:
                break
        wanted = ways[min(len(ways), math.ceil(units / step)) - 1]
        return max(wanted, self._sizes_for(head)[0])
