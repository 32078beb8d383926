"""The load generator: due times, latency that counts from them, and its record."""

import asyncio
import json
import math
import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from loka.cli.load import tell
from loka.records import LoadTest, load, save
from loka.report.render import render
from loka.report.results import Results
from loka.serving import Server
from loka.serving.load import Sent, Traffic, _Client, describe, look, make_body, send, send_from, summarize

from .sleeper import Sleeper

COST = {(1, 0): 0.002, (8, 0): 0.004}


def test_arrivals_are_drawn_beforehand() -> None:
    due = Traffic(rate=100, seconds=50, sla=0.1).due()
    gaps = [b - a for a, b in pairwise(due)]
    assert len(due) == pytest.approx(5000, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.01, rel=0.1)  # exponential: as wide as its mean
    assert due == Traffic(rate=100, seconds=50, sla=0.1).due()
    assert Traffic(rate=10, seconds=1, sla=0.1, arrivals="uniform").due() == [n / 10 for n in range(10)]
    for bad in ({"rate": 0}, {"rate": math.inf}, {"seconds": -1}, {"seconds": math.inf}, {"arrivals": "bursts"}):
        with pytest.raises(ValueError, match="expected"):
            Traffic(**{"rate": 1, "seconds": 1, "sla": 1, **bad})  # type: ignore[arg-type]


def test_a_test_without_a_request_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no request is due within 2 s at 0\.01 per second"):
        asyncio.run(send("http://127.0.0.1:9", Traffic(rate=0.01, seconds=2, sla=1), lambda n, s: b"{}"))


def test_a_token_of_several_lines_is_refused_and_an_ipv6_host_is_named_in_brackets() -> None:
    with pytest.raises(ValueError, match="a line break"):
        asyncio.run(look("http://127.0.0.1:9", "0123456789abcdef\r\nx-other: 1"))
    assert b"\r\nhost: [::1]:9\r\n" in _Client("http://[::1]:9", None, 1)._head("GET", "/", 0, "")


def test_a_server_of_another_kind_is_named() -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 15\r\n\r\n<!DOCTYPE HTML>")

    async def ask() -> None:
        server = await asyncio.start_server(other, "127.0.0.1", 0)
        await describe(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m")

    with pytest.raises(ValueError, match="no server of loka: it answered b'<!DOCTYPE"):
        asyncio.run(ask())


def test_a_server_that_stalls_cannot_hide_who_would_have_asked() -> None:
    """One connection, a server that stops for half a second: in a closed loop one request is slow, in truth everybody who was due meanwhile."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count = 0
        while head := await reader.readuntil(b"\r\n\r\n"):
            size = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(size)
            count += 1
            if count == 20:
                await asyncio.sleep(0.5)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async def measure() -> list[Sent]:
        async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await serve(reader, writer)
            except asyncio.IncompleteReadError:
                writer.close()

        server = await asyncio.start_server(quiet, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        traffic = Traffic(rate=100, seconds=1.0, sla=0.05, arrivals="uniform", connections=1)
        found = await send(f"http://127.0.0.1:{port}", traffic, lambda n, s: b"{}")
        server.close()
        return found

    sent = asyncio.run(measure())
    assert len(sent) == 100
    assert sum(one.latency > 0.1 for one in sent) >= 25  # about forty were due while it slept


def test_the_record_counts_what_was_good_late_shed_and_broken(tmp_path: Path) -> None:
    traffic = Traffic(rate=4, seconds=1.0, sla=0.1)
    sent = [Sent(0.1, 0.1, 0.15, 200), Sent(0.2, 0.25, 0.4, 200), Sent(0.3, 0.3, 0.301, 429), Sent(0.5, 0.5, 0.6, 0)]
    found = summarize("http://x", "m", traffic, sent)
    assert (found.good, found.late, found.goodput, found.late_share) == (1, 1, 1.0, 0.5)
    assert found.codes == {"200": 2, "429": 1, "error": 1}
    assert found.latency_ms["max"] == pytest.approx(200.0)
    assert found.shed_ms["p50"] == pytest.approx(1.0)
    assert found.send_lag_ms["max"] == pytest.approx(50.0)
    assert sum(b.offered for b in found.bins) == 4
    save(found, tmp_path / "load.json")
    assert load(tmp_path / "load.json", LoadTest) == found
    page = render(Results.load(tmp_path))
    assert "Under load" in page
    assert "<h1>m: 1 answers a second within 100 ms, of 4 requested</h1>" in page
    assert "chart-load-0" in page


def test_it_reads_what_the_server_serves_and_sends_it() -> None:
    pytest.importorskip("uvicorn")
    name = "a sleeper for ½?"  # a folder may have such a name
    with Server(Sleeper(COST, name), sla=2.0, port=0).background() as server:
        about = asyncio.run(describe(server.url, name))
        assert about["name"] == name
        assert asyncio.run(look(server.url))["ready"]
        traffic = Traffic(rate=60, seconds=1.0, sla=2.0)
        sent = asyncio.run(send(server.url, traffic, lambda n, s: json.dumps({"number": n}).encode()))
        found = summarize(server.url, "sleeper", traffic, sent)
        assert found.codes == {"200": found.offered}
        with pytest.raises(ValueError, match="no model"):
            asyncio.run(describe(server.url, "nobody"))
    with pytest.raises(ValueError, match="no answer"):
        asyncio.run(look(server.url))


def test_several_processes_send_what_one_would() -> None:
    """Every request of the schedule once, at its time, whichever process sends it; a failure of one is raised."""
    pytest.importorskip("uvicorn")
    traffic = Traffic(rate=80, seconds=1.0, sla=2.0, seed=3)
    with Server(Sleeper(COST), sla=5.0, port=0).background() as server:
        sent = send_from(3, server.url, traffic, lambda n, s: json.dumps({"number": n}).encode())
        assert {one.code for one in sent} == {200}
        answered = server.service.telemetry.counters["loka_requests_total"]
        assert sum(answered.values()) == len(sent)
    assert sorted(one.due for one in sent) == traffic.due()
    assert min(one.left - one.due for one in sent) >= 0  # none before its time: the clocks agree
    assert summarize("http://x", "m", traffic, sent).offered == len(traffic.due())

    def broken(number: int, source: random.Random) -> bytes:
        if number == 7:
            raise ValueError("no body")
        return b"{}"

    with pytest.raises(ValueError, match="no body"):
        send_from(3, "http://127.0.0.1:9", traffic, broken)
    with pytest.raises(ValueError, match="processes=0"):
        send_from(0, "http://127.0.0.1:9", traffic, broken)


def test_a_request_has_the_same_random_numbers_whichever_process_sends_it() -> None:
    traffic = Traffic(rate=80, seconds=1.0, sla=2.0, seed=3)

    def made(share: tuple[int, int]) -> dict[int, float]:
        drawn: dict[int, float] = {}

        def stop() -> float:
            raise KeyError("only the bodies are wanted")

        with pytest.raises(KeyError):
            asyncio.run(send("http://127.0.0.1:9", traffic, lambda n, s: drawn.setdefault(n, s.random()) and b"", share=share, start=stop))  # fmt: skip
        return drawn

    whole = made((0, 1))
    assert len(set(whole.values())) == len(traffic.due())
    assert made((0, 3)) | made((1, 3)) | made((2, 3)) == whole


def test_random_requests_fit_what_was_described() -> None:
    source = random.Random(0)
    history = json.loads(make_body([{"name": "history", "datatype": "INT64", "shape": [-1]}], items=5, vocabulary=9, rows=2, users=3)(0, source))  # fmt: skip
    assert len(history["history"]) == 5
    with pytest.raises(ValueError, match="rows 0, users 3: expected at least 1"):
        make_body([], items=5, vocabulary=9, rows=0, users=3)
    columns = [
        {"name": "price", "datatype": "FP32", "shape": [-1]},
        {"name": "item", "datatype": "INT64", "shape": [-1]},
        {"name": "history", "datatype": "INT64", "shape": [-1, 4]},  # a ranker's column, no recommender's request
    ]
    features = json.loads(make_body(columns, items=9, vocabulary=9, rows=2, users=3)(0, source))["features"]
    assert [len(features[name]) for name in ("price", "item", "history")] == [2, 2, 4]


def test_what_the_server_would_not_take_is_told() -> None:
    refused = b'{"error": {"reason": "field", "message": "is missing", "path": "$.features.age"}}'
    sent = [Sent(0.2, 0.2, 0.3, 400, b"later"), Sent(0.1, 0.1, 0.2, 400, refused), Sent(0.3, 0.3, 0.4, 429, refused), Sent(0.4, 0.4, 0.5, 502, b"<html>")]  # fmt: skip
    found = summarize("http://x", "m", Traffic(rate=4, seconds=1.0, sla=0.1), sent)
    assert found.notes == ["the first 400 said: $.features.age: is missing", "the first 502 said: <html>"]
    assert tell(found).endswith(
        "note: the first 400 said: $.features.age: is missing\nnote: the first 502 said: <html>"
    )
