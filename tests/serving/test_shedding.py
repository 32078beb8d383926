"""Requests that are shed because the event loop lags, unread, and what becomes of the rest of their bodies."""

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from loka.serving import Limits, Policy, Server, Service
from loka.serving.call import READ
from loka.serving.front import Front
from loka.serving.service import Arms

from .client import dial, post, wait_for
from .sleeper import Sleeper

pytest.importorskip("uvicorn")
COST = {(1, 0): 0.002, (4, 0): 0.004}


def starve(server: Server) -> None:
    """Make a server believe that its event loop lags by 3 seconds, from now on."""
    service = server.service
    assert service._pulse is not None
    assert server._loop is not None
    server._loop.call_soon_threadsafe(service._pulse.cancel)
    wait_for(service._pulse.done)
    service.lag = 3.0


def test_a_starved_event_loop_sheds_before_it_reads() -> None:
    with Server(Sleeper(COST), sla=2.0, port=0).background() as server:
        starve(server)
        status, headers, body = post(server.url, b"{ this is not even read")
        assert (status, body["error"]["reason"], headers["retry-after"]) == (429, "lag", "4")
        server.service.lag = 0.0
        assert post(server.url, {"number": 1})[0] == 200


@pytest.mark.parametrize("ready", [False, True])
def test_lag_counts_once_the_models_are_ready(ready: bool) -> None:
    """Preparing a model stops the loop for tenths of a second; the first request after it was shed for that."""
    arms, clock = Arms(), iter([0.0, 3.0, 3.0])
    arms.ready, arms.clock = ready, lambda: next(clock)
    with suppress(RuntimeError):  # a coroutine's StopIteration, at the fourth look at the clock
        asyncio.run(arms.measure_lag())
    assert (arms.lag > 2) == ready


def test_time_between_reading_a_request_and_looking_at_it_counts() -> None:
    sent: list[dict] = []

    async def receive() -> dict:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: dict) -> None:
        sent.append(message)

    front = Front(Service(Sleeper(COST), policy=Policy(sla=60.0)), manage=False)
    for waited in (1.0, 30.0):  # less and more than a quarter of the SLA
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/recommend",
            "headers": [(b"content-type", b"application/json")],
            READ: time.monotonic() - waited,
        }
        asyncio.run(front(scope, receive, send))
    assert [m["status"] for m in sent if "status" in m] == [400, 429]  # read, and found wanting; not read


@pytest.fixture(params=["httptools", "h11"])
def shedding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that sheds every request unread, with either HTTP parser."""
    from uvicorn.config import HTTP_PROTOCOLS

    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS[request.param])
    limits = Limits(body=2**20, body_seconds=1.5, header_bytes=2048, keep_alive=2.0)
    with Server(Sleeper(COST), sla=2.0, port=0, limits=limits).background() as server:
        starve(server)
        yield server


def read_status(connection: socket.socket) -> str:
    """The status of the next response; its body is in the same write."""
    return connection.recv(65536).decode().split(" ")[1]


def test_a_body_that_is_not_read_does_not_cost_the_connection(shedding: Server) -> None:
    body = b"x" * 300_000  # far more than a head may have
    head = f"POST /v1/recommend HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with dial(shedding.url) as connection:
        for _ in range(3):
            connection.sendall(head + body[:1000])
            assert read_status(connection) == "429"  # before the body is there
            for start in range(1000, len(body), 50_000):
                connection.sendall(body[start : start + 50_000])
                time.sleep(0.01)


def test_a_body_that_is_not_read_may_not_take_for_ever(shedding: Server) -> None:
    with dial(shedding.url) as connection:
        connection.sendall(b"POST /v1/recommend HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n" + b"x" * 10)
        assert read_status(connection) == "429"
        connection.sendall(b"x")
        assert read_status(connection) == "408"
        assert connection.recv(1) == b""


def test_after_a_body_that_is_not_read_an_idle_connection_is_closed(shedding: Server) -> None:
    with dial(shedding.url) as connection:
        connection.sendall(b"POST /v1/recommend HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n" + b"x" * 10)
        assert read_status(connection) == "429"
        connection.sendall(b"x" * 990)
        connection.settimeout(10.0)
        assert connection.recv(1) == b""


def test_a_pipelined_request_is_not_shed_for_waiting_for_the_answer_before_it() -> None:
    body = b'{"number": 1}'
    head = f"POST /v1/recommend HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    model = Sleeper({(1, 0): 0.002})
    with Server(model, sla=4.0, port=0).background() as server, dial(server.url) as connection:
        model.extra = 1.1  # more than a quarter of the SLA
        connection.sendall(2 * (head.encode() + body))
        said = b""
        while said.count(b"HTTP/1.1 ") < 2:
            said += connection.recv(65536)
        assert said.count(b"HTTP/1.1 200") == 2
