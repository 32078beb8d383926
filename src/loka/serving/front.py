"""The public ASGI application, written without a framework.

    POST /v1/recommend                 the model's own request, JSON or MessagePack
    POST /v1/outcome                   the outcome of an answer (click, purchase, ...), during an experiment
    GET  /v2/health/live, ready        without a token, for orchestrators
    GET  /v2, /v2/models/NAME[/ready]  Open Inference Protocol;  POST /v2/models/NAME/infer

Every response has an `x-request-id`: the client's, if it sent one. Errors have a body {"error": {"reason", "message",
"path"}, "request_id"}, in JSON or MessagePack like the request. Administration is on another port (loka.serving.admin).
"""

import asyncio
import itertools
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from loka import __version__
from loka.serving import v2, wire
from loka.serving.call import DISCONNECT, READ, Call, Limits, Outcome, Receive, Scope, Send
from loka.serving.runner import Refused, Ticket
from loka.serving.service import Arms, Service
from loka.serving.tokens import Tokens

log = logging.getLogger("loka.serving")
LAGGING = 0.25  # of the SLA: requests that waited longer for the event loop are shed unread
JITTER = 0.005  # seconds that an event loop is late now and then, whatever the SLA


class Front:
    """The public ASGI application: routes, limits, errors.

    Args:
        service: the models that answer.
        tokens: accepted bearer tokens; None: no token is required.
        limits: limits on what clients may use.
        manage: start and stop the service in the ASGI lifespan, for use with other ASGI servers.
        verbose: log every response, not only server errors.

    Example:
        >>> app = Front(Service(open_model("runs/onerec"), policy=Policy(sla=0.05)))    # doctest: +SKIP
    """

    def __init__(
        self,
        service: Arms,
        *,
        tokens: Tokens | None = None,
        limits: Limits | None = None,
        manage: bool = True,
        verbose: bool = False,
    ) -> None:
        self.service, self.tokens, self.limits = service, tokens, limits or Limits()
        self.manage, self.verbose = manage, verbose
        self._outcomes = wire.Codec(Outcome)
        # Request ids. One random number per request would release the interpreter's lock, and wait for it again.
        self._process, self._number = secrets.token_hex(8), itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI lifespan or HTTP scope."""
        if scope["type"] == "lifespan":
            await self._handle_lifespan(receive, send)
        elif scope["type"] == "http":
            await self._handle_http(scope, receive, send)
        else:
            raise ValueError(f"ASGI scope {scope['type']!r} is not supported; expected http or lifespan")

    async def _handle_lifespan(self, receive: Receive, send: Send) -> None:
        starting: asyncio.Task[None] | None = None
        service = self.service if self.manage else None
        assert service is None or isinstance(service, Service)  # one in another process starts and stops there
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                if service is not None:
                    starting = asyncio.create_task(service.start())
                    starting.add_done_callback(lambda done: done.cancelled() or done.exception())
                await send({"type": "lifespan.startup.complete"})
            else:
                if service is not None:
                    await service.drain(10 * service.policy.sla + 5)
                    service.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _handle_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A request waits for the loop in its socket, about as long as others lately, and between its reading and now.
        waited = self.service.lag + max(0.0, time.monotonic() - scope.get(READ, math.inf))
        arrived = self.service.clock() - waited
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        usable = bool(given) and wire.REQUEST_ID.fullmatch(given) is not None
        call = Call(
            scope, receive, send, headers, arrived, given if usable else f"{self._process}-{next(self._number)}"
        )
        try:
            if given and not usable:
                raise Refused(400, "header", "1 to 128 letters, digits and ._:-", path="x-request-id")
            if b"transfer-encoding" in headers:
                wire.check_transfer(scope["headers"])
            await self._route(call)
        except Refused as refused:
            await self._refuse(call, refused)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the cause is logged; the client gets only the request id
            log.exception("failed", extra={"fields": {"request_id": call.request_id}})
            await self._refuse(call, Refused(500, "internal", f"{type(error).__name__}; see the log"))

    async def _route(self, call: Call) -> None:
        method, path = call.method, call.scope["path"]
        if path in ("/v2/health/live", "/v2/health/ready"):
            if method != "GET":
                raise Refused(405, "method", "expected GET")
            good = self.service.alive if path.endswith("live") else self.service.ready
            await self._send(call, 200 if good else 503, {"live" if path.endswith("live") else "ready": good})
            return
        if self.tokens is not None and not self.tokens.accept(call.header(b"authorization")):
            raise Refused(401, "token", "a valid bearer token is needed")
        if path == "/v1/recommend":
            await self._expect(call, "POST", self._recommend)
        elif path == "/v1/outcome":
            await self._expect(call, "POST", self._outcome)
        elif path == "/v2" or path.startswith("/v2/models/"):
            await self._v2(call, method, path)
        else:
            raise Refused(404, "path", "unknown path; expected POST /v1/recommend or GET /v2")

    async def _expect(self, call: Call, method: str, handler: Callable[[Call], Awaitable[None]]) -> None:
        if call.method != method:
            raise Refused(405, "method", f"expected {method}")
        await handler(call)

    async def _recommend(self, call: Call) -> None:
        self._shed_if_lagging(call)
        call.kind = wire.content_type(call.header(b"content-type"), call.header(b"content-encoding"))
        request = self.service.codec.decode(await self._read_body(call), call.kind)
        runner = self.service.choose(request)
        ticket, answer = await self._run(call, request, runner)
        assert ticket.model is not None  # set when it was submitted
        body = {
            "request_id": call.request_id, "model": ticket.model.name, "version": ticket.model.version, "arm": runner.arm,
            **msgspec.structs.asdict(answer),
        }  # fmt: skip
        await self._send(call, 200, body, ticket=ticket)
        runner.sent(ticket)

    def _shed_if_lagging(self, call: Call) -> None:
        """Shed before reading the body if the event loop lags.

        A request waits for the loop before it is read and again before its answer is sent, and reading is what the loop
        has no time for: without this, requests that were read in vain leave no time for those that could be answered.
        """
        waited = self.service.clock() - call.arrived
        sla = self.service.policy.sla
        if waited > max(LAGGING * sla, min(sla, JITTER)):
            self.service.telemetry.count("loka_shed_total", model="-", reason="lag")
            self.service.telemetry.second()["shed"] += 1
            raise Refused(429, "lag", "the machine is overloaded", retry_after=waited)

    async def _run(self, call: Call, request: Any, runner: Any) -> tuple[Ticket, Any]:
        call.model, service = runner.arm, self.service
        simulated = call.headers.get(b"x-loka-simulated") == b"1"
        expose = partial(service.expose, request, call.request_id, runner, simulated=simulated)
        try:
            ticket = service.submit(request, runner, arrived=call.arrived, request_id=call.request_id)
            answer = await self._wait(call, runner, ticket)
        except Refused:
            call.after = partial(expose, seconds=service.clock() - call.arrived, empty=True)
            raise
        except ValueError as error:
            raise wire.blame(error) from error
        seconds = service.clock() - call.arrived
        call.after = partial(expose, seconds=seconds, empty=answer.empty)
        late = seconds > service.policy.sla
        service.telemetry.observe("loka_latency_seconds", seconds, model=runner.arm)
        service.telemetry.answered(seconds, late=late)
        if late:
            service.telemetry.count("loka_sla_missed_total", model=runner.arm)
        service.mirror(request, call.request_id, answer)
        return ticket, answer

    async def _wait(self, call: Call, runner: Any, ticket: Ticket) -> Any:
        """Wait for the answer. Cancel if the client disconnects; give up if the engine hangs."""
        assert ticket.entry is not None  # admitted
        watcher: asyncio.Future[Any] | None = None
        lost = call.scope.get(DISCONNECT)
        if lost is not None:
            lost.append(lambda: runner.cancel(ticket))
        else:
            watcher = asyncio.ensure_future(self._cancel_on_disconnect(call, runner, ticket))
        try:
            async with asyncio.timeout(max(0.0, ticket.entry.deadline - self.service.clock()) + self.limits.grace):
                return await ticket.future
        except TimeoutError as error:
            runner.cancel(ticket)
            raise Refused(503, "engine", "the model did not answer", retry_after=1.0) from error
        except asyncio.CancelledError as error:
            if ticket.future.cancelled():
                # Ray cancels the waiting task and so the future; the entry in the queue must be cancelled too
                runner.cancel(ticket)
                raise Refused(499, "gone", "the client went away") from error
            raise
        finally:
            if watcher is not None:
                watcher.cancel()
            if lost is not None:
                lost.clear()  # the connection may stay open for long, and the ticket holds the model

    async def _cancel_on_disconnect(self, call: Call, runner: Any, ticket: Ticket) -> None:
        while (await call.receive())["type"] != "http.disconnect":
            pass
        runner.cancel(ticket)

    async def _outcome(self, call: Call) -> None:
        call.kind = wire.content_type(call.header(b"content-type"), call.header(b"content-encoding"))
        found = self._outcomes.decode(await self._read_body(call), call.kind)
        fields = {} if found.user is None else {"user": found.user}
        new = await self.service.write_outcome(found.request_id, {"name": found.name, "value": found.value, **fields})
        await self._send(call, 200, {"request_id": found.request_id, "written": new})

    async def _v2(self, call: Call, method: str, path: str) -> None:
        if path == "/v2":
            server = {"name": "loka", "version": __version__, "extensions": ["binary_tensor_data"]}
            await self._send(call, 200, server)
            return
        name, *rest = path.removeprefix("/v2/models/").split("/")
        runner = self.service.runner_for(name)
        if rest[:1] == ["versions"] and len(rest) >= 2:
            if rest[1] != runner.model.version:
                raise Refused(404, "version", f"version {runner.model.version!r} is served")
            rest = rest[2:]
        if rest == ["infer"] and method == "POST":
            await self._infer(call, runner)
        elif rest == ["ready"] and method == "GET":
            await self._send(call, 200 if runner.ready else 503, {"name": name, "ready": runner.ready})
        elif not rest and method == "GET":
            await self._send(call, 200, v2.metadata(runner.model))
        else:
            raise Refused(404, "path", "GET /v2/models/NAME, GET .../ready, POST .../infer")

    async def _infer(self, call: Call, runner: Any) -> None:
        self._shed_if_lagging(call)
        wire.check_encoding(call.header(b"content-encoding"))
        body = await self._read_body(call)
        infer, request = v2.read(body, call.header(b"inference-header-content-length"), runner.model)
        if self.service.split is not None and request.user is not None:
            runner = self.service.choose(request)
        try:
            ticket, answer = await self._run(call, request, runner)
        except Refused as refused:
            raise v2.locate(refused, infer) from refused
        assert ticket.model is not None  # set when it was submitted
        data, head = v2.write(infer, answer, ticket.model, call.request_id)
        extra = [] if head is None else [(b"inference-header-content-length", str(head).encode())]
        kind = b"application/json" if head is None else b"application/octet-stream"
        await self._write(call, 200, data, [(b"content-type", kind), *extra], ticket=ticket)
        runner.sent(ticket)

    async def _read_body(self, call: Call) -> bytes:
        """Read the body within the limits of size and time."""
        limit, said = self.limits.body, call.header(b"content-length")
        if said is not None and (not said.isdigit() or int(said) > limit):
            raise Refused(413, "size", f"a body may have {limit} bytes")
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await call.receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(499, "gone", "the client went away")
                    part = message.get("body", b"")
                    size += len(part)
                    if size > limit:
                        raise Refused(413, "size", f"a body may have {limit} bytes")
                    parts.append(part)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError as error:
            raise Refused(408, "slow", f"the body took longer than {self.limits.body_seconds:g} s") from error

    async def _send(self, call: Call, status: int, body: Any, *, ticket: Ticket | None = None) -> None:
        kind = call.kind.encode()
        await self._write(call, status, wire.encode(body, call.kind), [(b"content-type", kind)], ticket=ticket)

    async def _refuse(self, call: Call, refused: Refused) -> None:
        extra: list[tuple[bytes, bytes]] = [(b"content-type", call.kind.encode())]
        if refused.retry_after is not None:
            extra.append((b"retry-after", str(max(1, math.ceil(refused.retry_after))).encode()))
        if refused.status == 401:
            extra.append((b"www-authenticate", b"Bearer"))
        if refused.status in (408, 413):
            extra.append((b"connection", b"close"))  # the rest of the body is not read
        if refused.status >= 500:
            self.service.telemetry.second()["failed"] += 1
        body = wire.encode(wire.error_body(refused, call.request_id), call.kind)
        await self._write(call, refused.status, body, extra, reason=refused.reason)

    async def _write(
        self,
        call: Call,
        status: int,
        body: bytes,
        headers: list[tuple[bytes, bytes]],
        *,
        ticket: Ticket | None = None,
        reason: str | None = None,
    ) -> None:
        self.service.telemetry.count("loka_requests_total", model=call.model, code=str(status))
        if self.verbose or (status >= 500 and reason is not None):  # no reason: a health check while the model warms up
            self._log(call, status, ticket, reason)
        if status != 499:  # the client is gone
            head = [(b"content-length", str(len(body)).encode()), (b"x-request-id", call.request_id.encode()), *headers]
            await call.send({"type": "http.response.start", "status": status, "headers": head})
            await call.send({"type": "http.response.body", "body": body})
        if call.after is not None:
            try:
                call.after(status=status)
            except Exception:  # e.g. a full disk; the response is already sent, so it can only be logged
                log.exception("event not written", extra={"fields": {"request_id": call.request_id}})

    def _log(self, call: Call, status: int, ticket: Ticket | None, reason: str | None) -> None:
        fields: dict[str, Any] = {
            "request_id": call.request_id, "method": call.scope["method"], "path": call.scope["path"][:200], "status": status,
            "ms": round(1e3 * (self.service.clock() - call.arrived), 3), "model": call.model,
        }  # fmt: skip
        if reason is not None:
            fields["reason"] = reason
        if ticket is not None and ticket.batch is not None and ticket.entry is not None:
            fields["queue_ms"] = round(1e3 * (ticket.batch.started - ticket.entry.arrived), 3)
            fields["bucket"], fields["batch"] = list(ticket.batch.bucket), len(ticket.batch.entries)
        log.log(logging.WARNING if status >= 500 else logging.INFO, "answer", extra={"fields": fields})
