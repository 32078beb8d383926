"""The models behind the front (one, or the arms of an experiment), their runners, and reloads.

A reload opens the new bundle while the old one serves, warms and times it, answers recorded requests with it, and only
then swaps it in between two batches. If anything goes wrong, the old model stays and the reason is reported.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from loka.serving.experiment import EventLog, Split, check_arms, overlap
from loka.serving.queues import Policy
from loka.serving.rehearsal import SHORT, Turns, probe
from loka.serving.runner import Refused, Runner, Ticket, Waiting
from loka.serving.servable import Job, Reader, Servable, unseal
from loka.serving.telemetry import Telemetry
from loka.serving.wire import Codec

log = logging.getLogger("loka.serving")
PULSE = 0.01  # seconds between measurements of the event loop's lag
FADE = 0.5  # the factor by which an old one decays
Opener = Callable[[str], Servable]


class Arms:
    """What the HTTP front knows of the models behind it, in this process (`Service`) or in another one.

    `lag` is the recent lag of the event loop in seconds: a request waited about as long before it was read.
    """

    policy: Policy
    split: Split | None
    telemetry: Telemetry
    codec: Codec
    runners: dict[str, Any]  # Runner, or its stand-in in a front process
    first: Any
    clock: Callable[[], float]
    ready: bool
    alive: bool
    lag = 0.0

    def runner_for(self, name: str) -> Any:
        """Return the runner of a model by its name or arm."""
        for arm, runner in self.runners.items():
            if name in (arm, runner.model.name):
                return runner
        raise Refused(404, "model", f"there is no model {name[:80]!r}; there are {', '.join(self.runners)}")

    def choose(self, request: Any) -> Any:
        """Return the runner of the user's arm."""
        if self.split is None:
            return self.first
        if request.user is None:
            raise Refused(400, "field", "an experiment is running: give the id of the user", path="$.user")
        return self.runners[self.split.arm(request.user)]

    def submit(self, request: Any, runner: Any, *, arrived: float, request_id: str = "") -> Ticket:
        """Queue a request; raises Refused."""
        raise NotImplementedError

    def expose(self, request: Any, request_id: str, runner: Any, *, seconds: float, status: int, empty: bool, simulated: bool) -> None:  # fmt: skip
        """Write the exposure, once per request id."""
        raise NotImplementedError

    def mirror(self, request: Any, request_id: str, answer: Any) -> None:
        """In shadow mode, also run the request in the second arm."""
        raise NotImplementedError

    async def write_outcome(self, request_id: str, fields: dict[str, Any]) -> bool:
        """Write the outcome of an answer; return False if it was written before. Raises Refused without an experiment."""
        raise NotImplementedError

    async def measure_lag(self) -> None:
        """Keep `lag` up to date. Deadlines include the time that requests wait in the socket of a busy machine.

        What stopped the loop before the models were ready, as warming and collecting garbage do, kept no request waiting.
        """
        while True:
            before, served = self.clock(), self.ready
            await asyncio.sleep(PULSE)
            self.lag = max(0.0, self.clock() - before - PULSE, FADE * self.lag) if served else 0.0


class Service(Arms):
    """Run and reload one model, or the arms of an experiment.

    Args:
        models: arm -> model, or one model.
        policy: the SLA and its settings, for every arm.
        opener: opens a model from a bundle's folder, for reloads.
        split: split of the users over the arms; several models need it, or `shadow`.
        events: log of exposures and outcomes.
        shadow: also run every request in the second arm, without returning its answers.
        clock: a monotonic clock.

    Example:
        >>> service = Service(open_model("runs/onerec"), policy=Policy(sla=0.05))       # doctest: +SKIP
    """

    def __init__(
        self,
        models: Servable | dict[str, Servable],
        *,
        policy: Policy,
        opener: Opener | None = None,
        split: Split | None = None,
        events: EventLog | None = None,
        shadow: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        arms: dict[str, Servable] = models if isinstance(models, dict) else {models.name: models}
        check_arms(tuple(arms), split=split, shadow=shadow)
        if len({model.request_type for model in arms.values()}) > 1:
            raise ValueError("the arms read different requests: compare generative models, or rankers")
        self.policy, self.opener, self.split, self.events, self.shadow, self.clock = (
            policy, opener, split, events, shadow, clock,
        )  # fmt: skip
        self.telemetry = Telemetry(clock)
        self.runners = {
            arm: Runner(m, policy, telemetry=self.telemetry, arm=arm, clock=clock) for arm, m in arms.items()
        }
        self.first = next(iter(self.runners.values()))
        self.codec = Codec(self.first.model.request_type)
        self.failed: str | None = None
        self._loading = threading.Lock()
        self._opening = False  # whether the loader's thread is inside a new model
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="loka-loader")
        self._shadows: set[asyncio.Task[None]] = set()
        self._pulse: asyncio.Task[None] | None = None
        self._register_gauges()

    def _register_gauges(self) -> None:
        arms = self.runners

        def each(read: Callable[[Runner], float]) -> Callable[[], dict[Any, float]]:
            return lambda: {(("model", arm),): float(read(runner)) for arm, runner in arms.items()}

        watch = self.telemetry.watch
        watch("loka_queue_requests", each(lambda r: 0 if r.scheduler is None else len(r.scheduler)))
        watch("loka_captures", each(lambda r: r.model.captures))
        watch("loka_captures_after_ready", each(lambda r: r.captured_since_ready))
        watch("loka_ready", each(lambda r: r.ready))
        watch(
            "loka_model_info",
            lambda: {
                (("model", a), ("name", r.model.name), ("version", r.model.version)): 1.0 for a, r in arms.items()
            },
        )

    @property
    def ready(self) -> bool:  # type: ignore[override]
        """Whether every arm accepts requests."""
        return all(runner.ready for runner in self.runners.values())

    @property
    def alive(self) -> bool:  # type: ignore[override]
        """Whether every model started and no engine hangs."""
        return self.failed is None and not any(runner.hung for runner in self.runners.values())

    async def start(self) -> None:
        """Warm every arm, one after the other; a failure is stored in `failed` and raised."""
        self._pulse = asyncio.get_running_loop().create_task(self.measure_lag())
        try:
            for runner in self.runners.values():
                await runner.start()
                log.info("ready", extra={"fields": self.describe_runner(runner)})
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"
            raise

    def describe_runner(self, runner: Runner) -> dict[str, Any]:
        """Return model, caps and batch times, for logs and the live page."""
        scheduler = runner.scheduler
        assert scheduler is not None  # started
        return {
            "model": runner.model.name,
            "version": runner.model.version,
            "sla_ms": 1e3 * self.policy.sla,
            "caps": {str(context): scheduler.cap(context) for context in scheduler.contexts},
            "batch_ms": {
                f"{b.units}x{b.context}": round(1e3 * scheduler.times.quantile(b, self.policy.quantile), 3)
                for b in scheduler.buckets
            },
            "captures": runner.model.captures,
        }

    def submit(
        self,
        request: Any,
        runner: Runner,
        *,
        arrived: float,
        request_id: str = "",
        read: tuple[Servable, Job] | None = None,
        future: Waiting | None = None,
    ) -> Ticket:
        """Queue a request; raises Refused. `read` and `future` as in `Runner.submit`; the id is for other processes."""
        if self.failed is not None:
            raise Refused(503, "failed", f"the model could not be started: {self.failed}")
        return runner.submit(request, arrived=arrived, read=read, future=future)

    def expose(
        self,
        request: Any,
        request_id: str,
        runner: Runner,
        *,
        seconds: float,
        status: int,
        empty: bool,
        simulated: bool,
    ) -> None:
        """Write the exposure, once per request id."""
        assigned = self.split is not None and request.user is not None  # else an arm was asked for by its name
        if self.events is not None and (assigned or self.shadow):
            self.events.write(
                "exposure", request_id, user=request.user, arm=runner.arm, ms=round(1e3 * seconds, 3), status=status,
                empty=empty, simulated=simulated,
            )  # fmt: skip

    def mirror(self, request: Any, request_id: str, answer: Any) -> None:
        """In shadow mode, also run the request in the second arm, in the background; skipped if that arm sheds it."""
        if not self.shadow:
            return
        task = asyncio.get_running_loop().create_task(self._mirror(request, request_id, answer))
        self._shadows.add(task)
        task.add_done_callback(self._shadows.discard)

    async def write_outcome(self, request_id: str, fields: dict[str, Any]) -> bool:
        """Write the outcome of an answer; return False if it was written before."""
        if self.events is None:
            raise Refused(404, "path", "no experiment is running, outcomes are not recorded")
        return self.events.write("outcome", request_id, **fields)

    async def _mirror(self, request: Any, request_id: str, answer: Any) -> None:
        runner, begin = list(self.runners.values())[1], self.clock()
        try:
            ticket = runner.submit(request, arrived=begin)
            async with asyncio.timeout(10 * self.policy.sla + 1):
                other = await ticket.future
        except (Refused, ValueError, TimeoutError) as error:
            fields: dict[str, Any] = {"refused": str(error)[:200]}
        else:
            fields = {"overlap": overlap(_items(answer), _items(other)), "empty": other.empty}
        if self.events is not None:
            self.events.write("shadow", request_id, arm=runner.arm, ms=round(1e3 * (self.clock() - begin), 3), **fields)

    async def reload(self, arm: str, folder: str) -> dict[str, Any]:
        """Replace the model of an arm by that of a folder.

        Args:
            arm: the arm whose model is replaced.
            folder: folder of the new bundle.

        Returns:
            Name, version and batch times of the new model.

        Raises:
            ValueError: the old model stays; the message says why.
        """
        runner = self.runner_for(arm)
        if self.opener is None:
            raise ValueError("this server was started from models in memory and has no opener to reload with")
        if not self._loading.acquire(blocking=False):
            log.warning("reload refused", extra={"fields": {"folder": folder, "error": "a reload is under way"}})
            raise ValueError("a reload is under way")
        try:
            loop = asyncio.get_running_loop()
            recorded = [unseal(request) for request in runner.recorded]
            model, scheduler = await loop.run_in_executor(self._loader, self._open, runner, folder, recorded)
            await runner.swap(model, scheduler)
        except Exception as error:
            self.telemetry.count("loka_reloads_total", model=runner.arm, result="refused")
            log.warning("reload refused", extra={"fields": {"folder": folder, "error": str(error)}})
            raise ValueError(f"{folder}: not loaded, the old model stays: {error}") from error
        finally:
            self._loading.release()
        self.telemetry.count("loka_reloads_total", model=runner.arm, result="done")
        return self.describe_runner(runner)

    async def reload_all(self, folders: Mapping[str, str]) -> None:
        """Reload every arm. A failure is logged by `reload`, and that arm keeps its old model."""
        for arm, folder in folders.items():
            with contextlib.suppress(ValueError):
                await self.reload(arm, folder)

    def _open(self, runner: Runner, folder: str, recorded: Sequence[Any]) -> Any:
        self._opening = True
        try:
            return self._prepare(runner, folder, recorded)
        finally:
            self._opening = False

    def _prepare(self, runner: Runner, folder: str, recorded: Sequence[Any]) -> Any:
        assert self.opener is not None  # checked by reload
        model = self.opener(folder)
        if model.request_type is not runner.model.request_type:
            raise ValueError(
                f"it reads {model.request_type.__name__}, the old model {runner.model.request_type.__name__}"
            )
        if isinstance(getattr(runner.model, "reader", None), Reader) and not isinstance(getattr(model, "reader", None), Reader):  # fmt: skip
            raise ValueError("it has no `reader` for front processes, the old model has one; hint: loka.serving.Reader")
        turns = Turns([each.turn for each in self.runners.values()], longest=min(SHORT, self.policy.sla / 10))
        scheduler = runner.prepare(model, turns)
        if wrong := probe(model, recorded, turns):
            raise ValueError(
                f"problems with recorded requests: {'; '.join(wrong[:3])}{'; and others' * (len(wrong) > 3)}"
            )
        return model, scheduler

    async def drain(self, timeout: float) -> bool:
        """Stop accepting requests and finish those that wait, in every arm; return False if time ran out."""
        done = await asyncio.gather(*(runner.drain(timeout) for runner in self.runners.values()))
        return all(done)

    def close(self) -> None:
        """Stop the threads and close the event log."""
        if self._pulse is not None:
            self._pulse.cancel()
        for runner in self.runners.values():
            runner.close()
        self._loader.shutdown(wait=False, cancel_futures=True)
        if self.events is not None:
            self.events.close()

    @property
    def busy(self) -> bool:
        """After `close`: whether a thread is still inside a model. It would abort the end of the process, or delay it."""
        return self._opening or any(runner.busy for runner in self.runners.values())


def _items(answer: Any) -> list[Any]:
    return list(getattr(answer, "items", None) or getattr(answer, "rows", None) or [])
