"""One model at work: the scheduler, a thread for the engine, and futures for whoever waits.

The engine's thread takes the next batch from the scheduler by itself when one ends, so that a busy event loop never keeps the engine waiting; the loop offers and cancels. Both
hold one lock, for microseconds. Before the first request every bucket is warmed and timed. A new model is put in between two batches: whoever waits is read again
by the new one, with the deadline it had.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loka.serving.queues import Batch, Entry, Policy, Shed
from loka.serving.rehearsal import Turns, check_promise, rehearse
from loka.serving.scheduler import Scheduler
from loka.serving.servable import Job, Servable
from loka.serving.telemetry import LATENCIES, SIZES, Telemetry

log = logging.getLogger("loka.serving")
RECORDED = 32  # requests kept for probing the next model
HUNG = 5.0  # seconds that a batch may take beyond ten times its planned duration


class Refused(Exception):  # noqa: N818 - an answer, not a failure
    """A request that gets no result, and what its client is told.

    Args:
        status: HTTP status.
        reason: one word for machines.
        message: for people.
        retry_after: seconds.
        path: of the field to blame.
    """

    def __init__(
        self, status: int, reason: str, message: str, *, retry_after: float | None = None, path: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message
        self.retry_after, self.path = retry_after, path


@dataclass(eq=False, slots=True)
class Ticket:
    """A request on its way: the future holds the model's answer, or Refused."""

    future: "asyncio.Future[Any]"
    job: Job
    entry: Entry | None = None
    model: Servable | None = None
    batch: Batch | None = None
    ended: float | None = None  # when its batch had run


class Runner:
    """Runs one Servable under a Policy. Public methods but `prepare` are called in the event loop.

    Args:
        model: what runs.
        policy: the promise.
        telemetry: where it is counted.
        arm: the name this model has in the counts.
    """

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
        self.captured = 0  # when it became ready
        self.turn = threading.Lock()  # held while a batch runs
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next: tuple[Servable, Scheduler, asyncio.Future[None]] | None = None
        self._closing = self._stopped = False
        self._seen = 0

    async def start(self) -> None:
        """Warm and time every bucket in the engine's thread; then requests are taken."""
        self._loop = asyncio.get_running_loop()
        warm: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._live, args=(warm,), name=f"loka-{self.arm}", daemon=True).start()
        await warm

    def _live(self, warm: "asyncio.Future[None]") -> None:
        """The engine's thread."""
        try:
            scheduler = self.prepare(self.model, Turns())
        except BaseException as failure:  # told to whoever started it
            self._tell_loop(_settle, warm, None, failure)
            return
        self.captured, self.scheduler = self.model.captures, scheduler
        self._tell_loop(_settle, warm, None, None)
        while (batch := self._take()) is not None:
            answers: list[Any] = []
            error: BaseException | None = None
            try:
                with self.turn:
                    answers = self.model.run(batch.bucket, [entry.job.job for entry in batch.entries])
                if len(answers) != len(batch.entries):
                    raise RuntimeError(f"{len(answers)} answers for {len(batch.entries)} requests")
            except BaseException as caught:  # whoever waits must learn of it; the queue goes on
                error = caught
            with self._changed:
                now = self.clock()
                assert self.scheduler is not None  # set above
                self.scheduler.finish(now=now, learn=error is None)
            self._tell_loop(self._deliver, batch, answers, error, now)

    def _take(self) -> Batch | None:
        """Wait for the next batch; None when the runner is closed."""
        with self._changed:
            while not self._stopped:
                if self._next is not None:
                    self._exchange()
                assert self.scheduler is not None  # the thread is alive
                batch, dropped = self.scheduler.start(now=self.clock())
                if dropped:
                    self._tell_loop(self._drop, dropped)
                if batch is not None:
                    return batch
                self._changed.wait()
        return None

    def _tell_loop(self, what: Callable[..., object], *values: Any) -> None:
        assert self._loop is not None  # started
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(what, *values)

    def prepare(self, model: Servable, turns: Turns) -> Scheduler:
        """A scheduler for a model, warm then, or ValueError where it cannot keep the promise."""
        times = rehearse(model, turns)
        check_promise(model, self.policy, times)
        return Scheduler(model.buckets, policy=self.policy, times=times)

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.scheduler is not None and not self._closing and not self.hung

    @property
    def hung(self) -> bool:
        """Whether a batch has been running for far longer than any before."""
        batch = None if self.scheduler is None else self.scheduler.running
        return batch is not None and self.clock() - batch.started > HUNG + 10 * batch.expected

    @property
    def captured_since_ready(self) -> int:
        """Shapes prepared after the model was ready: zero, or something was missed in warming."""
        return self.model.captures - self.captured if self.scheduler is not None else 0

    def submit(self, request: Any, *, arrived: float) -> Ticket:
        """Queue a request that was decoded; raises Refused, or FieldError where it does not fit the model."""
        if self.scheduler is None:
            raise Refused(503, "warming", "the model is warming up", retry_after=1.0)
        if self._closing:
            raise Refused(503, "draining", "the server is shutting down", retry_after=1.0)
        job = self.model.read(request)
        timeout = self.policy.sla if request.timeout_ms is None else min(self.policy.sla, request.timeout_ms / 1e3)
        ticket = Ticket(asyncio.get_running_loop().create_future(), job, model=self.model)
        with self._changed:
            now, deadline = self.clock(), arrived + timeout
            found = self.scheduler.offer(ticket, now=now, units=job.units, length=job.length, deadline=deadline)
            if isinstance(found, Entry):
                ticket.entry = found
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
            self.recorded.append(request)
        return ticket

    def sent(self, ticket: Ticket) -> None:
        """The answer has left: how long that took is time that the next ones do not have."""
        if self.scheduler is not None and ticket.ended is not None:
            self.scheduler.learn_sending(self.clock() - ticket.ended)

    def cancel(self, ticket: Ticket) -> None:
        """The client went away."""
        with self._changed:
            gone = self.scheduler is not None and ticket.entry is not None and self.scheduler.cancel(ticket.entry)
        if gone:
            self.telemetry.count("loka_cancelled_total", model=self.arm)
        ticket.future.cancel()

    def _drop(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.telemetry.count("loka_dropped_total", model=self.arm)
            _refuse(entry.job, 503, "deadline", "the deadline can no longer be met", retry_after=self.policy.sla)

    def _deliver(self, batch: Batch, answers: Sequence[Any], error: BaseException | None, now: float) -> None:
        if error is None:
            for entry, answer in zip(batch.entries, answers, strict=True):
                ticket = entry.job
                ticket.batch, ticket.ended = batch, now
                if not ticket.future.done():
                    ticket.future.set_result(answer)
        else:
            fields = {"model": self.arm, "bucket": list(batch.bucket), "requests": len(batch.entries)}
            log.error("batch failed", exc_info=error, extra={"fields": fields})
            for entry in batch.entries:
                _refuse(entry.job, 500, "engine", "the model failed; the server's log says why")
        self._tell(batch, now)

    def _tell(self, batch: Batch, now: float) -> None:
        count, observe, arm = self.telemetry.count, self.telemetry.observe, self.arm
        count("loka_batches_total", model=arm, bucket=f"{batch.bucket.units}x{batch.bucket.context}")
        count("loka_units_total", batch.units, model=arm)
        count("loka_padding_total", batch.bucket.units - batch.units, model=arm)
        observe("loka_batch_seconds", now - batch.started, LATENCIES, model=arm)
        observe("loka_batch_units", batch.units, SIZES, model=arm)
        second = self.telemetry.second()
        if len(second["batches"]) < 1000:
            second["batches"].append(batch.units)
        for entry in batch.entries:
            observe("loka_queue_seconds", batch.started - entry.arrived, LATENCIES, model=arm)

    async def swap(self, model: Servable, scheduler: Scheduler) -> None:
        """Put a warm model in place of this one, between two batches."""
        placed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._next is not None:
                raise ValueError("another model is being put in place")
            self._next = (model, scheduler, placed)
            self._changed.notify()
        await placed

    def _exchange(self) -> None:
        assert self._next is not None
        assert self.scheduler is not None
        model, scheduler, placed = self._next
        self._next, waiting = None, self.scheduler.waiting()
        self.model, self.scheduler, self.captured = model, scheduler, model.captures
        for entry in waiting:
            ticket = entry.job
            try:
                ticket.job = model.read(ticket.job.request)
            except ValueError as error:
                told = f"the model was replaced, and the new one cannot read this: {error}"
                self._tell_loop(_refuse, ticket, 503, "reloaded", told)
                continue
            ticket.model = model
            ticket.entry = scheduler.restore(
                ticket, units=ticket.job.units, length=ticket.job.length, arrived=entry.arrived, deadline=entry.deadline
            )
        self._tell_loop(_settle, placed, None, None)

    async def drain(self, timeout: float) -> bool:
        """Take nothing new and finish what is there; False when time ran out."""
        self._closing = True
        end = self.clock() + timeout
        while self.scheduler is not None and (len(self.scheduler) or self.scheduler.running is not None):
            if self.clock() > end:
                return False
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)  # answers that were handed over reach their futures
        return True

    def close(self) -> None:
        """Let the thread go; a batch that hangs is not waited for."""
        with self._changed:
            self._closing = self._stopped = True
            self._changed.notify()


def _settle(future: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if not future.done():
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


def _refuse(ticket: Ticket, status: int, reason: str, message: str, *, retry_after: float | None = None) -> None:
    if not ticket.future.done():
        ticket.future.set_exception(Refused(status, reason, message, retry_after=retry_after))
