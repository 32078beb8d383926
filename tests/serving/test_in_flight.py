"""Two batches in flight in a runner, with a device that the test moves on by hand."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from loka.serving import Policy
from loka.serving.runner import HUNG, Refused, Runner

from .sleeper import Ask, Said, Sleeper


class Moved(Sleeper):
    """A model whose device ends a batch when the test says so."""

    ahead = True

    def __init__(self, version: str = "1") -> None:
        super().__init__({(1, 0): 0.0}, version=version)
        self.launched: list[int] = []
        self.may_end = threading.Semaphore(0)
        self.bad: set[int] = set()
        self.open = True  # while it is rehearsed

    def run(self, bucket: tuple[int, int], jobs: Any) -> list[Said]:
        return list(self.launch(bucket, jobs)())

    def launch(self, bucket: tuple[int, int], jobs: Any) -> Callable[[], Iterable[Said]]:
        (job,) = jobs
        if job.data in self.bad:
            raise RuntimeError("it could not be launched")
        self.launched.append(job.data)

        def collect() -> list[Said]:
            if not self.open:
                assert self.may_end.acquire(timeout=30)
            return [Said(number=2 * job.data, version=self.version)]

        return collect


async def come_true(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


async def start(model: Moved, **options: Any) -> Runner:
    runner = Runner(model, Policy(sla=60.0), **options)
    await runner.start()
    model.launched, model.open = [], False
    return runner


def submit(runner: Runner, *numbers: int) -> list[Any]:
    """Submit requests at once. An engine thread that wakes up in between may rightly wait for the first one's end."""
    with runner._changed:
        return [runner.submit(Ask(number=n), arrived=runner.clock()) for n in numbers]


def test_two_batches_are_in_flight_and_answers_come_in_order() -> None:
    async def work() -> None:
        runner = await start(model := Moved())
        tickets = submit(runner, 1, 2, 3, 4)
        for ended in range(4):
            await come_true(lambda: model.launched == [1, 2, 3, 4][: ended + 2])  # noqa: B023
            assert [ticket.future.done() for ticket in tickets] == [n < ended for n in range(4)]
            model.may_end.release()
            assert (await asyncio.wait_for(tickets[ended].future, 30)).number == 2 * (ended + 1)
        assert runner.scheduler is not None
        assert runner.scheduler.running is None
        assert runner.captured_since_ready == 0
        (alone,) = submit(runner, 7)
        model.may_end.release()
        assert (await asyncio.wait_for(alone.future, 30)).number == 14
        runner.close()

    asyncio.run(work())


def test_a_batch_that_cannot_be_launched_fails_alone_and_in_its_turn() -> None:
    async def work() -> None:
        runner = await start(model := Moved())
        model.bad = {2}
        tickets = submit(runner, 1, 2, 3)
        await come_true(lambda: model.launched == [1])
        await asyncio.sleep(0.01)
        assert not tickets[1].future.done()
        model.may_end.release(2)
        assert (await asyncio.wait_for(tickets[0].future, 30)).number == 2
        with pytest.raises(Refused, match="the model failed"):
            await asyncio.wait_for(tickets[1].future, 30)
        assert (await asyncio.wait_for(tickets[2].future, 30)).number == 6
        runner.close()

    asyncio.run(work())


def test_a_new_model_waits_until_nothing_is_in_flight() -> None:
    async def work() -> None:
        runner = await start(model := Moved())
        tickets = submit(runner, 1, 2, 3)
        await come_true(lambda: model.launched == [1, 2])
        new = Moved(version="2")
        swap = asyncio.create_task(runner.swap(new, runner.prepare(new, _Direct())))
        await asyncio.sleep(0)
        new.open, new.launched = True, []
        model.may_end.release()
        assert (await asyncio.wait_for(tickets[0].future, 30)).version == "1"
        await asyncio.sleep(0.01)
        assert (model.launched, new.launched, swap.done()) == ([1, 2], [], False)
        model.may_end.release()
        assert [(await asyncio.wait_for(ticket.future, 30)).version for ticket in tickets] == ["1", "1", "2"]
        await asyncio.wait_for(swap, 30)
        assert (model.launched, new.launched) == ([1, 2], [3])
        runner.close()

    asyncio.run(work())


class _Direct:
    def run(self, model: Any, bucket: Any, jobs: Any) -> tuple[Any, float]:
        return model.run(bucket, jobs[:1]), 0.001


def test_a_rehearsal_is_let_in_when_nothing_is_in_flight_however_long_the_queue_is() -> None:
    async def work() -> None:
        runner = await start(model := Moved())
        tickets = submit(runner, 1, 2, 3, 4)
        await come_true(lambda: model.launched == [1, 2])
        inside, leave = threading.Event(), threading.Event()

        def rehearse() -> None:
            with runner.turn:
                inside.set()
                leave.wait(30)

        threading.Thread(target=rehearse, daemon=True).start()
        await come_true(lambda: runner.turn.guests == 1)
        model.may_end.release()
        await asyncio.wait_for(tickets[0].future, 30)
        await asyncio.sleep(0.01)
        assert (model.launched, inside.is_set()) == ([1, 2], False)  # the second one runs
        model.may_end.release()
        await come_true(inside.is_set)
        await asyncio.sleep(0.01)
        assert model.launched == [1, 2]
        model.may_end.release(2)
        leave.set()
        assert [(await asyncio.wait_for(ticket.future, 30)).number for ticket in tickets] == [2, 4, 6, 8]
        await come_true(lambda: not runner.turn.held)
        runner.close()

    asyncio.run(work())


def test_who_waits_can_leave_and_who_is_in_flight_is_finished_by_a_drain() -> None:
    async def work() -> None:
        runner = await start(model := Moved())
        tickets = submit(runner, 1, 2, 3)
        await come_true(lambda: model.launched == [1, 2])
        for ticket in tickets[1:]:
            runner.cancel(ticket)
        assert runner.scheduler is not None
        assert len(runner.scheduler) == 0
        draining = asyncio.create_task(runner.drain(30))
        await asyncio.sleep(0.02)
        assert not draining.done()
        model.may_end.release(2)
        assert await draining
        assert model.launched == [1, 2]
        assert (await tickets[0].future).number == 2
        runner.close()

    asyncio.run(work())


def test_a_device_that_hangs_with_a_batch_behind_it_is_noticed() -> None:
    async def work() -> None:
        late = 0.0
        runner = await start(model := Moved(), clock=lambda: time.monotonic() + late)
        tickets = submit(runner, 1, 2)
        await come_true(lambda: model.launched == [1, 2])
        assert runner.ready
        late = HUNG + 60.0
        assert runner.hung
        assert not runner.ready
        model.may_end.release(2)
        for ticket in tickets:
            await asyncio.wait_for(ticket.future, 30)
        assert not runner.hung
        runner.close()

    asyncio.run(work())
