"""Run one model: its scheduler, its engine thread, and the futures of waiting requests.

When a batch ends, the engine thread takes the next one from the scheduler itself, so that a busy event loop never keeps
the engine waiting; the loop only submits and cancels. Both hold one lock, for microseconds. Every bucket is warmed and
timed before the first request. A new model is swapped in between two batches: waiting requests are read again by the
new model and keep their deadlines.

Where the model allows it (`ahead`, see Servable), two batches are in flight, and one thread suffices: it lays out a
batch and queues it on the device while the one before runs there, then waits for that one. The device begins the next
batch by itself, and has 2.3 ms of work in hand while the thread hands answers over and lays out another (0.7 ms).

    thread   lay out 2 | wait for 1 | lay out 3 | wait for 2 | lay out 4 | ...
    device   1 ....................... 2 ....................... 3 ......

Batches end in the order in which they were handed out, also one that could not be launched: it fails alone, when its
turn comes. A new model waits until nothing is in flight, and so does a run that rehearses it.
"""

import asyncio
import contextlib
import gc
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

from loka.serving.queues import Batch, Entry, Policy, Shed
from loka.serving.rehearsal import Turn, Turns, check_promise, rehearse
from loka.serving.scheduler import Scheduler
from loka.serving.servable import Job, Sealed, Servable, unseal
from loka.serving.telemetry import LATENCIES, SIZES, Telemetry

log = logging.getLogger("loka.serving")
RECORDED = 32  # requests kept for probing the next model
HUNG = 5.0  # seconds that a batch may take beyond ten times its planned duration


class Refused(Exception):  # noqa: N818 - an answer, not a failure
    """A request that gets no result, and the response to its client.

    Args:
        status: HTTP status.
        reason: machine-readable reason, one word.
        message: human-readable message.
        retry_after: seconds after which to retry.
        path: path of the invalid field.

    Example:
        >>> Refused(429, "queue", "the queue is full", retry_after=0.5).status
        429
    """

    def __init__(
        self, status: int, reason: str, message: str, *, retry_after: float | None = None, path: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message
        self.retry_after, self.path = retry_after, path


class Waiting(Protocol):
    """Whoever waits for an answer: an asyncio.Future, or a front in another process."""

    def done(self) -> bool:
        """Return True if there is an answer already."""
        ...

    def set_result(self, answer: Any, /) -> None:
        """Take the model's answer."""
        ...

    def set_exception(self, error: BaseException, /) -> None:
        """Take the reason why there is none."""
        ...

    def cancel(self) -> bool:
        """Stop waiting."""
        ...


@dataclass(eq=False, slots=True)
class Ticket:
    """A submitted request. Its future resolves to the model's answer, or raises Refused."""

    future: Any  # Waiting; in the process that answers the client, an asyncio.Future
    job: Job
    entry: Entry | None = None
    model: Servable | None = None
    batch: Batch | None = None
    ended: float | None = None  # when its batch ended


class Runner:
    """Run one Servable under a Policy. All public methods except `prepare` are called in the event loop."""

    def __init__(
        self,
        model: Servable,
        policy: Policy,
        *,
        telemetry: Telemetry | None = None,
        arm: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.policy, self.clock = model, policy, clock
        self.telemetry = telemetry or Telemetry(clock)
        self.arm = arm or model.name
        self.recorded: deque[Any] = deque(maxlen=RECORDED)
        self.scheduler: Scheduler | None = None
        self.captured = 0  # captures of the model when it became ready
        self.generation = 0  # how often the model was replaced
        self.turn = Turn()  # of the engine while batches are in flight
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: threading.Thread | None = None
        self._next: tuple[Servable, Scheduler, asyncio.Future[None]] | None = None
        self._closing = self._stopped = False
        self._seen = 0

    async def start(self) -> None:
        """Start the engine thread, warm and time every bucket there, and then accept requests."""
        self._loop = asyncio.get_running_loop()
        warm: asyncio.Future[None] = self._loop.create_future()
        self._engine = threading.Thread(target=self._run_engine, args=(warm,), name=f"loka-{self.arm}", daemon=True)
        self._engine.start()
        await warm

    def _run_engine(self, warm: "asyncio.Future[None]") -> None:
        """Prepare the model, then run batches until closed. The target of the engine thread."""
        try:
            scheduler = self.prepare(self.model, Turns())
        except BaseException as failure:  # raised in `start`
            self._call_in_loop(_settle, warm, None, failure)
            return
        settle_heap()
        self.captured, self.scheduler = self.model.captures, scheduler
        self._call_in_loop(_settle, warm, None, None)
        flying: deque[tuple[Batch, Callable[[], Iterable[Any]]]] = deque()
        following: Batch | None = None
        while not self._stopped:
            following = following or self._wait_for_batch(busy=bool(flying))
            if following is not None:
                if not flying:
                    self.turn.take()
                flying.append((following, self._launch(following)))
                following = None
            elif flying:
                following = self._end_batch(*flying.popleft())
                if not flying:
                    self.turn.give()

    def _launch(self, batch: Batch) -> Callable[[], Iterable[Any]]:
        """Queue a batch on the device, if the model can; return what waits for its end and returns the answers."""
        model: Any = self.model
        jobs = [entry.job.job for entry in batch.entries]
        assert self.scheduler is not None  # set before the first call
        if not self.scheduler.ahead:
            return partial(model.run, batch.bucket, jobs)
        since = self.clock()
        try:
            collect: Callable[[], Iterable[Any]] = model.launch(batch.bucket, jobs)
        except BaseException as error:
            collect = partial(_raise, error)
        with self._changed:
            self.scheduler.launched(now=self.clock(), since=since)
        return collect

    def _end_batch(self, batch: Batch, collect: Callable[[], Iterable[Any]]) -> Batch | None:
        """Wait for the end of a batch and hand its answers over; return the next one to launch, if there is one.

        The next batch is taken in the same breath in which this one ends: in between, an engine that seems idle with a
        long queue makes every admission a simulation.
        """
        answers: Iterable[Any] = ()
        error: BaseException | None = None
        try:
            answers = collect()
        except BaseException as caught:  # passed to the waiting requests; the engine goes on
            error = caught
        with self._changed:
            now = self.clock()
            assert self.scheduler is not None  # set before the first call
            self.scheduler.finish(now=now, learn=error is None)
            following = self._take_batch()
        self._call_in_loop(self._deliver, batch, answers, error, now)
        return following

    def _wait_for_batch(self, *, busy: bool) -> Batch | None:
        """Wait for the next batch; return None when the runner is closed, or if busy when it is time to end another.

        Holds no batch, whose requests refer to a model.
        """
        with self._changed:
            while not self._stopped:
                if (batch := self._take_batch()) is not None:
                    return batch
                assert self.scheduler is not None  # set before the first call
                wait = self.scheduler.delay(now=self.clock()) if busy else None
                if wait is not None and not 0 < wait < math.inf:
                    return None
                self._changed.wait(wait)
        return None

    def _take_batch(self) -> Batch | None:
        """Return the next batch, if it is time and requests wait. Called by the engine thread, locked."""
        assert self.scheduler is not None  # set before the first call
        if self._stopped or (self.scheduler.flying and (self._next is not None or self.turn.guests)):
            return None
        if self._next is not None:
            self._swap_in()
        batch, dropped = self.scheduler.start(now=self.clock())
        if dropped:
            self._call_in_loop(self._refuse_dropped, dropped)
        return batch

    def _call_in_loop(self, what: Callable[..., object], *values: Any) -> None:
        assert self._loop is not None  # set by start
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits any more
            self._loop.call_soon_threadsafe(what, *values)

    def prepare(self, model: Servable, turns: Turns) -> Scheduler:
        """Warm a model and return a scheduler for it, or raise ValueError if it cannot meet the SLA."""
        times = rehearse(model, turns)
        check_promise(model, self.policy, times)
        return Scheduler(model.buckets, policy=self.policy, times=times, ahead=getattr(model, "ahead", False))

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.scheduler is not None and not self._closing and not self.hung

    @property
    def hung(self) -> bool:
        """Whether a batch has been running for far longer than planned."""
        batch = None if self.scheduler is None else self.scheduler.running
        return batch is not None and self.clock() - batch.begun > HUNG + 10 * batch.expected

    @property
    def captured_since_ready(self) -> int:
        """The number of shapes prepared after the model was ready. If not zero, warming missed some."""
        return self.model.captures - self.captured if self.scheduler is not None else 0

    def submit(
        self,
        request: Any,
        *,
        arrived: float,
        read: tuple[Servable, Job] | None = None,
        future: Waiting | None = None,
    ) -> Ticket:
        """Queue a decoded request. Raises Refused if it is not admitted, FieldError if it does not fit the model.

        Args:
            request: the request, or what a front sealed of it.
            arrived: when it arrived, on this runner's clock.
            read: the job that a front made of it, and the model for which it did; default: the model reads it here.
            future: whoever waits for the answer; default: a future of this event loop.
        """
        if self.scheduler is None:
            raise Refused(503, "warming", "the model is warming up", retry_after=1.0)
        if self._closing:
            raise Refused(503, "draining", "the server is shutting down", retry_after=1.0)
        model = self.model
        model, job = read or (model, model.read(request))
        timeout = self.policy.sla if request.timeout_ms is None else min(self.policy.sla, request.timeout_ms / 1e3)
        ticket = Ticket(future or asyncio.get_running_loop().create_future(), job, model=model)
        with self._changed:
            if model is not self.model:  # replaced since it was read
                ticket.model, ticket.job = self.model, (job := self.model.read(unseal(request)))
            now, deadline = self.clock(), arrived + timeout
            found = self.scheduler.offer(ticket, now=now, units=job.units, length=job.length, deadline=deadline)
            if isinstance(found, Entry):
                ticket.entry = found
                if not self.scheduler.flying:  # else the engine thread looks by itself, in time
                    self._changed.notify()
        if isinstance(found, Shed):
            self.telemetry.count("loka_shed_total", model=self.arm, reason=found.reason)
            self.telemetry.second()["shed"] += 1
            words = {
                "late": "would be answered too late",
                "others": "would make others late",
                "queue": "the queue is full",
            }
            raise Refused(429, found.reason, words[found.reason], retry_after=found.retry_after)
        self._seen += 1
        if self._seen % 16 == 1:
            self.recorded.append(request.keep() if isinstance(request, Sealed) else request)
        return ticket

    def sent(self, ticket: Ticket) -> None:
        """Record that the answer was sent, so that the scheduler learns how long sending takes."""
        if self.scheduler is not None and ticket.ended is not None:
            self.scheduler.margins.learn_sending(self.clock() - ticket.ended)

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request whose client disconnected."""
        with self._changed:
            gone = self.scheduler is not None and ticket.entry is not None and self.scheduler.cancel(ticket.entry)
        if gone:
            self.telemetry.count("loka_cancelled_total", model=self.arm)
        ticket.future.cancel()

    def _refuse_dropped(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.telemetry.count("loka_dropped_total", model=self.arm)
            _refuse(entry.job, 503, "deadline", "the deadline can no longer be met", retry_after=self.policy.sla)

    def _deliver(self, batch: Batch, answers: Iterable[Any], error: BaseException | None, now: float) -> None:
        """Take the answers, while the engine runs the next batch, and hand them to the requests that wait."""
        try:
            if error is not None:
                raise error
            for entry, answer in zip(batch.entries, answers, strict=True):
                ticket = entry.job
                ticket.batch, ticket.ended = batch, now
                if not ticket.future.done():
                    ticket.future.set_result(answer)
        except BaseException as failure:  # of the model, or of one of its answers: those without an answer are told
            fields = {"model": self.arm, "bucket": list(batch.bucket), "requests": len(batch.entries)}
            log.error("batch failed", exc_info=failure, extra={"fields": fields})
            for entry in batch.entries:
                _refuse(entry.job, 500, "engine", "the model failed; the server's log says why")
        self._record_metrics(batch, now)

    def _record_metrics(self, batch: Batch, now: float) -> None:
        count, observe, arm = self.telemetry.count, self.telemetry.observe, self.arm
        count("loka_batches_total", model=arm, bucket=f"{batch.bucket.units}x{batch.bucket.context}")
        count("loka_units_total", batch.units, model=arm)
        count("loka_padding_total", batch.bucket.units - batch.units, model=arm)
        observe("loka_batch_seconds", now - batch.begun, LATENCIES, model=arm)
        observe("loka_batch_units", batch.units, SIZES, model=arm)
        second = self.telemetry.second()
        if len(second["batches"]) < 1000:
            second["batches"].append(batch.units)
        for entry in batch.entries:
            observe("loka_queue_seconds", batch.started - entry.arrived, LATENCIES, model=arm)

    async def swap(self, model: Servable, scheduler: Scheduler) -> None:
        """Replace the model by a warm one, between two batches."""
        placed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._next is not None:
                raise ValueError("another model is being swapped in")
            self._next = (model, scheduler, placed)
            self._changed.notify()
        await placed

    def _swap_in(self) -> None:
        """Replace model and scheduler, and queue the waiting requests again. Called by the engine thread, locked."""
        assert self._next is not None
        assert self.scheduler is not None
        model, scheduler, placed = self._next
        self._next, waiting = None, self.scheduler.waiting()
        self.generation += 1  # first: who reads the model and then this number must not take the new one for the old
        self.model, self.scheduler, self.captured = model, scheduler, model.captures
        for entry in waiting:
            ticket = entry.job
            try:
                ticket.job = model.read(unseal(ticket.job.request))
            except ValueError as error:
                told = f"the model was replaced, and the new one cannot read this: {error}"
                self._call_in_loop(_refuse, ticket, 503, "reloaded", told)
                continue
            ticket.model = model
            ticket.entry = scheduler.restore(
                ticket, units=ticket.job.units, length=ticket.job.length, arrived=entry.arrived, deadline=entry.deadline
            )
        self._call_in_loop(_settle, placed, None, None)

    async def drain(self, timeout: float) -> bool:
        """Stop accepting requests and finish those that wait; return False if time ran out."""
        self._closing = True
        end = self.clock() + timeout
        while self.scheduler is not None and (len(self.scheduler) or self.scheduler.running is not None):
            if self.clock() > end:
                return False
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)  # let answers that were handed over reach their futures
        return True

    def close(self) -> None:
        """Stop the engine thread, without waiting for a running batch."""
        with self._changed:
            self._closing = self._stopped = True
            self._changed.notify()

    @property
    def busy(self) -> bool:
        """After `close`: whether the engine thread is still inside the model, which cannot be interrupted."""
        if self._engine is None:
            return False
        self._engine.join(0.1)
        return self._engine.is_alive()


def settle_heap() -> None:
    """Collect garbage, and exempt all that is left, weights and caches that stay, from later collections.

    Called before the model is ready: over the heap of a compiled model one collection stops every thread for tenths of a
    second.
    """
    gc.collect()
    gc.freeze()


def _settle(future: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if not future.done():
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


def _refuse(ticket: Ticket, status: int, reason: str, message: str, *, retry_after: float | None = None) -> None:
    if not ticket.future.done():
        ticket.future.set_exception(Refused(status, reason, message, retry_after=retry_after))


def _raise(error: BaseException) -> NoReturn:
    raise error
