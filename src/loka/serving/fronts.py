"""Front processes: HTTP in several processes, the models in this one.

One process of Python answers some 1,800 requests of 512 rows a second, however fast its model is: parsing, decoding,
checking, sorting and encoding hold the interpreter's lock, which the engine's thread needs too. A front
(loka.serving.front_process) does all of that in a process of its own. This process admits, batches, runs, and hands
arrays back.

Every front has a listening socket of its own on the same port (SO_REUSEPORT; the kernel distributes connections), a
Unix socket to this process and a piece of shared memory (loka.serving.link). The listening sockets stay open here: when
a front dies, its connections are lost, those that were not accepted yet wait for the front that replaces it. If this
process dies, the fronts end.
"""

import asyncio
import contextlib
import logging
import mmap
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loka.serving import link, wire
from loka.serving.call import Limits
from loka.serving.front_process import Arm, Settings
from loka.serving.runner import Refused, Runner, Ticket
from loka.serving.servable import Packed, Reader, Sealed
from loka.serving.service import Service

log = logging.getLogger("loka.serving")
MEMORY = 64 * 2**20  # bytes that a front has for its requests, at least; only what is used takes memory
EVERY = 0.02  # seconds between looks whether a model became ready, hung or was replaced
PATIENCE = 60.0  # seconds for a front to start
SLOWEST = 5.0  # seconds to wait, at most, before a front that died again and again is started once more


class Reply:
    """Whoever waits in a front for an answer, as a runner sees it: like an asyncio.Future.

    It answers over the link on which it was asked: the front that replaces a dead one counts its requests anew.
    """

    __slots__ = ("_link", "frame", "gone", "process", "request", "runner", "settled", "ticket")

    def __init__(self, process: "Process", frame: link.Submit, runner: Runner) -> None:
        self.process, self.frame, self.runner = process, frame, runner
        self._link = process.link
        self.ticket: Ticket | None = None
        self.request: Any = None
        self.gone = self.settled = False

    def done(self) -> bool:
        """Return True once the front was told."""
        return self.settled

    def cancel(self) -> bool:
        """Stop waiting. The front may use the memory again when the request has left its queue, or its batch has ended."""
        self.gone = True
        entry = None if self.ticket is None else self.ticket.entry
        if not self.settled and (entry is None or entry.state == "cancelled"):
            self._settle(link.Released(self.frame.id))
        return True

    def set_result(self, answer: Any) -> None:
        """Send the answer of the model."""
        ticket, service = self.ticket, self.process.fronts.service
        if self.gone:
            self._settle(link.Released(self.frame.id))
            return
        assert ticket is not None  # submitted
        assert ticket.batch is not None  # it ran
        assert ticket.model is not None
        assert ticket.ended is not None
        raw = isinstance(answer, np.ndarray)
        try:
            data = answer.tobytes() if raw else msgspec.msgpack.encode(answer)
        except Exception as error:  # of this answer; others of its batch are delivered
            log.exception("failed", extra={"fields": {"request_id": self.frame.request_id}})
            self.set_exception(error)
            return
        batch = ticket.batch
        self._settle(
            link.Answer(
                self.frame.id, ticket.model.name, ticket.model.version, raw, data, batch.started, ticket.ended,
                batch.bucket, len(batch.entries),
            )
        )  # fmt: skip
        if service.shadow:
            service.mirror(self.request, self.frame.request_id, answer)

    def set_exception(self, error: BaseException) -> None:
        """Send the reason why there is no answer."""
        if self.gone:
            self._settle(link.Released(self.frame.id))
            return
        if not isinstance(error, Refused):
            error = Refused(500, "internal", f"{type(error).__name__}; see the log")
        self._settle(
            link.Refusal(self.frame.id, error.status, error.reason, error.message, error.retry_after, error.path)
        )

    def _settle(self, frame: Any) -> None:
        self.process.forget(self)
        if self._link is not None:
            self._link.send(frame)
        self.settled = True


class Process:
    """One front, and the process that follows it when it dies."""

    def __init__(self, fronts: "Fronts", sock: socket.socket) -> None:
        self.fronts, self.sock = fronts, sock
        self.child: subprocess.Popen[bytes] | None = None
        self.up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready = False  # whether the front knows that the models are
        self.link: link.Link | None = None
        self._view = memoryview(b"")
        self._pending: dict[int, Reply] = {}
        self._gone = asyncio.Event()
        self._hearers: dict[type, Any] = {
            link.Submit: self._submit, link.Cancel: self._cancel, link.Sent: self._learn, link.Counted: self._count,
            link.Exposed: self._expose, link.Outcome: self._outcome, link.Listening: self._ready,
        }  # fmt: skip
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start a process and tell it what it needs; `up` resolves when it listens."""
        self.up = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("loka-front")
        try:
            os.ftruncate(memory, self.fronts.settings.memory)
            self._view = memoryview(mmap.mmap(memory, self.fronts.settings.memory))
            fds = (theirs.fileno(), memory, self.sock.fileno())
            self.child = subprocess.Popen(
                [sys.executable, "-c", "from loka.serving.front_process import main; main()", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            )
        finally:
            theirs.close()
            os.close(memory)
        self._pending, self._gone = {}, asyncio.Event()
        made = link.Link(link.TO_ENGINE, self._hear, lambda: self._lost(made))
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: made, sock=ours)
        self.link = made
        self.tell(self.fronts.describe(settings=True))

    def tell(self, state: link.State) -> None:
        """Send the state of the models."""
        if self.link is not None:
            self.link.send(state)

    def forget(self, reply: Reply) -> None:
        """Let go of a request that is answered."""
        if self._pending.get(reply.frame.id) is reply:
            del self._pending[reply.frame.id]

    async def stop(self, seconds: float) -> None:
        """Let the front answer whoever waits and end; kill it when the time is over."""
        if self.link is not None:
            self.link.send(link.Stop())
        if self.child is not None:
            try:
                await asyncio.to_thread(self.child.wait, seconds)
            except subprocess.TimeoutExpired:
                self.kill()
        with contextlib.suppress(TimeoutError):  # its last words are still in the socket
            await asyncio.wait_for(self._gone.wait(), 1.0)
        if self.link is not None:
            self.link.close()

    def kill(self) -> None:
        """End the process at once."""
        if self.child is not None and self.child.poll() is None:
            self.child.kill()
            self.child.wait()

    def _hear(self, frame: Any) -> None:
        self._hearers[type(frame)](frame)

    def _submit(self, frame: link.Submit) -> None:
        service = self.fronts.service
        runner = service.runners[frame.arm]
        middle = frame.at + frame.size
        sealed = Sealed(self._view[middle : middle + frame.tail], self.fronts.request_type, frame.timeout_ms)
        reply = self._pending[frame.id] = Reply(self, frame, runner)
        try:
            model: Any = runner.model  # before the generation: see Runner._swap_in
            if frame.facts is not None and frame.generation == runner.generation:
                packed = Packed(frame.units, frame.length, frame.facts, [])
                job = model.reader.unpack(sealed, packed, self._view[frame.at : middle])
                reply.ticket = service.submit(sealed, runner, arrived=frame.arrived, read=(model, job), future=reply)
            else:
                reply.request = sealed.open()
                reply.ticket = service.submit(reply.request, runner, arrived=frame.arrived, future=reply)
        except Refused as refused:
            reply.set_exception(refused)
        except ValueError as error:
            reply.set_exception(wire.blame(error))
        except Exception as error:  # the cause is logged; the client gets only the request id
            log.exception("failed", extra={"fields": {"request_id": frame.request_id}})
            reply.set_exception(error)

    def _cancel(self, frame: link.Cancel) -> None:
        reply = self._pending.get(frame.id)
        if reply is not None and reply.ticket is not None:
            reply.runner.cancel(reply.ticket)

    def _learn(self, frame: link.Sent) -> None:
        scheduler = self.fronts.service.runners[frame.arm].scheduler
        for seconds in frame.seconds if scheduler is not None else ():
            scheduler.margins.learn_sending(seconds)

    def _count(self, frame: link.Counted) -> None:
        self.fronts.service.telemetry.merge(frame.taken)

    def _expose(self, frame: link.Exposed) -> None:
        events = self.fronts.service.events
        try:
            if events is not None:
                events.write("exposure", frame.request_id, **frame.fields)
        except Exception:  # e.g. a full disk; the response is already sent, so it can only be logged
            log.exception("event not written", extra={"fields": {"request_id": frame.request_id}})

    def _outcome(self, frame: link.Outcome) -> None:
        assert self.link is not None  # it has just been heard
        task = asyncio.get_running_loop().create_task(self._write_outcome(frame, self.link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write_outcome(self, frame: link.Outcome, asker: link.Link) -> None:
        try:
            new = await self.fronts.service.write_outcome(frame.request_id, frame.fields)
        except Refused as refused:
            asker.send(link.Refusal(frame.id, refused.status, refused.reason, refused.message))
        except Exception as error:
            log.exception("failed", extra={"fields": {"request_id": frame.request_id}})
            asker.send(link.Refusal(frame.id, 500, "internal", f"{type(error).__name__}; see the log"))
        else:
            asker.send(link.Written(frame.id, new))

    def _ready(self, frame: link.Listening) -> None:
        self.ready = frame.ready
        if not self.up.done():
            self.up.set_result(None)

    def _lost(self, made: link.Link) -> None:
        """Forget a front that is gone: what it waited for leaves the queue. Start another."""
        if self.link is not made:
            return
        self.link, self.ready = None, False
        self._gone.set()
        waiting, self._pending = list(self._pending.values()), {}
        for reply in waiting:
            if reply.ticket is not None:
                reply.runner.cancel(reply.ticket)
        was_up = self.up.done() and not self.up.cancelled() and self.up.exception() is None
        if not self.up.done():
            self.up.set_exception(RuntimeError("a front process ended before it listened; its stderr says why"))
        if not self.fronts.stopping and was_up:
            task = asyncio.get_running_loop().create_task(self._restart(len(waiting)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _restart(self, waiting: int) -> None:
        await asyncio.to_thread(self.kill)
        code = None if self.child is None else self.child.returncode
        log.error("a front died, another is started", extra={"fields": {"code": code, "requests_lost": waiting}})
        wait = 0.05
        while not self.fronts.stopping:
            try:
                await self.start()
                await asyncio.wait_for(self.up, PATIENCE)
                return
            except Exception:
                log.exception("a front could not be started")
                self.kill()
            await asyncio.sleep(wait)
            wait = min(SLOWEST, 2 * wait)


class Fronts:
    """Start, feed and stop the front processes of a server.

    Args:
        service: the models.
        count: number of processes.
        limits: limits on what clients may use; connections are divided among the fronts.
        token_file: file of bearer tokens; every front reads it.
        verbose: log every answer.

    Example:
        >>> Fronts(service, 4, limits=Limits(), token_file=None, verbose=False)         # doctest: +SKIP
    """

    def __init__(
        self, service: Service, count: int, *, limits: Limits, token_file: str | Path | None, verbose: bool
    ) -> None:
        if count < 1:
            raise ValueError(f"fronts={count}: expected a number of processes, or 0 for none")
        if not hasattr(os, "memfd_create"):
            raise ValueError(f"fronts={count} needs Linux: fronts share memory with the engine's process")
        if limits.connections < count:
            raise ValueError(f"fronts={count} with {limits.connections} connections in total: expected one a front")
        for arm, runner in service.runners.items():
            reader = getattr(runner.model, "reader", None)
            if not isinstance(reader, Reader):
                raise ValueError(
                    f"fronts={count}: the model {arm} has no `reader`, its part that runs in front processes; hint: "
                    "loka.serving.Reader"
                )
            for kind in (type(reader), reader.request_type, reader.answer_type):
                if kind.__module__ == "__main__":
                    raise ValueError(
                        f"fronts={count}: {kind.__name__}, of the model {arm}, is defined in the script that runs, "
                        "which front processes do not import; hint: move it to a module"
                    )
        self.service, self.count, self.stopping = service, count, False
        self.request_type = service.first.model.request_type
        self.settings = Settings(
            limits=replace(limits, connections=limits.connections // count),
            token_file=None if token_file is None else str(Path(token_file).resolve()),
            verbose=verbose,
            policy=service.policy,
            split=service.split,
            shadow=service.shadow,
            experiment=service.events is not None,
            memory=max(MEMORY, 8 * limits.body),  # the arrays of a JSON body may have four times its size
            log_level=logging.WARNING,
            parent=0,
        )
        self._processes: list[Process] = []
        self._watch: asyncio.Task[None] | None = None
        self._told: Any = None

    @property
    def pids(self) -> list[int]:
        """The process ids of the fronts."""
        return [process.child.pid for process in self._processes if process.child is not None]

    @property
    def ready(self) -> bool:
        """Whether every front accepts requests."""
        return all(process.ready for process in self._processes)

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Start one front for each listening socket; raises RuntimeError if one does not start."""
        # This process may have been forked since: the fronts end when their parent is another one.
        self.settings = replace(self.settings, log_level=_find_level(), parent=os.getpid())
        self._processes = [Process(self, sock) for sock in sockets]
        self._told = self._look()
        await asyncio.gather(*(process.start() for process in self._processes))
        self._watch = asyncio.get_running_loop().create_task(self._tell_changes())
        await asyncio.wait_for(asyncio.gather(*(process.up for process in self._processes)), PATIENCE)

    async def stop(self, seconds: float) -> None:
        """Let the fronts answer whoever waits, and end them."""
        self.stopping = True
        if self._watch is not None:
            self._watch.cancel()
        for process in self._processes:
            process.sock.close()  # no front: no connection waits for one
        await asyncio.gather(*(process.stop(seconds) for process in self._processes))

    def kill(self) -> None:
        """End the fronts at once, if any is left."""
        self.stopping = True
        for process in self._processes:
            process.sock.close()
            process.kill()

    def describe(self, *, settings: bool = False) -> link.State:
        """Return the state of the models for the fronts, with or without their settings."""
        arms = {
            arm: Arm(runner.model.name, runner.model.version, runner.ready, runner.generation, runner.model.reader, runner.model.describe())
            for arm, runner in self.service.runners.items()
        }  # fmt: skip
        told = {"alive": self.service.alive, "ready": self.service.ready, "arms": arms}
        return link.State(pickle.dumps({**told, "settings": self.settings} if settings else told))

    def _look(self) -> Any:
        arms = [(runner.ready, runner.generation) for runner in self.service.runners.values()]
        return self.service.alive, self.service.ready, arms

    async def _tell_changes(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            if (found := self._look()) != self._told:
                self._told = found
                state = self.describe()
                for process in self._processes:
                    process.tell(state)


def _find_level() -> int:
    """Return the level from which this process logs: warnings if nothing is configured, nothing if it is to be silent."""
    handlers = [*log.handlers, *(logging.getLogger().handlers if log.propagate else [])]
    if handlers and all(isinstance(handler, logging.NullHandler) for handler in handlers):
        return logging.CRITICAL + 1
    return log.getEffectiveLevel() if handlers else max(logging.WARNING, log.getEffectiveLevel())


def bind_fronts(host: str, port: int, count: int) -> list[socket.socket]:
    """Bind a socket per front to the same address, or raise ValueError saying what is wrong with it."""
    from loka.serving.listener import bind

    with bind(host, port) as alone:  # without SO_REUSEPORT: fails if another server has this address
        alone.listen()
        port = alone.getsockname()[1]
    sockets = [bind(host, port, shared=True) for _ in range(count)]
    for sock in sockets:
        sock.listen()  # now, not when the front has started: only who listens keeps another server away
    return sockets
