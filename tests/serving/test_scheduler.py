"""The rules of the scheduler on a virtual clock: first by example, then as properties of random traffic."""

import heapq
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.serving import BatchTimes, Entry, Policy, Scheduler, Shed
from loka.serving.queues import Queues

COST = {(1, 16): 0.010, (2, 16): 0.012, (4, 16): 0.016, (8, 16): 0.024, (16, 16): 0.040}
LONG = {(1, 64): 0.013, (4, 64): 0.021, (8, 64): 0.033}


def make(
    cost: dict[tuple[int, int], float], sla: float = 0.05, kind: type[Scheduler] = Scheduler, **options: float
) -> Scheduler:
    times = BatchTimes()
    for bucket, seconds in cost.items():
        times.learn(bucket, seconds)
    return kind(cost, policy=Policy(sla=sla, **{"reserve": 0.0, **options}), times=times)  # type: ignore[arg-type]


def admit(scheduler: Scheduler, now: float, **options: float) -> Entry:
    found = scheduler.offer("job", now=now, **options)  # type: ignore[arg-type]
    assert isinstance(found, Entry)
    return found


def test_an_idle_engine_runs_at_once() -> None:
    scheduler = make(COST)
    entry = admit(scheduler, 0.0)
    batch, dropped = scheduler.start(now=0.0)
    assert batch is not None
    assert (batch.entries, batch.bucket, dropped) == ([entry], (1, 16), [])
    assert scheduler.start(now=0.005) == (None, [])  # one batch at a time
    scheduler.finish(now=0.010)
    assert entry.state == "done"


def test_the_cap_leaves_time_for_a_newcomer() -> None:
    scheduler = make(COST)  # 0.024 + 0.024 <= 0.05 < 0.040 + 0.040
    assert scheduler.cap(16) == 8
    for _ in range(12):
        admit(scheduler, 0.0)
    batch, _ = scheduler.start(now=0.0)
    assert batch is not None
    assert len(batch.entries) == 8
    assert isinstance(scheduler.offer("late", now=0.0005), Entry)  # waits all of it, and is in time
    assert make(COST, sla=0.5).cap(16) == 16
    assert make(COST, sla=0.012).cap(16) == 1  # nothing fits twice: the smallest


def test_who_would_be_late_is_told_at_once_and_when_to_come_back() -> None:
    scheduler = make(COST)
    admitted, shed = [], []
    for _ in range(60):
        found = scheduler.offer("job", now=0.0)
        (shed if isinstance(found, Shed) else admitted).append(found)
    assert len(admitted) == 16  # two batches of eight
    assert {s.reason for s in shed} == {"late"}
    assert all(0 < s.retry_after < 0.2 for s in shed)


def test_a_full_queue_sheds() -> None:
    scheduler = make(COST, sla=100.0, queue=3)
    for _ in range(3):
        admit(scheduler, 0.0)
    assert scheduler.offer("job", now=0.0) == Shed("queue", pytest.approx(0.040))


def test_the_earliest_deadline_runs_first_and_may_not_harm_others() -> None:
    scheduler = make({(1, 16): 0.010}, sla=0.05)
    first = admit(scheduler, 0.0, deadline=0.021)
    second = admit(scheduler, 0.0, deadline=0.012)
    assert scheduler.waiting() == [second, first]
    assert scheduler.offer("tight", now=0.0, deadline=0.011) == Shed("others", pytest.approx(0.010))
    batch, _ = scheduler.start(now=0.0)
    assert batch is not None
    assert batch.entries == [second]


def test_a_head_that_cannot_finish_is_dropped_when_a_batch_begins() -> None:
    scheduler = make(COST)
    stale = admit(scheduler, 0.0)
    fresh = admit(scheduler, 0.0, deadline=0.5)
    batch, dropped = scheduler.start(now=0.045)  # somebody was asleep
    assert dropped == [stale]
    assert stale.state == "dropped"
    assert batch is not None
    assert batch.entries == [fresh]


def test_cancelled_requests_leave() -> None:
    scheduler = make(COST)
    entries = [admit(scheduler, 0.0) for _ in range(3)]
    assert scheduler.cancel(entries[1])
    assert not scheduler.cancel(entries[1])
    batch, _ = scheduler.start(now=0.0)
    assert batch is not None
    assert batch.entries == [entries[0], entries[2]]
    assert not scheduler.cancel(entries[0])  # it runs


def test_a_hung_engine_sheds_everybody() -> None:
    scheduler = make(COST)
    admit(scheduler, 0.0)
    scheduler.start(now=0.0)
    assert isinstance(scheduler.offer("job", now=0.015), Entry)
    for now in (0.06, 1.0, 1e4):
        assert isinstance(scheduler.offer("job", now=now), Shed)


def test_time_does_not_go_back() -> None:
    scheduler = make(COST)
    admit(scheduler, 10.0)
    entry = admit(scheduler, 3.0)  # the clock jumped
    assert entry.arrived == 10.0
    batch, _ = scheduler.start(now=2.0)
    assert batch is not None
    scheduler.finish(now=1.0)
    assert scheduler.times.quantile(batch.bucket, 0.99) <= COST[batch.bucket]


def test_shorter_contexts_fill_free_places_of_a_longer_batch() -> None:
    scheduler = make(COST | LONG, sla=0.1)
    long = [admit(scheduler, 0.0, length=40) for _ in range(3)]
    short = [admit(scheduler, 0.0, length=n) for n in (3, 16)]
    batch, _ = scheduler.start(now=0.0)
    assert batch is not None
    assert batch.bucket == (4, 64)
    assert batch.entries == [*long, short[0]]
    assert (batch.units, len(scheduler)) == (4, 1)
    assert scheduler.context_for(10_000) == 64  # cut to the longest


def test_padding_is_not_bought_when_it_is_slower() -> None:
    scheduler = make({(4, 16): 0.010, (16, 16): 0.038}, sla=0.1)
    for _ in range(5):
        admit(scheduler, 0.0)
    batch, _ = scheduler.start(now=0.0)
    assert batch is not None
    assert (batch.bucket, len(batch.entries)) == ((4, 16), 4)  # 4 in 10 ms beats 5 in 38 ms


def test_a_slow_moment_can_end() -> None:
    scheduler = make({(1, 16): 0.010, (4, 16): 0.012})
    for _ in range(3):  # most of what is known is bad
        scheduler.times.learn((1, 16), 3.0)
        scheduler.times.learn((4, 16), 3.0)
    scheduler._refresh()
    now, answered, shed = 0.0, 0, 0
    for _ in range(400):
        now += 0.05
        if isinstance(scheduler.offer("job", now=now), Entry):
            batch, dropped = scheduler.start(now=now)
            assert batch is not None
            assert dropped == []
            now += 0.010
            scheduler.finish(now=now)
            answered += 1
        else:
            shed += 1
    assert shed > 5
    assert answered > 300
    assert scheduler.times.quantile((4, 16), 0.95) < 0.05  # neglected, and so forgiven


def test_rows_of_a_ranker_are_units() -> None:
    scheduler = make({(256, 0): 0.004, (1024, 0): 0.010}, sla=0.1)
    for rows in (200, 600, 300):
        admit(scheduler, 0.0, units=rows)
    batch, _ = scheduler.start(now=0.0)
    assert batch is not None
    assert [entry.units for entry in batch.entries] == [200, 600]
    with pytest.raises(ValueError, match="hold 1 to 1024"):
        scheduler.offer("job", now=0.0, units=1025)


def test_a_request_larger_than_the_cap_runs_alone() -> None:
    scheduler = make({(256, 0): 0.004, (1024, 0): 0.040}, sla=0.05)
    assert scheduler.cap(0) == 256
    entry = admit(scheduler, 0.0, units=1000)
    batch, _ = scheduler.start(now=0.0)
    assert batch is not None
    assert (batch.bucket, batch.entries) == ((1024, 0), [entry])


def test_times_are_learned_and_bounded() -> None:
    times = BatchTimes(window=8)
    for n in range(1000):
        times.learn((1, 1), n / 1000)
    assert times.known((1, 1)) == 8
    assert times.quantile((1, 1), 0.5) == 0.995
    assert times.quantile((1, 1), 0.95) == 0.999
    with pytest.raises(ValueError, match="warm"):
        times.quantile((2, 1), 0.5)
    with pytest.raises(ValueError, match="finite"):
        times.learn((1, 1), math.nan)
    scheduler = make(COST)
    admit(scheduler, 0.0)
    scheduler.start(now=0.0)
    scheduler.finish(now=0.030)
    assert scheduler.times.quantile((1, 16), 0.95) == 0.030
    assert scheduler.cap(16) == 4  # the smallest batch now takes 30 ms, and 16 + 30 <= 50 < 24 + 30


@pytest.mark.parametrize(
    "options",
    [
        {"sla": 0.0},
        {"sla": math.inf},
        {"sla": 1.0, "reserve": 1.0},
        {"sla": 1.0, "queue": 0},
        {"sla": 1.0, "quantile": 1.0},
    ],
)
def test_a_promise_that_makes_no_sense_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Policy(**options)  # type: ignore[arg-type]


def simulate(
    scheduler: Scheduler,
    arrivals: list[tuple[float, int, int]],
    cost: dict[tuple[int, int], float],
    ago: float = 0.0,
) -> dict[str, list]:
    """An engine that takes exactly `cost`, on a virtual clock. Returns what happened to whom, and when.

    Requests were received up to `ago` seconds before they are offered, each by another front: deadlines are out of order.
    """
    events: list[tuple[float, int, str, tuple[int, int]]] = [
        (at, n, "arrive", (units, length)) for n, (at, units, length) in enumerate(arrivals)
    ]
    heapq.heapify(events)
    number = len(arrivals)
    seen: dict[str, list] = {"admitted": [], "shed": [], "done": [], "dropped": [], "batches": [], "idle": []}

    def begin(now: float) -> None:
        nonlocal number
        batch, dropped = scheduler.start(now=now)
        seen["dropped"] += dropped
        if batch is not None:
            seen["batches"].append(batch)
            number += 1
            heapq.heappush(events, (now + cost[batch.bucket], number, "end", (0, 0)))

    while events:
        now, _, what, (units, length) = heapq.heappop(events)
        if what == "arrive":
            received = now - ago * (number * 7919 % 997) / 997.3
            found = scheduler.offer(None, now=now, units=units, length=length, deadline=received + scheduler.policy.sla)
            number += 1
            seen["shed" if isinstance(found, Shed) else "admitted"].append(found)
        else:
            assert scheduler.running is not None
            seen["done"] += [(entry, now) for entry in scheduler.running.entries]
            scheduler.finish(now=now)
        begin(now)
        if scheduler.running is None and len(scheduler):
            seen["idle"].append(now)
    return seen


class Both(Scheduler):
    """Compares what is predicted at once with a simulation of the queue."""

    def _predict(self, entry: Entry, now: float) -> tuple[float, int]:
        end, late = super()._predict(entry, now)
        told, told_late = self._simulate(self._queues, entry, now)
        before = self._simulate(self._queues, None, now)[1]
        limit = entry.deadline - self.margins.admission
        assert abs(end - told) < 1e-9
        if end <= limit and abs(end - limit) > 1e-9:  # else it is shed, whoever else is late
            assert (late > 0) == (told_late > before)
        return end, late


TRAFFIC = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(1, 3), st.integers(0, 80)), min_size=1, max_size=120
).map(lambda found: [(at / 10_000, units, length) for at, units, length in sorted(found)])


@settings(max_examples=150, deadline=None)
@given(TRAFFIC, st.sampled_from([0.03, 0.05, 0.1]))
def test_with_known_times_nobody_who_was_admitted_is_late(traffic: list[tuple[float, int, int]], sla: float) -> None:
    cost = {(4, 16): 0.010, (8, 16): 0.014, (16, 16): 0.022, (4, 64): 0.013, (8, 64): 0.021}
    seen = simulate(make(cost, sla), traffic, cost)
    assert len(seen["done"]) == len(seen["admitted"])  # each once, none lost
    assert len({id(entry) for entry, _ in seen["done"]}) == len(seen["done"])
    assert seen["dropped"] == []
    assert seen["idle"] == []  # an engine never rests while somebody waits
    assert all(now <= entry.deadline + 1e-9 for entry, now in seen["done"])
    for batch in seen["batches"]:
        assert batch.units <= batch.bucket[0]
        assert all(entry.context <= batch.bucket[1] for entry in batch.entries)
        own = [entry.order for entry in batch.entries if entry.context == batch.bucket[1]]
        assert own == sorted(own)
        assert own


@settings(max_examples=150, deadline=None)
@given(TRAFFIC, st.sampled_from([0.03, 0.05, 0.1]), st.booleans(), st.sampled_from([0.0, 0.004, 0.02]))
def test_what_is_predicted_at_once_is_what_a_simulation_of_the_queue_says(
    traffic: list[tuple[float, int, int]], sla: float, one_context: bool, ago: float
) -> None:
    cost = {(4, 16): 0.010, (8, 16): 0.014, (16, 16): 0.022, (4, 64): 0.013, (8, 64): 0.021}
    if one_context:
        cost = {bucket: seconds for bucket, seconds in cost.items() if bucket[1] == 16}
        traffic = [(at, units, 3) for at, units, _ in traffic]
    seen = simulate(make(cost, sla, kind=Both), traffic, cost, ago)
    assert len(seen["admitted"]) + len(seen["shed"]) == len(traffic)


def test_admission_does_not_walk_along_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ranker may have hundreds of small requests waiting; each newcomer is judged without copying the queue."""
    scheduler = make({(64, 0): 0.01}, sla=0.2, queue=2000)
    scheduler.offer(None, now=0.0)
    scheduler.start(now=0.0)
    monkeypatch.setattr(Queues, "copy", lambda self: pytest.fail("the queue was copied"))
    found = [scheduler.offer(None, now=1e-6 * n) for n in range(1500)]
    admitted = sum(isinstance(one, Entry) for one in found)
    assert 500 < admitted < 1500
    assert {one.reason for one in found if isinstance(one, Shed)} == {"late"}


def test_admission_of_requests_out_of_order_does_not_walk_along_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fronts deliver requests milliseconds after each other: simulating the queue for each halved the goodput."""
    scheduler = make({(64, 0): 0.01}, sla=0.2, queue=2000)
    scheduler.offer(None, now=0.0)
    scheduler.start(now=0.0)
    monkeypatch.setattr(Queues, "copy", lambda self: pytest.fail("the queue was copied"))
    found = [scheduler.offer(None, now=1e-6 * n, deadline=0.2 + 1e-6 * n - n % 5 / 1000) for n in range(1500)]
    waiting = [one for one in found if isinstance(one, Entry)]
    assert 500 < len(waiting) < 1500
    assert scheduler.waiting() == sorted(waiting, key=lambda one: one.order)
    line = scheduler._lines[0]
    again = scheduler._walk(line, 0, scheduler._queues.by_context[0])
    assert (line.seconds, line.rooms) == (again.seconds, again.rooms)  # kept up to date, whoever came in between


def test_a_newcomer_before_others_may_not_make_them_late() -> None:
    scheduler = make({(1, 0): 0.01}, sla=0.1)
    scheduler.offer(None, now=0.0)
    scheduler.start(now=0.0)
    waiting = [
        admit(scheduler, 0.0, deadline=0.0501),
        admit(scheduler, 0.0, deadline=0.0501 + scheduler.margins.reserve),
    ]
    for place in (3, 4):  # the engine is free at 0.01; each takes 0.01
        admit(scheduler, 0.0, deadline=0.0101 + 0.01 * place + scheduler.margins.reserve)
    shed = scheduler.offer(None, now=0.0, deadline=0.03)
    assert isinstance(shed, Shed)
    assert shed.reason == "others"  # in time itself, but the last one has no time left
    assert isinstance(scheduler.offer(None, now=0.0, deadline=0.09), Entry)  # behind them
    assert {one.state for one in waiting} == {"waiting"}


@pytest.mark.parametrize(("sending", "deadlines"), [(0.0, (0.055, 0.065)), (0.006, (0.065, 0.071))])
def test_after_a_standstill_who_would_be_late_makes_room_for_those_behind(
    sending: float, deadlines: tuple[float, float]
) -> None:
    scheduler = make({(1, 0): 0.010, (4, 0): 0.020}, sla=0.1)
    scheduler.margins.learn_sending(sending)
    scheduler.margins.refresh()
    scheduler.offer(None, now=0.0)
    scheduler.start(now=0.0)
    first = admit(scheduler, 0.0, deadline=deadlines[0])
    others = [admit(scheduler, 0.0, deadline=deadlines[1]) for _ in range(3)]
    scheduler.finish(now=0.040, learn=False)  # 30 ms longer than any batch before
    batch, dropped = scheduler.start(now=0.040)
    assert dropped == [first]  # with it the batch of four ends at 0.060; alone before them, it would make three late
    assert batch is not None
    assert batch.entries == others
    assert (first.state, {one.state for one in others}) == ("dropped", {"running"})


def test_who_could_run_in_time_but_not_be_told_in_time_is_dropped() -> None:
    for begins, lost in ((0.0839, False), (0.0841, True)):
        scheduler = make({(1, 0): 0.010}, sla=0.1)
        scheduler.margins.learn_sending(0.006)
        scheduler.margins.refresh()
        entry = admit(scheduler, 0.0)
        batch, dropped = scheduler.start(now=begins)
        assert dropped == ([entry] if lost else [])
        assert (batch is None) == lost


def test_goodput_at_twice_the_capacity_is_that_at_capacity() -> None:
    rates = {}
    for load in (1.0, 2.0, 5.0):
        scheduler = make(COST)
        capacity = 8 / COST[8, 16]
        source = random.Random(7)
        now, arrivals = 0.0, []
        while now < 20.0:
            now += source.expovariate(load * capacity)
            arrivals.append((now, 1, 3))
        seen = simulate(scheduler, arrivals, COST)
        rates[load] = sum(at <= entry.deadline + 1e-9 for entry, at in seen["done"]) / 20.0
    assert rates[2.0] >= 0.95 * rates[1.0]
    assert rates[5.0] >= 0.95 * rates[1.0]


def test_time_that_answers_take_to_leave_comes_off_the_deadline() -> None:
    scheduler = make({(1, 16): 0.020}, reserve=0.002)
    admit(scheduler, 0.0)
    scheduler.start(now=0.0)
    admit(scheduler, 0.0, deadline=0.06)  # ends at 40
    for now in (0.020, 0.040):
        for _ in range(20):
            scheduler.margins.learn_sending(0.020)
        scheduler.finish(now=now)
        scheduler.start(now=now)
    assert scheduler.margins.reserve == pytest.approx(0.0125)  # a quarter of the SLA at most
    admit(scheduler, 0.050)
    scheduler.start(now=0.050)
    assert isinstance(scheduler.offer("late", now=0.050), Shed)  # 40 ms to run and 12.5 to leave
