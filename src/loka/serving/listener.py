"""uvicorn's HTTP protocol with limits that must be enforced before there is a request.

A connection beyond the cap is closed at once. A request head that does not arrive in time gets a 408, one that is too
large a 431, so that slow or endless headers cannot hold connections. What follows a chunked body (trailers) is dropped,
and limited like a head: clients could otherwise set headers there, or fill the memory. Of requests that a client sends
before earlier ones are answered, `PIPELINED` wait; the connection ends after them. It also ends if a client does not
read its answers. The rest of a body whose request was answered without reading it is dropped as it arrives, within the
time for a body: closing the connection instead would often lose the answer, and cost a new connection. A lost
connection cancels the work for it. Head and body of a response are sent in one write, so that a killed process has sent
either all of it or nothing. The protocol class of uvicorn is extended: httptools if installed, otherwise h11.
"""

import asyncio
import errno
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from loka.serving.call import DISCONNECT, READ, Limits

PIPELINED = 16  # requests of a connection that wait; httptools parses all that arrive, h11 waits by itself
_CLOSED = "HTTP/1.1 {}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Whole:
    """A transport that holds back the head of a response and sends it together with the body, the next write.

    Args:
        transport: the transport.
        closed: called when it was closed; it still sends what it holds.
    """

    def __init__(self, transport: Any, closed: Callable[[], object] = lambda: None) -> None:
        self._transport, self._closed, self._head = transport, closed, b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send data, or hold it back if it is a response head."""
        if not self._head and data.endswith(b"\r\n\r\n") and data.startswith(b"HTTP/1.1 ") and data[9:10] != b"1":
            self._head = data
        else:
            self._transport.write(self._head + data)
            self._head = b""

    def flush(self) -> None:
        """Send a head that was not followed by a body."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        """Send a held-back head, and close."""
        self.flush()
        self._transport.close()
        self._closed()


def make_protocol(limits: Limits) -> type:
    """Return a subclass of uvicorn's HTTP protocol that enforces these limits."""
    import h11
    from uvicorn.config import HTTP_PROTOCOLS
    from uvicorn.importer import import_from_string

    base: Any = import_from_string(HTTP_PROTOCOLS["auto"])
    if base.__name__ == "AutoHTTPProtocol":  # pragma: no cover - older uvicorn
        raise ValueError("uvicorn's protocol could not be chosen")

    class Guarded(base):  # type: ignore[misc]
        """One connection."""

        def connection_made(self, transport: Any) -> None:
            self._timer: asyncio.TimerHandle | None = None
            self._head = 0  # bytes of the request head so far
            self._sends_body = False
            self._after_body = 0  # bytes since the last one of a body: trailers, and what chunks say of themselves
            self._full = False  # as many requests wait as may; what follows is dropped
            self._abort: asyncio.TimerHandle | None = None  # runs while the client does not read
            self._unanswered: deque[Any] = deque()  # requests; uvicorn tells only the last one of a lost connection
            self._lost: list[Any] = []  # called when the connection is lost
            super().connection_made(Whole(transport, self._start_abort))
            if len(self.connections) > limits.connections:
                self._close("503 Service Unavailable")
                return
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing() or self._full:
                return
            before, read, body = self.cycle, time.monotonic(), self._in_body()
            self._after_body += len(data)
            super().data_received(data)
            if body and self._sends_body and self._after_body > limits.header_bytes:
                self._close("431 Request Header Fields Too Large")
            elif self._awaits_head() and body:  # the rest of a body that nobody reads
                if not self._in_body():
                    self._stop_timer()
                    self._wait_for_next()
                elif self._timer is None:
                    self._start_timer(limits.body_seconds)
            elif self._awaits_head():
                self._head += len(data)
                if self._head > limits.header_bytes:
                    self._close("431 Request Header Fields Too Large")
                elif self._timer is None:
                    self._start_timer()
            else:
                self._stop_timer()
                if self.cycle is not before:
                    self.cycle.scope[DISCONNECT] = self._lost
                    if not getattr(self, "pipeline", None):  # else it waits for the answer before it, not for the loop
                        self.cycle.scope[READ] = read

        def _wait_for_next(self) -> None:
            """Start the timer of an idle connection, as uvicorn does after an answer; bytes that arrive stop it."""
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

        def on_header(self, name: bytes, value: bytes) -> None:  # called by httptools, as the next three
            if not self._sends_body:  # else it is a trailer
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._sends_body, self._after_body = True, 0
            if len(self.pipeline) >= PIPELINED:
                self._full, self.cycle.keep_alive = True, False
            if not self._full:
                self.scope[DISCONNECT] = self._lost
                super().on_headers_complete()
                self._unanswered.append(self.cycle)

        def on_body(self, body: bytes) -> None:
            self._after_body = 0
            if not self._full:
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._sends_body = False
            if not self._full:
                super().on_message_complete()

        def _in_body(self) -> bool:
            """Return True if the client has sent a request head, and not yet all of its body."""
            parser = getattr(self, "conn", None)  # of h11
            return self._sends_body if parser is None else parser.their_state is h11.SEND_BODY

        def on_response_complete(self) -> None:
            self.transport.flush()
            if self._unanswered:
                self._unanswered.popleft()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)
            self._stop_abort()
            for cycle in self._unanswered:
                cycle.disconnected = True
            for tell in self._lost:
                tell()
            self._lost = []

        def pause_writing(self) -> None:
            self._start_abort()
            super().pause_writing()

        def resume_writing(self) -> None:
            if not self.transport.is_closing():
                self._stop_abort()
            super().resume_writing()

        def _start_abort(self) -> None:
            """Give the client time to read what was sent; then drop it, and the connection."""
            if self._abort is None:
                self._abort = self.loop.call_later(limits.body_seconds, self.transport.abort)

        def _stop_abort(self) -> None:
            if self._abort is not None:
                self._abort.cancel()
                self._abort = None

        def _awaits_head(self) -> bool:
            """Return True if no request is being answered, so that arriving bytes belong to a request head."""
            return self.cycle is None or self.cycle.response_complete

        def _start_timer(self, seconds: float = limits.header_seconds) -> None:
            self._timer = self.loop.call_later(seconds, self._too_slow)

        def _stop_timer(self) -> None:
            self._head = 0
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_slow(self) -> None:
            self._timer = None
            if self._awaits_head():
                self._close("408 Request Timeout")

        def _close(self, status: str) -> None:
            self._stop_timer()
            if not self.transport.is_closing():
                self.transport.write(_CLOSED.format(status).encode())
                self.transport.close()

    return Guarded


def make_listener(app: Any, sock: socket.socket, limits: Limits, *, drain: float) -> Any:
    """Make a uvicorn server for an application on a bound socket; signals are left to the caller.

    Args:
        app: the ASGI application.
        sock: a bound socket.
        limits: what a client may send, and how long it may take.
        drain: seconds that requests in flight have to end when the server stops.
    """
    import uvicorn

    config = uvicorn.Config(
        app,
        http=make_protocol(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=int(limits.keep_alive),
        timeout_graceful_shutdown=max(1, round(drain)),
        h11_max_incomplete_event_size=limits.header_bytes,
        backlog=2048,
    )
    config.load()
    return uvicorn.Server(config)


def bind(host: str, port: int, *, shared: bool = False, option: str = "port") -> socket.socket:
    """Bind a socket, or raise ValueError saying what is wrong with the address.

    Args:
        host: the address to listen on.
        port: its port; 0 for a free one.
        shared: let several processes bind it.
        option: the option that the hint asks to change.
    """
    if not 0 <= port <= 65535:  # getaddrinfo would wrap it around
        raise ValueError(f"port {port}: expected 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(*found[:3])  # with its protocol: asyncio sets TCP_NODELAY only if that is IPPROTO_TCP
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(found[4])
    except OSError as error:
        hint = f"; hint: another {option}, or 0 for a free one" if error.errno == errno.EADDRINUSE else ""
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror or error}{hint}") from error
    sock.setblocking(False)
    return sock


def is_local(host: str) -> bool:
    """Return True if only this machine can reach the address."""
    import ipaddress

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
