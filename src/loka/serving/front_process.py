"""A front process: HTTP, tokens, limits, decoding and encoding; everything else is asked of the engine's process.

The ASGI application is the same `Front` as in a single process. Behind it stands a `RemoteService`, which has the same
methods and sends requests through a `Link`. Times are those of the system's monotonic clock, which all processes share,
so that deadlines count from when the front received a request.

A front ignores signals: the engine's process tells it when to stop, and when that process is gone the front ends too.
"""

import asyncio
import gc
import itertools
import logging
import mmap
import os
import pickle
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from loka.serving import link
from loka.serving.call import Limits
from loka.serving.experiment import Split
from loka.serving.front import Front
from loka.serving.listener import make_listener
from loka.serving.queues import Batch, Entry, Policy
from loka.serving.runner import Refused, Ticket
from loka.serving.servable import FieldError, Job, Packed, Reader
from loka.serving.server import log_to_stderr, run_loop
from loka.serving.service import Arms
from loka.serving.telemetry import Telemetry
from loka.serving.times import Bucket
from loka.serving.tokens import Tokens
from loka.serving.wire import TOO_LARGE, Codec

log = logging.getLogger("loka.serving")
TICK = 0.05  # seconds between reports to the engine's process
ORPHANED = 1.0  # seconds to tell the clients, once that process is gone


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a front is told when it starts."""

    limits: Limits
    token_file: str | None
    verbose: bool
    policy: Policy
    split: Split | None
    shadow: bool
    experiment: bool
    memory: int
    log_level: int
    parent: int


@dataclass(frozen=True)
class Arm:
    """A model as its fronts know it."""

    name: str
    version: str
    ready: bool
    generation: int
    reader: Reader
    described: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """Return inputs and outputs in the format of the Open Inference Protocol."""
        return self.described

    def from_tensors(self, tensors: dict[str, Any], parameters: dict[str, Any]) -> Any:
        """Make a request from named NumPy arrays and its other fields."""
        return self.reader.from_tensors(tensors, parameters)

    def to_tensors(self, answer: Any) -> dict[str, Any]:
        """Return an answer as named NumPy arrays."""
        return self.reader.to_tensors(answer)


@dataclass(eq=False, slots=True)
class _Asked:
    """A request that the engine's process has: its place in the shared memory, and who waits for it."""

    ticket: Ticket
    request: Any
    packed: Packed | None
    reader: Reader
    at: int
    size: int


class RemoteRunner:
    """A runner in the engine's process, as the HTTP front sees it."""

    def __init__(self, service: "RemoteService", arm: str, model: Arm) -> None:
        self.service, self.arm, self.model = service, arm, model
        self.sendings: list[float] = []

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.model.ready

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request whose client disconnected."""
        self.service.cancel(ticket)

    def sent(self, ticket: Ticket) -> None:
        """Record that the answer was sent, so that the scheduler learns how long sending takes."""
        if ticket.ended is not None:
            self.sendings.append(self.service.clock() - ticket.ended)


class RemoteService(Arms):
    """The models in the engine's process, as the HTTP front sees them.

    Args:
        told: the first state that the engine's process sent.
        sender: the link to it.
        memory: the memory that both share.
    """

    def __init__(self, told: dict[str, Any], sender: link.Link, memory: memoryview) -> None:
        settings: Settings = told["settings"]
        self.settings, self.policy, self.split = settings, settings.policy, settings.split
        self.clock, self.telemetry = time.monotonic, Telemetry()
        self._link, self._memory, self._blocks = sender, memory, link.Blocks(len(memory))
        self._bytes = np.frombuffer(memory, np.uint8)
        self._encode = msgspec.msgpack.Encoder().encode
        self._numbers = itertools.count()
        self._asked: dict[int, _Asked] = {}
        self._outcomes: dict[int, asyncio.Future[bool]] = {}
        self.runners = {arm: RemoteRunner(self, arm, model) for arm, model in told["arms"].items()}
        self.first = next(iter(self.runners.values()))
        self.codec = Codec(self.first.model.reader.request_type)
        self.alive, self.ready = told["alive"], told["ready"]

    def learn(self, told: dict[str, Any]) -> None:
        """Take a new state."""
        self.alive, self.ready = told["alive"], told["ready"]
        for arm, model in told["arms"].items():
            self.runners[arm].model = model

    def submit(self, request: Any, runner: RemoteRunner, *, arrived: float, request_id: str = "") -> Ticket:
        """Send a request to the engine's process; raises FieldError, or Refused if there is no room for it."""
        model = runner.model
        packed = None if self.settings.shadow else model.reader.pack(request)  # a shadow's requests are read there
        arrays = [] if packed is None else packed.arrays
        try:
            tail, size = self._encode(request), sum(array.nbytes for array in arrays)
        except OverflowError as error:  # within a field; those that are one were refused before
            raise FieldError("$", TOO_LARGE) from error
        at = self._blocks.take(size + len(tail))
        if at is None and size + len(tail) > len(self._memory):
            raise Refused(413, "size", f"the request takes {size + len(tail)} bytes as arrays; {len(self._memory)} are expected at most")  # fmt: skip
        if at is None:
            self.telemetry.count("loka_shed_total", model=runner.arm, reason="queue")
            self.telemetry.second()["shed"] += 1
            raise Refused(429, "queue", "the queue is full", retry_after=self.policy.sla)
        self._write(at, arrays, tail)
        number, sla = next(self._numbers), self.policy.sla
        timeout = sla if request.timeout_ms is None else min(sla, request.timeout_ms / 1e3)
        entry = Entry(None, 0, 0, arrived, arrived + timeout, number)
        future = asyncio.get_running_loop().create_future()
        ticket = Ticket(future, Job(request, 0, 0, None), entry=entry)
        self._asked[number] = _Asked(ticket, request, packed, model.reader, at, size + len(tail))
        how = () if packed is None else (packed.units, packed.length, packed.facts)
        self._link.send(
            link.Submit(
                number, runner.arm, model.generation, arrived, request_id, request.timeout_ms, at, size, len(tail), *how
            )
        )
        return ticket

    def _write(self, at: int, arrays: list[Any], tail: bytes) -> None:
        for array in arrays:
            self._bytes[at : at + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
            at += array.nbytes
        self._memory[at : at + len(tail)] = tail

    def cancel(self, ticket: Ticket) -> None:
        """Tell the engine's process that nobody waits for this request any more."""
        if ticket.entry is not None and ticket.entry.number in self._asked:
            self._link.send(link.Cancel(ticket.entry.number))
        ticket.future.cancel()

    def hear(self, frame: Any) -> None:
        """Hand an answer to whoever waits for it, or the reason why there is none; use its memory again."""
        if isinstance(frame, link.Answer):
            self._answer(frame)
        elif isinstance(frame, link.Refusal):
            refused = Refused(frame.status, frame.reason, frame.message, retry_after=frame.retry_after, path=frame.path)
            future = self._outcomes.pop(frame.id, None) or self._forget(frame.id).ticket.future
            if not future.done():
                future.set_exception(refused)
        elif isinstance(frame, link.Released):
            self._forget(frame.id)
        elif not (future := self._outcomes.pop(frame.id)).done():
            future.set_result(frame.new)

    def _answer(self, frame: link.Answer) -> None:
        asked = self._forget(frame.id)
        if asked.ticket.future.done():
            return
        try:
            if frame.raw:
                assert asked.packed is not None  # only packed requests have such answers
                answer = asked.reader.finish(asked.request, asked.packed, frame.data)
            else:
                answer = msgspec.msgpack.decode(frame.data, type=asked.reader.answer_type)
        except Exception as error:
            asked.ticket.future.set_exception(error)
            return
        ticket: Any = asked.ticket
        ticket.model = Arm(frame.name, frame.version, True, 0, asked.reader, {})
        ticket.batch = Batch(Bucket(*frame.bucket), [None] * frame.batch, frame.started, 0.0, frame.started)  # type: ignore[list-item]
        ticket.ended = frame.ended
        ticket.future.set_result(answer)

    def _forget(self, number: int) -> _Asked:
        asked = self._asked.pop(number)
        self._blocks.give(asked.at, asked.size)
        return asked

    def abandon(self) -> None:
        """Tell everybody who waits that the engine's process is gone."""
        self.alive = self.ready = False
        for future in [*(asked.ticket.future for asked in self._asked.values()), *self._outcomes.values()]:
            if not future.done():
                future.set_exception(Refused(503, "engine", "the model's process ended", retry_after=1.0))

    def expose(self, request: Any, request_id: str, runner: Any, *, seconds: float, status: int, empty: bool, simulated: bool) -> None:  # fmt: skip
        """Have the exposure written, once per request id."""
        if self.settings.experiment and (request.user is not None or self.settings.shadow):
            fields = {
                "user": request.user,
                "arm": runner.arm,
                "ms": round(1e3 * seconds, 3),
                "status": status,
                "empty": empty,
                "simulated": simulated,
            }
            self._link.send(link.Exposed(request_id, fields))

    def mirror(self, request: Any, request_id: str, answer: Any) -> None:
        """The engine's process does it."""

    async def write_outcome(self, request_id: str, fields: dict[str, Any]) -> bool:
        """Have the outcome of an answer written; return False if it was written before."""
        number = next(self._numbers)
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._link.send(link.Outcome(number, request_id, fields))
        self._outcomes[number] = future
        return await future

    def report(self) -> None:
        """Send what was counted and learned since the last report."""
        for runner in self.runners.values():
            if runner.sendings:
                self._link.send(link.Sent(runner.arm, runner.sendings))
                runner.sendings = []
        taken = self.telemetry.take()
        if taken:
            self._link.send(link.Counted(taken))


class FrontProcess:
    """The event loop of a front.

    Args:
        sock: socket to the engine's process.
        memory: file descriptor of the memory that both share.
        listening: socket on the public port.
    """

    def __init__(self, sock: socket.socket, memory: int, listening: socket.socket) -> None:
        self.sock, self.memory, self.listening = sock, memory, listening
        self.service: RemoteService | None = None
        self._told: list[dict[str, Any]] = []
        self.orphaned = self.listens = False

    async def serve(self) -> None:
        """Serve until told to stop, or until the engine's process is gone."""
        self._changed, self._stop = asyncio.Event(), asyncio.Event()
        self._link = link.Link(link.TO_FRONT, self._hear, self._lose)
        await asyncio.get_running_loop().create_unix_connection(lambda: self._link, sock=self.sock)
        await self._changed.wait()
        if self._stop.is_set():
            return
        settings: Settings = self._told[0]["settings"]
        log_to_stderr(settings.log_level)
        view = memoryview(mmap.mmap(self.memory, settings.memory))
        self.service = RemoteService(self._told[0], self._link, view)
        for later in self._told[1:]:
            self.service.learn(later)
        tokens = None if settings.token_file is None else Tokens(settings.token_file)
        front = Front(self.service, tokens=tokens, limits=settings.limits, manage=False, verbose=settings.verbose)
        listener = make_listener(front, self.listening, settings.limits, drain=10 * settings.policy.sla + 5)
        gc.collect()
        gc.freeze()
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self.service.measure_lag()), loop.create_task(self._tick(settings.parent, tokens))]
        serving = loop.create_task(listener._serve([self.listening]))
        while not listener.started and not serving.done():
            await asyncio.sleep(0.002)
        if listener.started:
            self.listens = True
            self._link.send(link.Listening(self.service.ready))
        told = loop.create_task(self._stop.wait())
        await asyncio.wait([told, serving], return_when=asyncio.FIRST_COMPLETED)  # a front that serves nobody ends
        told.cancel()
        if self.orphaned:
            listener.config.timeout_graceful_shutdown = ORPHANED
        listener.should_exit = True
        await serving
        for task in tasks:
            task.cancel()
        self.service.report()
        self._link.close()

    async def _tick(self, parent: int, tokens: Tokens | None) -> None:
        assert self.service is not None
        while True:
            await asyncio.sleep(TICK)
            self.service.report()
            if tokens is not None:  # not only when a request comes: all fronts know the same tokens
                tokens.refresh()
            if os.getppid() != parent:  # in case a process that it forked holds its end of the socket
                self._lose()

    def _hear(self, frame: Any) -> None:
        service = self.service
        if isinstance(frame, link.Stop):
            self._stop.set()
            self._changed.set()
        elif isinstance(frame, link.State):
            told = pickle.loads(frame.data)
            if service is None:
                self._told.append(told)
                self._changed.set()
            else:
                service.learn(told)
                if self.listens:
                    self._link.send(link.Listening(service.ready))
        elif service is not None:
            service.hear(frame)

    def _lose(self) -> None:
        """End: the engine's process is gone, or has closed the link."""
        self.orphaned = True
        self._stop.set()
        self._changed.set()
        if self.service is not None:
            self.service.abandon()


def main() -> None:
    """Run a front: `python -c ... SOCKET MEMORY LISTENING`, three file descriptors that the engine's process passed on."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a terminal and some supervisors signal whole groups
        signal.signal(number, signal.SIG_IGN)
    sock, memory, listening = (int(word) for word in sys.argv[1:4])
    ends = socket.socket(fileno=sock), socket.socket(fileno=listening)
    for each in ends:
        each.setblocking(False)
    run_loop(FrontProcess(ends[0], memory, ends[1]).serve())
