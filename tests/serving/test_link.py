"""What fronts and the engine's process say to each other: places in shared memory, frames, counts."""

import asyncio
import random
from typing import Any

from loka.serving import link as frames
from loka.serving.telemetry import Telemetry


def test_places_never_overlap_and_become_whole_again() -> None:
    blocks, source, held = frames.Blocks(64 * 1024), random.Random(1), []
    for _ in range(3000):
        if held and source.random() < 0.5:
            blocks.give(*held.pop(source.randrange(len(held))))
        elif (start := blocks.take(size := source.randint(1, 4000))) is not None:
            assert all(start + size <= at or at + length <= start for at, length in held)
            held.append((start, size))
    assert held
    for one in held:
        blocks.give(*one)
    assert blocks._free == [(0, 64 * 1024)]


def test_frames_are_heard_however_they_are_cut() -> None:
    async def work() -> None:
        heard: list[Any] = []

        class Wire:
            data = b""

            def write(self, data: bytes) -> None:
                self.data += data

        ends = [frames.Link(frames.TO_ENGINE, heard.append, lambda: None) for _ in range(2)]
        wire = Wire()
        ends[0].connection_made(wire)  # type: ignore[arg-type]
        sent = [frames.Cancel(n) if n % 3 else frames.Exposed("r" * n, {"ms": 1.5}) for n in range(50)]
        for one in sent:
            ends[0].send(one)
        assert wire.data == b""  # one write at the end of the turn
        await asyncio.sleep(0)
        for at in range(0, len(wire.data), 7):
            ends[1].data_received(wire.data[at : at + 7])
        assert heard == sent

    asyncio.run(work())


def test_counts_of_two_fronts_add_up_to_those_of_one_process() -> None:
    now = [100.0]
    whole, parts, sum_of_parts = Telemetry(lambda: now[0]), [Telemetry(lambda: now[0]) for _ in range(2)], Telemetry(lambda: now[0])  # fmt: skip
    source = random.Random(0)
    for step in range(400):
        now[0] += 0.02
        for told in (whole, parts[source.randrange(2)]):
            told.count("loka_requests_total", model="m", code=str(200 + step % 3))
            told.observe("loka_latency_seconds", step / 1024, model="m")
            told.answered(step / 1024, late=step % 5 == 0)
        if step % 37 == 0:
            sum_of_parts.merge(parts[step % 2].take())  # the other one tells of earlier seconds later
    for part in parts:
        sum_of_parts.merge(part.take())
        assert not part.take()
    assert sorted(sum_of_parts.render().splitlines()) == sorted(whole.render().splitlines())
    assert sum_of_parts.history() == whole.history()
