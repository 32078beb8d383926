"""Batches that are handed out before the last one ends, on a virtual clock."""

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.serving import BatchTimes, Entry, Policy, Scheduler, Shed
from loka.serving.times import Bucket

from .test_scheduler import Both

LAYOUT, RUN = 0.0007, 0.0023  # of a ranker of 4,096 rows on an H200
COST = {(1024, 0): 0.0010, (4096, 0): RUN}
ROWS = 512  # of a request: eight make a batch


@dataclass
class Happened:
    good: int = 0
    late: int = 0
    dropped: int = 0
    shed: int = 0
    busy: float = 0.0
    latencies: list[float] = field(default_factory=list)

    @property
    def broken(self) -> float:
        """Share of the admitted whose promise was not kept."""
        return (self.late + self.dropped) / (self.good + self.late + self.dropped)


def simulate(
    rate: float,
    *,
    sla: float = 0.05,
    ahead: bool = True,
    seconds: float = 1.0,
    slower: Callable[[random.Random], float] = lambda source: 0.0,
    sending: Callable[[random.Random], float] = lambda source: 0.001,
) -> Happened:
    """Requests of Poisson arrivals. Answers reach the client up to a millisecond after they were sent, which nobody tells."""
    source, arrivals, at = random.Random(1), [], 0.0
    while (at := at + source.expovariate(rate)) < seconds:
        arrivals.append((at, ROWS))
    scheduler = make(COST, Policy(sla=sla, reserve=0.003), ahead=ahead)
    happened = play(scheduler, arrivals, lambda bucket: COST[bucket] + slower(source), lambda: sending(source))
    happened.good = sum(latency + 0.001 * source.random() <= sla for latency in happened.latencies)
    happened.late = len(happened.latencies) - happened.good
    happened.busy /= seconds
    return happened


def make(cost: dict[tuple[int, int], float], policy: Policy, *, ahead: bool = True) -> Scheduler:
    times = BatchTimes()
    for bucket, seconds in cost.items():
        times.learn(Bucket(*bucket), seconds + LAYOUT)  # what a rehearsal sees
    return Both([Bucket(*bucket) for bucket in cost], policy=policy, times=times, ahead=ahead)


def play(
    scheduler: Scheduler,
    arrivals: list[tuple[float, int]],
    run: Callable[[Any], float],
    sending: Callable[[], float] = lambda: 0.0,
) -> Happened:
    """A host that lays out batches and waits for the device, and a device that runs them in order.

    The time that answers take to be sent is told to the scheduler, as fronts do.
    """
    happened, place, now, free = Happened(), 0, 0.0, 0.0
    told: list[tuple[float, float]] = []
    flying: list[tuple[Any, float]] = []

    def pass_time(until: float) -> None:
        nonlocal place, now
        while True:
            arrives = arrivals[place][0] if place < len(arrivals) else math.inf
            if min(arrives, told[0][0] if told else math.inf) > until:
                break
            if told and told[0][0] < arrives:
                scheduler.margins.learn_sending(heapq.heappop(told)[1])
            else:
                happened.shed += isinstance(scheduler.offer(None, now=arrives, units=arrivals[place][1]), Shed)
                place += 1
        now = max(now, until)

    while place < len(arrivals) or len(scheduler) or flying:
        pass_time(now)
        batch, dropped = scheduler.start(now=now)
        happened.dropped += len(dropped)
        if batch is not None:
            takes = run(batch.bucket)
            pass_time(now + LAYOUT)
            if scheduler.ahead:
                scheduler.launched(now=now)
            free = max(now, free) + takes
            happened.busy += takes
            flying.append((batch, free))
        elif not flying:
            pass_time(arrivals[place][0] if place < len(arrivals) else now)
        elif 0 < (wait := scheduler.delay(now=now)) < math.inf:
            pass_time(now + wait)
        else:
            ended, end = flying.pop(0)
            pass_time(end)
            scheduler.finish(now=now)
            for entry in ended.entries:
                took = sending()
                heapq.heappush(told, (now + took, took))
                happened.latencies.append(now + took - entry.arrived)
    return happened


def test_a_layout_beside_a_run_costs_no_time() -> None:
    """With 0.7 ms of layout and 2.3 of run the device ends a batch of eight every 2.3 ms instead of every 3.0."""
    apart, together = (simulate(1.6 * 8 / RUN, ahead=ahead) for ahead in (False, True))
    assert apart.good / 1.05 < 1.02 * 8 / (LAYOUT + RUN)  # those of the last moment are answered within an SLA
    assert together.good / 1.0 > 0.99 * 8 / RUN
    assert together.busy > 0.995
    assert together.late == together.dropped == 0
    assert together.shed > 0  # more was offered than fits


@pytest.mark.parametrize("sla", [0.05, 0.1])
def test_answers_stay_in_time_when_batches_and_sending_vary(sla: float) -> None:
    """Of what is promised at most 1 % is dropped and 0.5 % late, though every tenth batch takes up to twice its time."""

    def slower(source: random.Random) -> float:
        return RUN * source.random() if source.random() < 0.1 else 0.0001 * source.random()

    found = simulate(
        1.5 * 8 / RUN, sla=sla, slower=slower, sending=lambda source: 0.0008 + source.expovariate(1 / 0.0006)
    )
    assert found.late <= 0.005 * found.good
    assert found.broken <= 0.015
    assert found.busy > 0.99


TRAFFIC = st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([64, 512, 1000, 3000])), min_size=1, max_size=150)


@settings(max_examples=150, deadline=None)
@given(TRAFFIC, st.sampled_from([0.012, 0.03, 0.05]))
def test_with_known_times_nobody_who_was_admitted_is_late(traffic: list[tuple[int, int]], sla: float) -> None:
    arrivals = [(at / 10_000, rows) for at, rows in sorted(traffic)]
    found = play(make(COST, Policy(sla=sla, reserve=0.0)), arrivals, COST.__getitem__)
    assert len(found.latencies) + found.shed == len(traffic)
    assert found.dropped == 0
    assert max(found.latencies, default=0.0) <= sla + 1e-9


@pytest.mark.parametrize("share", [0.2, 0.5, 0.75])
def test_nobody_waits_longer_because_batches_are_handed_out_ahead(share: float) -> None:
    apart, together = (simulate(share * 8 / (LAYOUT + RUN), ahead=ahead) for ahead in (False, True))
    for q in (0.5, 0.99):
        assert np.quantile(together.latencies, q) <= 1.1 * np.quantile(apart.latencies, q)


def test_a_batch_is_handed_out_when_little_is_left_of_the_one_before() -> None:
    times = BatchTimes()
    times.learn(Bucket(4, 0), 0.020)
    scheduler = Scheduler([Bucket(4, 0)], policy=Policy(sla=0.1, reserve=0.0), times=times, ahead=True)
    first, second, third = (scheduler.offer(n, now=0.0, units=4) for n in range(3))
    assert scheduler.delay(now=0.0) == 0.0
    batch, _ = scheduler.start(now=0.0)
    assert batch is not None
    scheduler.launched(now=0.004)
    scheduler.margins.refresh()
    assert scheduler.lead == pytest.approx(0.008)  # twice a layout; the share of the SLA is 5 ms
    assert scheduler.delay(now=0.004) == pytest.approx(0.012)  # ends at 24
    assert scheduler.start(now=0.015) == (None, [])
    ahead, _ = scheduler.start(now=0.017)
    assert ahead is not None
    assert [scheduler.flying[0].entries, ahead.entries] == [[first], [second]]
    assert ahead.begun == pytest.approx(0.024)  # as planned
    scheduler.launched(now=0.021)
    assert scheduler.delay(now=0.023) == math.inf  # two at most
    assert scheduler.start(now=0.023) == (None, [])
    scheduler.finish(now=0.025)
    assert (scheduler.running, ahead.begun) == (ahead, 0.025)  # it was there already
    assert isinstance(third, Entry)
    assert scheduler.cancel(third)
    assert isinstance(second, Entry)
    assert not scheduler.cancel(second)
    scheduler.finish(now=0.045)
    assert scheduler.times.quantile(Bucket(4, 0), 0.95) == pytest.approx(0.021)  # without the layout
    assert scheduler.running is None


def test_a_newcomer_counts_on_all_that_was_handed_out() -> None:
    times = BatchTimes()
    times.learn(Bucket(1, 0), 0.010)
    scheduler = Scheduler([Bucket(1, 0)], policy=Policy(sla=0.2, reserve=0.0), times=times, ahead=True)
    for n in range(2):
        scheduler.offer(n, now=0.0)
        scheduler.start(now=0.0)
        scheduler.launched(now=0.0)
    assert len(scheduler.flying) == 2
    shed = scheduler.offer("tight", now=0.004, deadline=0.029)
    assert shed == Shed("late", pytest.approx(0.001))  # 6 ms and 10 until the device is free, and its own 10
    assert isinstance(scheduler.offer("just", now=0.004, deadline=0.0301), Entry)


def test_plans_have_the_layout_in_them() -> None:
    times = BatchTimes()
    for units, seconds in ((1, 0.004), (2, 0.011), (4, 0.016)):
        times.learn(Bucket(units, 0), seconds)
    scheduler = Scheduler([Bucket(1, 0), Bucket(2, 0), Bucket(4, 0)], policy=Policy(sla=0.043, reserve=0.0), times=times, ahead=True)  # fmt: skip
    assert scheduler.cap(0) == 4  # 16 and 16, handed out 2.2 ahead: 34.2 of 43
    scheduler.offer(0, now=0.0)
    scheduler.start(now=0.0)
    scheduler.launched(now=0.006)
    scheduler.finish(now=0.010)
    assert (scheduler.margins.layout, scheduler.cap(0)) == (0.006, 2)  # handed out 12 ahead: 44 of 43
    scheduler.offer(1, now=0.020)
    batch, _ = scheduler.start(now=0.020)
    assert batch is not None
    assert (batch.bucket.units, batch.begun, batch.expected) == (1, pytest.approx(0.026), 0.006)  # the host is slower


def test_a_wait_before_a_layout_is_time_of_the_batch() -> None:
    scheduler = make(COST, Policy(sla=0.1, reserve=0.0))
    scheduler.offer(None, now=0.0, units=ROWS)
    batch, _ = scheduler.start(now=0.0)
    scheduler.launched(now=0.0057, since=0.0050)  # another model was rehearsed
    assert batch is not None
    assert batch.begun == pytest.approx(0.0007)
    scheduler.finish(now=0.0067)
    assert scheduler.margins.layout == pytest.approx(0.0007)
    assert scheduler.times.quantile(batch.bucket, 0.95) == pytest.approx(0.0060)
