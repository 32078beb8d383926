"""Prepare a model before it serves: warm and time every bucket, check the SLA, answer recorded requests.

A new model is prepared in the process of the one that is serving. Two threads that both run a forward contend for the
GIL after every op: a forward of 1.6 ms then takes 4.6. So the new model's runs take turns with the engine's batches and
use at most a third of the time. Long runs do not: they spend their time outside Python, and the engine must not wait
for them.
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from loka.serving.queues import Policy
from loka.serving.servable import Job, Servable
from loka.serving.times import BatchTimes, Bucket

REHEARSALS = 5
SHORT = 0.01  # longest time, in seconds, that an engine waits for a new model's run


class Turn:
    """Who may use an engine's device: the engine while batches are in flight, or a guest (`with turn:`).

    A guest that waits goes first, once nothing is in flight: else a busy engine would never let it in, or it would be
    timed with the batches before it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.held, self.guests = False, 0  # guests that wait

    def take(self) -> None:
        """Take the engine's turn, after all guests that wait."""
        with self._changed:
            self._changed.wait_for(lambda: not self.held and not self.guests)
            self.held = True

    def give(self) -> None:
        """End a turn."""
        with self._changed:
            self.held = False
            self._changed.notify_all()

    def __enter__(self) -> None:
        with self._changed:
            self.guests += 1
            self._changed.wait_for(lambda: not self.held)
            self.guests, self.held = self.guests - 1, True

    def __exit__(self, *raised: object) -> None:
        self.give()


class Turns:
    """Run a model that does not serve yet, taking turns with the engines that do.

    No run may block the engines for more than `longest` seconds.
    """

    def __init__(self, engines: Sequence[Turn] = (), *, longest: float = SHORT) -> None:
        self.engines, self.longest = engines, longest
        self._took: dict[Bucket, float] = {}

    def run(self, model: Servable, bucket: Bucket, jobs: Sequence[Job]) -> tuple[Iterable[Any], float]:
        """Return the answers and the seconds they took. A bucket's first run does not block engines: it may be long."""
        polite = self._took.get(bucket, math.inf) <= self.longest
        with contextlib.ExitStack() as held:
            for engine in self.engines if polite else ():
                held.enter_context(engine)
            begin = time.perf_counter()
            answers = model.run(bucket, jobs)
            self._took[bucket] = took = time.perf_counter() - begin
        if polite and self.engines:
            time.sleep(2 * took)
        return answers, took


def rehearse(model: Servable, turns: Turns) -> BatchTimes:
    """Warm every bucket and time it, for the scheduler to plan with."""
    times = BatchTimes()
    model.warm()
    for bucket in model.buckets:
        jobs = model.example(bucket)
        for _ in range(REHEARSALS):
            times.learn(bucket, turns.run(model, bucket, jobs)[1])
    return times


def check_promise(model: Servable, policy: Policy, times: BatchTimes) -> None:
    """Raise ValueError if the smallest batch of some context cannot meet the SLA."""
    buckets = [Bucket(*bucket) for bucket in model.buckets]
    for context in sorted({bucket.context for bucket in buckets}):
        bucket = min(b for b in buckets if b.context == context)
        takes = times.quantile(bucket, 0.5)
        if takes > policy.budget:
            raise ValueError(
                f"{model.name}: a batch of bucket {bucket} takes {1e3 * takes:.1f} ms, the SLA leaves {1e3 * policy.budget:.1f} ms; "
                "hint: a longer --sla, fewer beams, shorter contexts"
            )


def probe(model: Servable, requests: Sequence[Any], turns: Turns) -> list[str]:
    """Answer earlier requests with a warm model that does not serve yet; return a message per problem.

    Without requests an example of the model is used. Problems: a request that cannot be read, an empty answer, a value
    that is not finite.
    """
    wrong: list[str] = []
    jobs: list[Job] = []
    for place, request in enumerate(requests):
        try:
            jobs.append(model.read(request))
        except ValueError as error:
            wrong.append(f"recorded request {place} is refused: {error}")
    buckets = sorted((Bucket(*bucket) for bucket in model.buckets), key=lambda b: (b.context, b.units))
    jobs = jobs or model.example(model.buckets[0])
    for place, job in enumerate(jobs):
        fitting = [b for b in buckets if b.units >= job.units and b.context >= job.length]
        bucket = fitting[0] if fitting else max(buckets, key=lambda b: b.context)
        ((answer,), _) = turns.run(model, bucket, [job])
        for name, values in model.to_tensors(answer).items():
            if values.dtype.kind == "f" and not bool((values - values == 0).all()):
                wrong.append(f"recorded request {place}: {name} is not finite")
        if answer.empty:
            wrong.append(f"recorded request {place}: the answer is empty")
    return wrong
