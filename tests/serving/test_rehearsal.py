"""A model that nobody uses yet runs between the batches of one that answers, if it is quick."""

import threading
import time

import pytest

from loka.serving.rehearsal import Turns, rehearse

from .small import Sleeper

BUCKET = (1, 0)


@pytest.mark.parametrize(("cost", "waits"), [(0.0, True), (0.03, False)])
def test_only_short_runs_wait_for_the_engine_and_the_first_never_does(cost: float, waits: bool) -> None:
    model, engine = Sleeper({BUCKET: cost}), threading.Lock()
    turns, jobs = Turns([engine], longest=0.02), model.example(BUCKET)
    ran = threading.Event()

    def again() -> None:
        turns.run(model, BUCKET, jobs)
        ran.set()

    with engine:  # a batch is running
        turns.run(model, BUCKET, jobs)
        threading.Thread(target=again, daemon=True).start()
        assert ran.wait(0.3 if waits else 10) is not waits
    assert ran.wait(10)
    assert not engine.locked()


def test_an_engine_waits_for_one_short_run_at_most() -> None:
    """The newcomer leaves the lock alone for longer than it holds it, so whoever waits gets it next."""
    model, engine, stop = Sleeper({BUCKET: 0.002}), threading.Lock(), threading.Event()
    turns, jobs = Turns([engine]), model.example(BUCKET)

    def newcomer() -> None:
        while not stop.is_set():
            turns.run(model, BUCKET, jobs)

    thread = threading.Thread(target=newcomer)
    thread.start()
    while len(model.batches) < 3:
        time.sleep(0.001)
    runs = []
    for _ in range(5):
        before = len(model.batches)
        with engine:
            runs.append(len(model.batches) - before)
        time.sleep(0.001)
    stop.set()
    thread.join(10)
    assert max(runs) <= 2  # the one that ran, and one that began before this thread asked


def test_a_run_that_fails_gives_the_turn_back() -> None:
    model, engine = Sleeper({BUCKET: 0.0}), threading.Lock()
    turns = Turns([engine])
    turns.run(model, BUCKET, model.example(BUCKET))
    model.broken = True
    with pytest.raises(RuntimeError, match="broken"):
        turns.run(model, BUCKET, model.example(BUCKET))
    assert not engine.locked()


def test_every_bucket_is_timed() -> None:
    model = Sleeper({(1, 0): 0.001, (4, 0): 0.004})
    times = rehearse(model, Turns())
    assert model.captures == 2
    assert times.quantile((4, 0), 0.5) >= 0.004 > times.quantile((1, 0), 0.5) >= 0.001
