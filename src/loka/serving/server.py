"""The server: public port, admin port, signals, logs; one process, or with `fronts` several that do the HTTP.

    Server(open_model("runs/onerec"), sla=0.05, port=8000).run()

    with Server(model, sla=0.05, port=0).background() as server:         # in a thread, for notebooks and tests
        server.url

It binds to localhost by default, and to another address only with tokens. SIGTERM and SIGINT drain: no new connections
are accepted, waiting requests are answered, then the process exits. SIGHUP reloads the folders it was started from.
"""

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loka.serving.admin import Admin
from loka.serving.call import Limits
from loka.serving.experiment import Split, open_log
from loka.serving.front import Front
from loka.serving.listener import bind, is_local, make_listener
from loka.serving.queues import Policy
from loka.serving.servable import Servable
from loka.serving.service import Opener, Service
from loka.serving.tokens import Tokens

log = logging.getLogger("loka.serving")
LOGS = ("loka.serving", "uvicorn.error")  # the second tells of requests that are not HTTP, and of answers cut off
SWITCH = 0.0001  # thread switch interval in seconds; each call of torch gives the lock away and waits that long for it


class Server:
    """Serve models over HTTP.

    Args:
        models: one model, or arm -> model for an experiment.
        sla: seconds from arrival to answer.
        host, port: public address; port 0 takes a free one.
        admin_host, admin_port: address of metrics, live page and reload; port None: no admin port.
        token_file: file of bearer tokens; required for an address that other machines can reach.
        split, events: an experiment, and the folder of its events.
        shadow: also run the second model, without returning its answers.
        folders: arm -> folder that it was opened from, for SIGHUP.
        opener: opens a model from a folder, for reloads.
        limits: limits on what clients may use.
        policy: finer settings instead of `sla`.
        verbose: log every answer.
        fronts: processes that speak HTTP, decode requests and encode answers; 0: this process does it.

    Example:
        >>> Server(open_model("runs/onerec"), sla=0.05).run()                      # doctest: +SKIP
    """

    def __init__(
        self,
        models: Servable | dict[str, Servable],
        *,
        sla: float | None = None,
        host: str = "127.0.0.1",
        port: int = 8000,
        admin_host: str = "127.0.0.1",
        admin_port: int | None = None,
        token_file: str | Path | None = None,
        split: Split | None = None,
        events: str | Path | None = None,
        shadow: bool = False,
        folders: Mapping[str, str] | None = None,
        opener: Opener | None = None,
        limits: Limits | None = None,
        policy: Policy | None = None,
        verbose: bool = False,
        fronts: int = 0,
    ) -> None:
        if (sla is None) == (policy is None):
            raise ValueError("give sla, in seconds, or a policy, exactly one of them")
        for name, address in (("host", host), ("admin_host", admin_host)):
            if not is_local(address) and token_file is None:
                raise ValueError(
                    f"{name} {address} can be reached by others: that needs a token; hint: --token-file FILE"
                )
        if port and port == admin_port:  # both could be bound: with SO_REUSEADDR only listening tells
            raise ValueError(f"port {port} is given twice, for requests and for the operator; hint: --admin-port")
        if policy is None:
            assert sla is not None  # checked above
            # with 2 ms, 0.9 % of the answers were late at twice the capacity
            policy = Policy(sla=sla, reserve=min(0.003, sla / 10))
        names = tuple(models) if isinstance(models, dict) else (models.name,)
        if (split is not None or shadow) and events is None:
            raise ValueError("an experiment needs a folder for its events; hint: --events DIR")
        if events is not None and split is None and not shadow:
            raise ValueError(f"{events}: there are no events without an experiment; hint: --split 95,5 --salt NAME, or --shadow")  # fmt: skip
        written = open_log(events, names, split)
        self.service = Service(models, policy=policy, opener=opener, split=split, events=written, shadow=shadow)
        self.limits = limits or Limits()
        tokens = None if token_file is None else Tokens(token_file)
        self.front = Front(self.service, tokens=tokens, limits=self.limits, manage=False, verbose=verbose)
        self._fronts: Any = None
        if fronts:
            from loka.serving.fronts import Fronts

            self._fronts = Fronts(self.service, fronts, limits=self.limits, token_file=token_file, verbose=verbose)
        self.admin = Admin(self.front, guarded=not is_local(admin_host))
        self.host, self.port, self.admin_host, self.admin_port = host, port, admin_host, admin_port
        self.folders = dict(folders or {})
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._listening = threading.Event()

    @property
    def url(self) -> str:
        """URL of the public port."""
        return f"http://{_format_host(self.host)}:{self.port}"

    @property
    def admin_url(self) -> str | None:
        """URL of the admin port, or None."""
        return None if self.admin_port is None else f"http://{_format_host(self.admin_host)}:{self.admin_port}"

    @property
    def ready(self) -> bool:
        """Whether requests are accepted: every bucket is warm, and the port is open."""
        opened = self._listening.is_set() and (self._fronts is None or self._fronts.ready)
        return opened and self.service.ready

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT; raises ValueError if a model cannot meet the SLA."""
        run_loop(self.serve(signals=True))

    async def serve(self, *, signals: bool = False) -> None:
        """Serve until `stop`; raises the error of a model that cannot be started."""
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        sys.setswitchinterval(SWITCH)
        drain = 10 * self.service.policy.sla + 5
        public = self._bind_public()
        self.port = public[0].getsockname()[1]
        sockets: list[socket.socket] = [] if self._fronts else public
        apps: list[Any] = [] if self._fronts else [self.front]
        if self.admin_port is not None:
            sockets.append(bind(self.admin_host, self.admin_port, option="--admin-port"))
            self.admin_port = sockets[-1].getsockname()[1]
            apps.append(self.admin)
        listeners = [
            make_listener(app, sock, self.limits, drain=drain) for app, sock in zip(apps, sockets, strict=True)
        ]
        if signals:
            self._install_signal_handlers()
        tasks = [asyncio.create_task(each._serve([sock])) for each, sock in zip(listeners, sockets, strict=True)]
        stopping = asyncio.create_task(self._stop.wait())
        warming: asyncio.Task[None] | None = None
        try:
            if self._fronts is not None:
                await self._fronts.start(public)
            warming = asyncio.create_task(self._warm())
            self._listening.set()
            await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if not warming.done():
                warming.cancel()
            await self.service.drain(drain)
            if self._fronts is not None:
                await self._fronts.stop(drain)
            for each in listeners:
                each.should_exit = True
            await asyncio.gather(*tasks)
        finally:
            stopping.cancel()
            if self._fronts is not None:
                self._fronts.kill()
            self.service.close()
        if warming.done() and not warming.cancelled() and (error := warming.exception()) is not None:
            raise error

    async def _warm(self) -> None:
        try:
            await self.service.start()
        except Exception:
            self.stop()
            raise

    def _bind_public(self) -> list[socket.socket]:
        if self._fronts is None:
            return [bind(self.host, self.port)]
        from loka.serving.fronts import bind_fronts

        return bind_fronts(self.host, self.port, self._fronts.count)

    def _install_signal_handlers(self) -> None:
        assert self._loop is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.stop)
        self._loop.add_signal_handler(
            signal.SIGHUP, lambda: asyncio.ensure_future(self.service.reload_all(self.folders))
        )

    def stop(self) -> None:
        """Drain and stop; may be called from any thread."""
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)

    @contextlib.contextmanager
    def background(self, *, wait: float = 120.0) -> Iterator["Server"]:
        """Serve in a thread while the block runs.

        Args:
            wait: seconds within which every bucket must be warm.
        """
        failed: list[BaseException] = []

        def work() -> None:
            try:
                run_loop(self.serve())
            except BaseException as error:  # raised below, in the caller's thread
                failed.append(error)
                self._listening.set()

        thread = threading.Thread(target=work, name="loka-server", daemon=True)
        thread.start()
        end = time.monotonic() + wait
        while not failed and not self.ready:
            if time.monotonic() > end:
                self.stop()
                raise TimeoutError(f"not ready within {wait:g} s")
            time.sleep(0.01)
        if failed:
            raise failed[0]
        try:
            yield self
        finally:
            self.stop()
            thread.join(60)


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine like asyncio.run, on uvloop if it is installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)


def _format_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class JsonLines(logging.Formatter):
    """Format log records as one JSON object per line: time, level, message and the fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Send the logs of a server to stderr as JSON lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    handler.setLevel(level)  # uvicorn sets that of its log
    _log_to(handler)
    log.setLevel(level)


def log_nothing() -> None:
    """Drop the logs of a server; without any handler Python prints warnings by itself."""
    _log_to(logging.NullHandler())


def _log_to(handler: logging.Handler) -> None:
    for name in LOGS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
