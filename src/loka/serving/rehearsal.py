"""What a model goes through before it answers anybody: every bucket warmed and timed, its promise checked, recorded requests answered.

A new model does so beside the one that answers. Two threads in the middle of forwards take Python's lock from each other after every operation: a forward of 1.6 ms then takes 4.6.
So a newcomer's runs take turns with the engine's batches, and leave two thirds of the time alone. Long ones do not: they compute outside Python, and an engine must not wait for them.
"""

import contextlib
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

from loka.serving.queues import Policy
from loka.serving.servable import Job, Servable
from loka.serving.times import BatchTimes, Bucket

REHEARSALS = 5
SHORT = 0.01  # seconds that an engine may have to wait for a newcomer


class Turns:
    """Runs of a model that nobody uses yet.

    Args:
        engines: locks, each held by an engine while it runs a batch; none where nobody answers yet.
        longest: seconds of a run that may keep them waiting.
    """

    def __init__(self, engines: Sequence[threading.Lock] = (), *, longest: float = SHORT) -> None:
        self.engines, self.longest = engines, longest
        self._took: dict[Bucket, float] = {}

    def run(self, model: Servable, bucket: Bucket, jobs: Sequence[Job]) -> tuple[list[Any], float]:
        """The answers, and the seconds that they took; the first run of a bucket waits for nobody, since nobody knows how long it is."""
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
    """Warm every bucket and time it: what a scheduler plans with."""
    times = BatchTimes()
    model.warm()
    for bucket in model.buckets:
        jobs = model.example(bucket)
        for _ in range(REHEARSALS):
            times.learn(bucket, turns.run(model, bucket, jobs)[1])
    return times


def check_promise(model: Servable, policy: Policy, times: BatchTimes) -> None:
    """Refuse an SLA that the smallest batch of some context cannot meet."""
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
    """Answer recorded requests with a model that nobody uses yet; returns what is wrong with the answers.

    Args:
        model: warm.
        requests: what clients asked before; without any, examples of the model's own.
        turns: when it may run.
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
