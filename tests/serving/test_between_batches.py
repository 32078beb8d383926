"""What the engine's thread does between two batches: the next one is taken; and the heap before the first."""

import asyncio
import gc
import threading
import time
from typing import Any

import pytest

from loka.serving import Policy
from loka.serving.runner import Runner

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
