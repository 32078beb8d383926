"""What the engine's thread does between two batches: the next one is taken, answers are handed over; and the heap before the first."""

import asyncio
import gc
import threading
import time
from typing import Any

import pytest

from loka.serving import Policy
from loka.serving.runner import Refused, Runner

from .sleeper import Sleeper

pytest.importorskip("uvicorn")
COST = {(1, 0): 0.002, (4, 0): 0.004}


def test_the_next_batch_is_taken_when_the_last_one_ends() -> None:
    """Else whoever is admitted in between finds an idle engine with a long queue, and simulates all of it."""
    runner = Runner(Sleeper({(1, 0): 0.002}), Policy(sla=60.0))
    idle: list[int] = []

    class Watched(threading.Condition):
        def __exit__(self, *args: Any) -> None:
            scheduler = runner.scheduler
            if threading.current_thread().name.startswith("loka-") and scheduler is not None:
                idle.append(len(scheduler) if scheduler.running is None else 0)
            super().__exit__(*args)

    async def work() -> None:
        runner._changed = Watched()
        await runner.start()
        ask = runner.model.request_type(number=1)
        tickets = [runner.submit(ask, arrived=time.monotonic()) for _ in range(20)]
        for ticket in tickets:
            await ticket.future
        runner.close()

    asyncio.run(work())
    assert len(idle) >= 20
    assert not any(idle)


def test_answers_are_taken_while_the_device_is_busy_with_the_next_batch() -> None:
    class Launching(Sleeper):
        launches = True
        told: list[str]

        def run(self, bucket: tuple[int, int], jobs: Any) -> Any:
            if self.broken:
                raise RuntimeError("broken before it was launched")
            self.told.append("launch")
            self.launched()  # type: ignore[attr-defined]
            return super().run(bucket, jobs)

    model = Launching({(1, 0): 0.02})
    model.told, model.launched = [], lambda: None  # type: ignore[attr-defined]
    runner = Runner(model, Policy(sla=60.0))

    async def work() -> None:
        await runner.start()
        model.told.clear()
        ask = model.request_type(number=1)
        tickets = [runner.submit(ask, arrived=time.monotonic()) for _ in range(4)]
        for ticket in tickets:
            ticket.future.add_done_callback(lambda _: model.told.append("answer"))
        assert [(await ticket.future).number for ticket in tickets] == [2] * 4  # the last one too, which none follows
        await asyncio.sleep(0)
        places = [place for place, word in enumerate(model.told) if word == "answer"]
        launches = [model.told[:place].count("launch") for place in places]
        assert all(seen >= wanted for seen, wanted in zip(launches, [2, 3, 4, 4], strict=True)), model.told
        model.broken = True
        failing = [runner.submit(ask, arrived=time.monotonic()) for _ in range(3)]
        for ticket in failing:
            with pytest.raises(Refused, match="the model failed"):
                await asyncio.wait_for(ticket.future, 10)
        runner.close()

    asyncio.run(work())


def test_the_heap_is_exempt_from_collections_before_the_model_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """One collection over the heap of a compiled model stops every thread for tenths of a second."""
    ready: list[bool] = []
    runner = Runner(Sleeper(COST), Policy(sla=60.0))
    freeze = gc.freeze
    monkeypatch.setattr(gc, "freeze", lambda: (ready.append(runner.ready), freeze()))

    async def work() -> None:
        await runner.start()
        runner.close()

    gc.unfreeze()
    asyncio.run(work())
    assert ready == [False]
    assert gc.get_freeze_count() > 10_000
