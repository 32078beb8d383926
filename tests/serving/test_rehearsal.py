"""A model that nobody uses yet runs between the batches of one that answers, if it is quick."""

import threading
import time
from types import SimpleNamespace

import pytest

from loka.serving import rehearsal
from loka.serving.rehearsal import Turn, Turns, rehearse

from .sleeper import Sleeper

BUCKET = (1, 0)


@pytest.mark.parametrize(("cost", "longest", "waits"), [(0.0, 60.0, True), (0.03, 0.02, False)])
def test_only_short_runs_wait_for_the_engine_and_the_first_never_does(cost: float, longest: float, waits: bool) -> None:
    model, engine = Sleeper({BUCKET: cost}), Turn()
    turns, jobs = Turns([engine], longest=longest), model.example(BUCKET)
    ran = threading.Event()

    def again() -> None:
        turns.run(model, BUCKET, jobs)
        ran.set()

    with engine:  # a batch is running
        turns.run(model, BUCKET, jobs)
        threading.Thread(target=again, daemon=True).start()
        assert ran.wait(0.3 if waits else 10) is not waits
    assert ran.wait(10)
    assert not engine.held


def test_after_a_short_run_the_engine_is_left_alone_for_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """So whoever waits for the lock gets it next."""
    model, engine = Sleeper({BUCKET: 0.0}), Turn()
    turns, jobs = Turns([engine], longest=60.0), model.example(BUCKET)
    slept: list[tuple[float, bool]] = []
    clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: slept.append((seconds, engine.held)))  # fmt: skip
    monkeypatch.setattr(rehearsal, "time", clock)
    turns.run(model, BUCKET, jobs)
    assert not slept  # it took no turn
    took = [turns.run(model, BUCKET, jobs)[1] for _ in range(2)]
    assert slept == [(2 * seconds, False) for seconds in took]


def test_a_run_that_fails_gives_the_turn_back() -> None:
    model, engine = Sleeper({BUCKET: 0.0}), Turn()
    turns = Turns([engine])
    turns.run(model, BUCKET, model.example(BUCKET))
    model.broken = True
    with pytest.raises(RuntimeError, match="broken"):
        turns.run(model, BUCKET, model.example(BUCKET))
    assert not engine.held


def test_every_bucket_is_timed() -> None:
    model = Sleeper({(1, 0): 0.001, (4, 0): 0.05})
    times = rehearse(model, Turns())
    assert model.captures == 2
    assert times.quantile((4, 0), 0.5) >= 0.05 > times.quantile((1, 0), 0.5) >= 0.001
