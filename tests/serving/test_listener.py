"""What leaves a connection, and when."""

import asyncio
import socket
import time

import pytest

from loka.serving import Limits
from loka.serving.listener import Whole, make_listener

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Wire:
    """A transport that writes down what it is told."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def test_head_and_body_leave_in_one_write() -> None:
    wire = Wire()
    whole = Whole(wire)
    for _ in range(2):
        whole.write(HEAD)
        whole.write(b"{}")
        whole.flush()
    assert wire.written == [HEAD + b"{}"] * 2


def test_what_is_complete_without_a_body_does_not_wait_for_one() -> None:
    wire = Wire()
    whole = Whole(wire)
    whole.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert wire.written == [b"HTTP/1.1 100 Continue\r\n\r\n"]
    whole.write(HEAD)  # the answer to a HEAD
    assert len(wire.written) == 1
    whole.flush()
    assert wire.written[1:] == [HEAD]
    whole.write(HEAD)
    whole.close()
    assert wire.written[2:] == [HEAD]
    assert whole.is_closing()


def test_a_client_that_does_not_read_is_dropped() -> None:
    pytest.importorskip("uvicorn")

    async def app(scope: dict, receive: object, send: object) -> None:  # more than the sockets hold
        size = b"100000000"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", size)]})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": bytes(10**8)})  # type: ignore[operator]

    async def work(request: bytes) -> float:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            server = make_listener(app, listening, Limits(body_seconds=0.3, keep_alive=1), drain=1)
            serving = asyncio.create_task(server._serve([listening]))
            while not server.started:
                await asyncio.sleep(0.01)
            _, writer = await asyncio.open_connection(*listening.getsockname(), limit=1024)
            begin = time.monotonic()
            writer.write(request)
            await asyncio.sleep(0.1)
            while server.server_state.connections:
                assert time.monotonic() - begin < 10
                await asyncio.sleep(0.01)
            took = time.monotonic() - begin
            writer.close()
            server.should_exit = True
            await serving
        return took

    for request in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"):
        assert asyncio.run(work(request)) < 2


def test_heads_before_a_chunked_body_are_no_trailers_of_it() -> None:
    """A connection may have carried many requests without a body, as of a monitor, before one with a body."""
    pytest.importorskip("uvicorn")

    async def app(scope: dict, receive: object, send: object) -> None:
        while scope["method"] == "POST" and (await receive())["more_body"]:  # type: ignore[operator]
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b""})  # type: ignore[operator]

    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            server = make_listener(app, listening, Limits(header_bytes=256), drain=1)
            serving = asyncio.create_task(server._serve([listening]))
            while not server.started:
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            for _ in range(20):
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            for part in (
                b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n",
                b"2\r\n",
                b"{}\r\n0\r\n\r\n",
            ):
                writer.write(part)
                await asyncio.sleep(0.05)  # in a packet of its own
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            writer.close()
            server.should_exit = True
            await serving

    asyncio.run(work())
