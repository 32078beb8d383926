"""Batches of requests that arrive one by one, as large as a latency bound allows.

A generation is a handful of steps, so requests join between generations, not between steps: whoever arrives while a batch runs is in the next one. A
batch is due when

    it is full, or
    waiting longer would make its oldest request late:  waited + predicted time of its bucket >= bound

and it takes, oldest first, as many requests as keep the oldest within the bound: the time of every bucket is measured as it runs. When the bound is lost
already, as many as fit, because throughput is what catches up. Latencies are told by the tickets; a bound that was missed is not hidden.

A cancelled request leaves the queue; one whose batch is running already is finished with it and its result is thrown away. Others never notice.
"""

import threading
import time
from collections.abc import Callable

from loka.inference.config import choose_bucket
from loka.inference.engine import Bucket, Engine
from loka.inference.request import Recommendation, Request, check_request

SMOOTHING = 0.3  # weight of the newest measurement in a bucket's predicted time


class CancelledRequestError(RuntimeError):
    """The result of a request that was cancelled."""


class Ticket:
    """A place in the queue, and later the result."""

    def __init__(self, request: Request, arrived: float) -> None:
        self.request, self.arrived = request, arrived
        self.finished: float | None = None
        self.cancelled = False
        self._done = threading.Event()
        self._found: Recommendation | None = None
        self._error: Exception | None = None

    def cancel(self) -> bool:
        """Give up the request; False when its result is there already."""
        if self._done.is_set():
            return False
        self.cancelled = True
        self._done.set()
        return True

    @property
    def done(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return self._done.is_set()

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to result."""
        return None if self.finished is None else self.finished - self.arrived

    def result(self, timeout: float | None = None) -> Recommendation:
        """The recommendation; waits for it."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"no result within {timeout} s")
        if self.cancelled:
            raise CancelledRequestError("the request was cancelled")
        if self._error is not None:
            raise self._error
        assert self._found is not None  # done, not cancelled, no error
        return self._found

    def _finish(self, found: Recommendation | None, error: Exception | None, now: float) -> None:
        if not self._done.is_set():
            self._found, self._error, self.finished = found, error, now
            self._done.set()


class Batcher:
    """Collects requests and runs them. `step` runs a batch when one is due; `start` does so in a thread until `close`."""

    def __init__(self, engine: Engine, *, latency: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not latency > 0:
            raise ValueError(f"latency={latency}: the bound is a positive number of seconds")
        self.engine, self.latency, self.clock = engine, latency, clock
        self.batches: list[tuple[Bucket, int, float]] = []  # bucket, requests, seconds of every batch run
        self._times: dict[Bucket, float] = {}
        self._queue: list[Ticket] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(self, request: Request) -> Ticket:
        """Queue a request; one that does not fit the model raises here and disturbs nobody."""
        check_request(request, self.engine.model_config, 0)
        with self._changed:
            if self._closing:
                raise ValueError("the batcher is closed")
            ticket = Ticket(request, self.clock())
            self._queue.append(ticket)
            self._changed.notify()
        return ticket

    def step(self, *, flush: bool = False) -> int:
        """Run one batch if one is due, or any with `flush`; returns how many requests it finished."""
        with self._changed:
            batch = self._take(flush)
        if not batch:
            return 0
        bucket = self.engine.bucket_for([ticket.request for ticket in batch])
        begin = self.clock()
        try:
            found: list[Recommendation] = self.engine.generate([ticket.request for ticket in batch])
        except Exception as error:  # whoever waits must learn of it; the queue goes on
            for ticket in batch:
                ticket._finish(None, error, self.clock())
            return len(batch)
        now = self.clock()
        self._learn(bucket, now - begin, len(batch))
        for ticket, result in zip(batch, found, strict=True):
            ticket._finish(result, None, now)
        return len(batch)

    def _take(self, flush: bool) -> list[Ticket]:
        self._queue = [ticket for ticket in self._queue if not ticket.cancelled]
        if not self._queue:
            return []
        largest = max(r for r, _ in self.engine.buckets)
        waited = self.clock() - self._queue[0].arrived
        size = min(len(self._queue), largest)
        if not flush and size < largest and waited + self._predict(size) < self.latency:
            return []
        fitting = [n for n in range(1, size + 1) if waited + self._predict(n) <= self.latency]
        size = max(fitting) if fitting else size
        batch, self._queue = self._queue[:size], self._queue[size:]
        return batch

    def _predict(self, count: int) -> float:
        """Seconds for the first `count` of the queue; a bucket not run yet is taken to cost what the largest known smaller one does."""
        longest = max(t.request.history.shape[0] for t in self._queue[:count])
        bucket = choose_bucket(self.engine.buckets, count, longest)
        known = [seconds for (r, s), seconds in self._times.items() if r <= bucket[0] and s <= bucket[1]]
        return self._times.get(bucket, max(known, default=0.0))

    def _learn(self, bucket: Bucket, seconds: float, count: int) -> None:
        self.batches.append((bucket, count, seconds))
        old = self._times.get(bucket)
        self._times[bucket] = seconds if old is None else old + SMOOTHING * (seconds - old)

    def start(self) -> "Batcher":
        """Serve in a thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="loka-batcher", daemon=True)
            self._thread.start()
        return self

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if self._closing and not self._queue:
                    return
                if not self._closing:
                    waited = self.clock() - self._queue[0].arrived
                    size = min(len(self._queue), max(r for r, _ in self.engine.buckets))
                    spare = self.latency - waited - self._predict(size)
                    if spare > 0 and size < max(r for r, _ in self.engine.buckets):
                        self._changed.wait(spare)
            self.step(flush=self._closing)

    def close(self) -> None:
        """Finish what is queued, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        else:
            while self.step(flush=True):
                pass

    def __enter__(self) -> "Batcher":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
