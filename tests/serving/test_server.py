"""The server from outside: answers, errors with their causes, limits, tokens, draining. A model that sleeps stands in where only time matters."""

import asyncio
import base64
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import torch

from loka.inference import EngineConfig, Recommender
from loka.serving import Job, Limits, Server
from loka.serving.listener import PIPELINED
from loka.serving.server import LOGS, log_nothing, log_to_stderr
from loka.serving.tokens import Tokens

from .client import call, dial, get, post, wait_for
from .sleeper import Sleeper
from .small import SCHEMA, make_generative, make_ranker

pytest.importorskip("uvicorn")
COST = {(1, 0): 0.002, (4, 0): 0.004}


@pytest.fixture(scope="module", params=[0, 2], ids=["one process", "two fronts"])
def fronts(request: pytest.FixtureRequest) -> int:
    """How many processes speak HTTP: nothing that a client can see may depend on it."""
    return int(request.param)


@pytest.fixture(scope="module")
def generative(fronts: int) -> Iterator[Server]:
    config = EngineConfig(beams=8, requests=(1, 4), dtype="fp32", batch_invariant=True)
    with Server(make_generative(config), sla=60.0, port=0, admin_port=0, fronts=fronts).background() as server:
        yield server


@pytest.fixture(scope="module")
def sleeper(fronts: int) -> Iterator[Server]:
    limits = Limits(body=4096, body_seconds=0.3, header_seconds=0.3, header_bytes=2048, connections=20)
    with Server(Sleeper(COST), sla=60.0, port=0, admin_port=0, limits=limits, fronts=fronts).background() as server:
        yield server


def test_answers_equal_the_engines_bit_for_bit(generative: Server) -> None:
    model = generative.service.first.model
    recommender = Recommender(model.engine, model.bundle.index)  # type: ignore[attr-defined]
    histories = [[1, 2, 3], [7], [], list(range(1, 40)), [5, 9_999_999, 6]]
    wanted = recommender.recommend([torch.tensor(h, dtype=torch.int64) for h in histories], top=5)
    found: dict[int, dict] = {}

    def ask(place: int) -> None:
        status, _, body = post(generative.url, {"history": histories[place], "top": 5})
        assert status == 200
        found[place] = body

    threads = [
        threading.Thread(target=ask, args=(place,)) for place in range(len(histories))
    ]  # whoever is in the batch
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, one in enumerate(wanted):
        assert one.items is not None
        assert found[place]["items"] == one.items.tolist()
        assert torch.equal(torch.tensor(found[place]["scores"]), one.scores)  # all 32 bits
        assert (found[place]["cut"], found[place]["unknown"]) == (one.cut, one.dropped)
    assert found[3]["cut"] == 39 - model.engine.model_config.context  # type: ignore[attr-defined]
    assert found[4]["unknown_items"] == [9_999_999]


def test_codes_msgpack_and_seen_items(generative: Server) -> None:
    index = generative.service.first.model.bundle.index  # type: ignore[attr-defined]
    history = torch.tensor([3, 1, 2])
    codes = index.codes_of(history).to(torch.uint16).numpy().astype("<u2").tobytes()
    by_items = post(generative.url, {"history": history.tolist(), "with_codes": True})[2]
    by_codes = post(generative.url, {"codes": base64.b64encode(codes).decode(), "with_codes": True})[2]
    assert (by_items["items"], by_items["scores"]) == (by_codes["items"], by_codes["scores"])
    assert by_items["codes"] == index.codes_of(torch.tensor(by_items["items"])).tolist()
    status, headers, body = call(
        generative.url, "POST", "/v1/recommend", msgspec.msgpack.encode({"codes": codes}), {"content-type": "application/msgpack"}
    )  # fmt: skip
    assert (status, headers["content-type"]) == (200, "application/msgpack")
    assert msgspec.msgpack.decode(body)["items"] == by_items["items"]
    seen = by_items["items"][:2]
    again = post(generative.url, {"history": seen, "exclude_seen": True})[2]
    assert not set(seen) & set(again["items"])


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"history": [1, "x"]}, "$.history[1]"),
        ({"history": [-1]}, "$.history[0]"),
        ({"history": [1], "top": 0}, "$.top"),
        ({"history": [1], "top": 9}, "$.top"),
        ({"history": [1], "codes": ""}, "$.history"),
        ({}, "$.history"),
        ({"history": [1], "pop": 3}, "$"),
        ({"codes": "AAAA"}, "$.codes"),
        ({"codes": "!"}, "$.codes"),
        ({"codes": base64.b64encode(b"\xff\xff" * 3).decode()}, "$.codes[0][0]"),
        ({"codes": "", "exclude_seen": True}, "$.exclude_seen"),
        ({"history": [1], "static": [0.5]}, "$.static"),
        ({"history": [1], "timeout_ms": -1}, "$.timeout_ms"),
        ({"history": [1], "user": ""}, "$.user"),
        ({"history": [2**70]}, "$.history[0]"),
        (b"{", "$"),
        (b"\xff\xfe", "$"),
        (b"[" * 100_000, "$"),
        (b"", "$"),
    ],
)
def test_a_bad_body_is_a_400_with_the_path(generative: Server, body: object, path: str) -> None:
    status, headers, found = post(generative.url, body, x_request_id="mine-1")
    assert status == 400, found
    assert found["error"]["path"] == path
    assert found["request_id"] == headers["x-request-id"] == "mine-1"


def test_other_errors_have_their_own_codes(sleeper: Server) -> None:
    url = sleeper.url
    assert post(url, {"number": 1}, content_type="text/plain")[0] == 415
    assert post(url, {"number": 1}, content_encoding="gzip")[0] == 415
    assert call(url, "POST", "/v1/recommend", b"{}")[0] == 415
    assert get(url, "/v1/recommend")[0] == 405
    assert get(url, "/nothing")[0] == 404
    assert get(url, "/metrics")[0] == 404  # not on this port
    assert call(url, "POST", "/v2/health/ready")[0] == 405
    status, headers, body = call(url, "HEAD", "/v2/health/ready")  # as monitors ask
    assert (status, headers["content-length"], body) == (200, "14", b"")
    assert call(str(sleeper.admin_url), "HEAD", "/metrics")[0] == 200
    assert post(url, {"number": 1}, path="/v2/models/other/infer")[0] == 404
    assert post(url, b"x" * 5000)[0] == 413
    assert post(url, {"number": 1}, x_request_id="not an id!")[0] == 400
    assert post(url, {"number": 21})[2]["number"] == 42


def read_all(sock: socket.socket) -> bytes:
    parts = []
    try:
        while part := sock.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def test_slow_and_endless_senders_are_cut_off(sleeper: Server) -> None:
    head = b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with dial(sleeper.url) as sock:  # half a head
        sock.sendall(head[:30])
        begin = time.monotonic()
        assert read_all(sock).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - begin < 5
    with dial(sleeper.url) as sock:  # one byte at a time, for ever
        try:
            for _ in range(100):
                sock.sendall(b"x")
                time.sleep(0.02)
        except OSError:
            pass
        assert b"200" not in read_all(sock)
    with dial(sleeper.url) as sock:  # half a body
        sock.sendall(head + b"content-length: 50\r\n\r\n{")
        assert read_all(sock).startswith(b"HTTP/1.1 408")
    with dial(sleeper.url) as sock:  # a head without end
        sock.sendall(b"GET / HTTP/1.1\r\n" + b"a: " + b"b" * 3000)
        assert read_all(sock)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400")
    with dial(sleeper.url) as sock:  # a body that says nothing of its length and is too long
        sock.sendall(head + b"transfer-encoding: chunked\r\n\r\n" + b"400\r\n" + b"y" * 0x400 + b"\r\n")
        for _ in range(8):
            try:
                sock.sendall(b"400\r\n" + b"y" * 0x400 + b"\r\n")
            except OSError:
                break
        assert read_all(sock).startswith(b"HTTP/1.1 413")
    with dial(sleeper.url) as sock:
        sock.sendall(b"nonsense\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 400")
    assert post(sleeper.url, {"number": 4})[0] == 200


def test_transfer_codings_other_than_chunked_are_refused(sleeper: Server) -> None:
    head = b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    body = b"c\r\n" + b'{"number":4}' + b"\r\n0\r\n\r\n"
    for coding in (b"gzip, chunked", b"gzip\r\ntransfer-encoding: chunked", b"identity, chunked"):
        with dial(sleeper.url) as sock:
            sock.sendall(head + b"connection: close\r\ntransfer-encoding: " + coding + b"\r\n\r\n" + body)
            said = read_all(sock)
        assert said.startswith(b"HTTP/1.1 501"), said
        assert b"expected chunked" in said
    with dial(sleeper.url) as sock:
        sock.sendall(head + b"connection: close\r\ntransfer-encoding: Chunked\r\n\r\n" + body)
        assert read_all(sock).startswith(b"HTTP/1.1 200")


def test_what_follows_a_chunked_body_sets_no_headers_and_is_limited(sleeper: Server) -> None:
    head = b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n"
    body = b"c\r\n" + b'{"number":4}' + b"\r\n0\r\n"
    with dial(sleeper.url) as sock:
        sock.sendall(head + b"connection: close\r\n\r\n" + body + b"x-request-id: trailer\r\n\r\n")
        said = read_all(sock)
        assert said.startswith(b"HTTP/1.1 200")
        assert b"trailer" not in said
    for endless in (b"a: b\r\n" * 100, b"a" * 500):
        with dial(sleeper.url) as sock:
            begin, sent = time.monotonic(), 0
            sock.sendall(head + b"\r\n" + body[:-5])
            time.sleep(0.05)
            sock.sendall(b"\r\n0\r\n" + b"x: ")
            try:
                while sent < 10**8:  # 0.3 s later the body would be too slow
                    sent += sock.send(endless)
            except OSError:
                pass
            assert sent < 10**7
            assert time.monotonic() - begin < 5
    assert post(sleeper.url, {"number": 4})[0] == 200


def test_requests_that_are_sent_before_the_answers_wait_in_a_short_line(sleeper: Server) -> None:
    pytest.importorskip("httptools")
    with dial(sleeper.url) as sock:
        sock.sendall(b"".join(b"GET /v2 HTTP/1.1\r\nhost: x\r\nx-request-id: n%d\r\n\r\n" % n for n in range(1000)))
        answers = read_all(sock).split(b"HTTP/1.1 ")[1:]
    assert len(answers) == 1 + PIPELINED
    for n, answer in enumerate(answers):
        assert answer.startswith(b"200")
        assert b"x-request-id: n%d\r\n" % n in answer
    assert [b"connection: close" in answer for answer in answers] == [False] * PIPELINED + [True]


def test_connections_are_capped_and_the_cap_recovers(sleeper: Server) -> None:
    held = [dial(sleeper.url) for _ in range(60)]
    try:
        time.sleep(1.0)
        states = []
        for sock in held:
            sock.settimeout(0.01)
            try:
                states.append(sock.recv(100)[:12])
            except TimeoutError:
                states.append(b"open")
            except ConnectionResetError:
                states.append(b"")
        assert states.count(b"open") <= 20
        assert b"HTTP/1.1 503" in states
    finally:
        for sock in held:
            sock.close()
    wait_for(lambda: len(call_or_nothing(sleeper.url)) > 0)
    assert post(sleeper.url, {"number": 4})[0] == 200


def call_or_nothing(url: str) -> bytes:
    try:
        return bytes(get(url, "/v2/health/live")[1])
    except OSError:
        return b""


def test_malformed_bodies_do_no_harm(sleeper: Server) -> None:
    with dial(sleeper.url) as sock:
        file = sock.makefile("rb")
        for n in range(500):
            body = bytes((7 * n + i * i) % 256 for i in range(n % 60))
            head = f"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            status = file.readline()
            assert status.startswith(b"HTTP/1.1 400"), status
            size = 0
            while (line := file.readline()) != b"\r\n":
                name, _, value = line.partition(b":")
                size = int(value) if name.lower() == b"content-length" else size
            file.read(size)


def test_a_client_that_leaves_is_not_computed_for(fronts: int, caplog: pytest.LogCaptureFixture) -> None:
    model = Sleeper({(1, 0): 0.6})
    with Server(model, sla=60.0, port=0, fronts=fronts).background() as server:
        rehearsed = len(model.batches)
        sockets = [dial(server.url) for _ in range(5)]
        body = b'{"number": 1}'
        request = b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body  # fmt: skip
        for sock, times in zip(sockets, (1, 1, 1, 2, 2), strict=True):
            sock.sendall(times * request)  # the last two do not wait for their first answer to send another request
            time.sleep(0.01)
        for sock in sockets[1:]:
            sock.close()
        sockets[0].recv(10)
        scheduler = server.service.first.scheduler
        assert scheduler is not None
        wait_for(lambda: scheduler.running is None and len(scheduler) == 0)
        assert len(model.batches) - rehearsed <= 2  # the one that ran, and at most the one that began meanwhile
    assert not caplog.records


def test_a_busy_server_sheds_at_once_with_the_time_to_come_back(fronts: int) -> None:
    with Server(Sleeper({(1, 0): 0.2}), sla=0.55, port=0, fronts=fronts).background() as server:
        found: list[tuple[int, dict[str, str], float]] = []

        def ask() -> None:
            begin = time.monotonic()
            status, headers, _ = post(server.url, {"number": 1})
            found.append((status, headers, time.monotonic() - begin))

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        shed = [one for one in found if one[0] == 429]
        assert len(shed) >= 6
        assert all(int(headers["retry-after"]) >= 1 for _, headers, _ in shed)
        assert {status for status, _, _ in found} <= {200, 429, 503}
        wait_for(
            lambda: post(server.url, {"number": 1})[0] == 200
        )  # on a loaded machine all of them may have been shed


def test_a_hung_engine_is_told_and_not_waited_for(fronts: int) -> None:
    model = Sleeper({(1, 0): 0.005})
    with Server(model, sla=0.3, port=0, fronts=fronts, limits=Limits(grace=0.1)).background() as server:
        model.extra = 4.0
        status, headers, body = post(server.url, {"number": 1})
        assert server.service.first.scheduler.running is not None  # type: ignore[union-attr] # it hangs still
        assert (status, body["error"]["reason"]) == (503, "engine")
        assert "retry-after" in headers
        assert post(server.url, {"number": 1})[0] in (429, 503)  # would wait for the hung one
        model.extra = 0.0
        wait_for(lambda: post(server.url, {"number": 3})[2].get("number") == 6)


def test_a_failing_engine_is_a_500_and_the_next_request_works(
    sleeper: Server, caplog: pytest.LogCaptureFixture
) -> None:
    model = sleeper.service.first.model
    model.broken = True  # type: ignore[attr-defined]
    try:
        status, _, body = post(sleeper.url, {"number": 1})
    finally:
        model.broken = False  # type: ignore[attr-defined]
    assert (status, body["error"]["reason"]) == (500, "engine")
    assert "RuntimeError" not in body["error"]["message"]  # what went wrong inside is for the log
    assert "RuntimeError: broken" in caplog.text
    assert post(sleeper.url, {"number": 1})[0] == 200


class Lazy(Sleeper):
    """Computes its answers when they are taken, and cannot for numbers below zero."""

    def run(self, bucket: tuple[int, int], jobs: Sequence[Job]) -> Iterator[object]:  # type: ignore[override]
        def answer(job: Job, said: object) -> object:
            if job.data < 0:
                raise RuntimeError("no answer")
            return said

        return map(answer, jobs, super().run(bucket, jobs))


def test_an_answer_that_fails_when_it_is_taken_is_an_error_and_the_engine_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Server(Lazy({(1, 0): 0.002}), sla=60.0, port=0).background() as server:
        assert post(server.url, {"number": -1})[0] == 500
        status, _, body = post(server.url, {"number": 4})
        assert (status, body["number"]) == (200, 8)
    assert "no answer" in caplog.text


def test_every_line_of_the_log_is_json(capfd: pytest.CaptureFixture[str]) -> None:
    """Also of what is no HTTP, which uvicorn logs; its time is that of the event, not of a zone that nobody knows."""
    loggers = [logging.getLogger(name) for name in LOGS]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]

    def provoke() -> str:
        with Server(Sleeper(COST), sla=60.0, port=0).background() as server, dial(server.url) as connection:
            connection.sendall(b"GET /a path HTTP/1.1\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
        return capfd.readouterr().err

    try:
        log_to_stderr(logging.WARNING)
        lines = [json.loads(line) for line in provoke().splitlines()]
        assert "Invalid HTTP" in lines[-1]["message"]
        age = datetime.now(UTC) - datetime.fromisoformat(lines[-1]["at"])
        assert timedelta() <= age < timedelta(minutes=1)
        log_nothing()
        assert provoke() == ""
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)


def test_tokens_are_asked_for_and_rotate(tmp_path: Path, fronts: int) -> None:
    file = tmp_path / "tokens"
    file.write_text("# ours\nfirst-token-0123456789\n")
    with Server(Sleeper(COST), sla=60.0, port=0, admin_port=0, token_file=file, fronts=fronts).background() as server:
        assert post(server.url, {"number": 1})[0] == 401
        assert post(server.url, {"number": 1}, authorization="Bearer nope")[0] == 401
        assert post(server.url, {"number": 1}, authorization="Basic first-token-0123456789")[0] == 401
        assert post(server.url, {"number": 1}, authorization="Bearer first-token-0123456789")[0] == 200
        assert get(server.url, "/v2/models/sleeper")[0] == 401
        assert get(server.url, "/v2/health/ready")[0] == 200
        assert post(server.admin_url or "", {"folder": "x"}, path="/reload")[0] == 401
        file.write_text("second-token-0123456789\n")
        time.sleep(1.1)
        assert post(server.url, {"number": 1}, authorization="Bearer second-token-0123456789")[0] == 200
        assert post(server.url, {"number": 1}, authorization="Bearer first-token-0123456789")[0] == 401
        file.write_text("")  # half-written: the last tokens stay
        time.sleep(1.1)
        for _ in range(8):  # whichever front is asked, also one that was not since the change
            assert post(server.url, {"number": 1}, authorization="Bearer second-token-0123456789")[0] == 200
            assert post(server.url, {"number": 1}, authorization="Bearer first-token-0123456789")[0] == 401


def test_a_token_file_of_any_editor_is_read_and_its_comments_are_no_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("first-token-0123456789\r\n  # a comment that is indented\n", encoding="utf-8-sig")
    tokens = Tokens(file)
    assert tokens.accept("Bearer first-token-0123456789")
    assert not tokens.accept("Bearer # a comment that is indented")
    file.write_text("schlüssel-0123456789€", encoding="utf-8")
    token = "schlüssel-0123456789€".encode().decode("latin-1")  # as a header arrives
    assert Tokens(file).accept(f"Bearer {token}")
    assert not Tokens(file).accept(f"Bearer {token[:-1]}")


def test_tokens_that_are_written_while_the_file_is_read_are_found(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("first-token-0123456789\n")

    class Slow(Tokens):
        def _read(self) -> list[bytes]:
            found = super()._read()
            if "first" in file.read_text():
                file.write_text("another-token-0123456789\n")
            return found

    tokens = Slow(file)
    tokens.refresh()
    assert tokens.accept("Bearer another-token-0123456789")


def test_what_must_not_be_started_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a token"):
        Server(Sleeper(COST), sla=1.0, host="0.0.0.0")
    with pytest.raises(ValueError, match="needs a token"):
        Server(Sleeper(COST), sla=1.0, admin_host="0.0.0.0", admin_port=0)
    with pytest.raises(ValueError, match="port 8000 is given twice"):
        Server(Sleeper(COST), sla=1.0, port=8000, admin_port=8000)
    short = tmp_path / "short"
    short.write_text("abc")
    with pytest.raises(ValueError, match="16 characters"):
        Server(Sleeper(COST), sla=1.0, token_file=short)
    with pytest.raises(ValueError, match="exactly one"):
        Server(Sleeper(COST))
    with pytest.raises(ValueError, match="takes 5"), Server(Sleeper({(1, 0): 0.05}), sla=0.01, port=0).background():
        pass
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="port 99999: expected 0 to 65535"), Server(Sleeper(COST), sla=1.0, port=99999).background():  # fmt: skip
            pass
        with pytest.raises(ValueError, match=r"cannot listen.*hint: another port"), Server(Sleeper(COST), sla=1.0, port=taken.getsockname()[1]).background():  # fmt: skip
            pass
        with pytest.raises(ValueError, match=r"cannot listen.*hint: another --admin-port"), Server(Sleeper(COST), sla=1.0, port=0, admin_port=taken.getsockname()[1]).background():  # fmt: skip
            pass


def test_stopping_answers_whoever_waits(fronts: int) -> None:
    model = Sleeper({(1, 0): 0.1})
    found: list[int] = []
    with Server(model, sla=60.0, port=0, fronts=fronts).background() as server:
        threads = [threading.Thread(target=lambda: found.append(post(server.url, {"number": 1})[0])) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.08)
    for thread in threads:
        thread.join()
    assert found == [200] * 4


def test_it_is_warm_before_it_is_ready_and_captures_nothing_after(generative: Server) -> None:
    for n in (0, 3, 20):
        assert post(generative.url, {"history": list(range(1, n + 1))})[0] == 200
    wait_for(lambda: b'code="200"' in get(generative.admin_url or "", "/metrics")[1])  # fronts tell what they counted
    metrics = get(generative.admin_url or "", "/metrics")[1].decode()
    assert 'loka_captures{model="tiny"} 1.0' in metrics  # batch-invariant: one bucket
    assert 'loka_captures_after_ready{model="tiny"} 0.0' in metrics
    parser = pytest.importorskip("prometheus_client.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(metrics)}
    answered = [s for s in families["loka_requests"].samples if s.labels == {"model": "tiny", "code": "200"}]
    assert answered[0].value >= 3
    assert families["loka_latency_seconds"].type == "histogram"


def test_a_warming_server_is_alive_but_not_ready(fronts: int) -> None:
    asked = threading.Event()

    class Slow(Sleeper):
        def warm(self) -> None:
            asked.wait(60)
            super().warm()

    server = Server(Slow(COST), sla=60.0, port=0, fronts=fronts)
    held = server.background()
    thread = threading.Thread(target=held.__enter__, daemon=True)
    thread.start()
    server._listening.wait(10)
    wait_for(lambda: len(call_or_nothing(server.url)) > 0)
    assert get(server.url, "/v2/health/live")[0] == 200
    assert get(server.url, "/v2/health/ready")[0] == 503
    status, headers, body = post(server.url, {"number": 1})
    assert (status, body["error"]["reason"], headers["retry-after"]) == (503, "warming", "1")
    asked.set()
    thread.join(60)
    assert post(server.url, {"number": 1})[0] == 200
    held.__exit__(None, None, None)


def test_a_server_that_is_stopped_while_it_warms_up_tells_that_a_thread_is_in_the_model(fronts: int) -> None:
    going = threading.Event()

    class Slow(Sleeper):
        def warm(self) -> None:
            going.wait(60)

    server = Server(Slow(COST), sla=60.0, port=0, fronts=fronts)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    server._listening.wait(30)
    server.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert server.service.busy
    going.set()
    wait_for(lambda: not server.service.busy)


def test_a_ranker_scores_rows_and_picks_candidates(tmp_path: Path, fronts: int) -> None:
    with Server(make_ranker(tmp_path), sla=60.0, port=0, fronts=fronts).background() as server:
        features = {"age": 3, "price": [1.0, 2.5, 0.5], "user": 7, "item": [1, 2, 999], "seen": [4, 5, 6, 7, 8, 9]}
        status, _, all_rows = post(server.url, {"features": features})
        assert status == 200
        assert set(all_rows["scores"]) == set(SCHEMA.labels)
        assert (all_rows["unknown"], all_rows["cut"]) == (1, 1)
        best = post(server.url, {"features": features, "ids": [10, 20, 30], "top": 2, "label": "buy"})[2]
        order = sorted(range(3), key=lambda row: -all_rows["scores"]["buy"][row])[:2]
        assert best["rows"] == order
        assert best["ids"] == [10 * (row + 1) for row in order]
        packed = {**features, "price": base64.b64encode(torch.tensor([1.0, 2.5, 0.5]).numpy().tobytes()).decode()}
        assert post(server.url, {"features": packed})[2]["scores"] == all_rows["scores"]
        for change, path in (
            ({"price": [1.0]}, "$.features.item"),
            ({"price": ["x"]}, "$.features.price[0]"),
            ({"price": "x"}, "$.features.price"),
            ({"item": [1.5, 2, 3]}, "$.features.item[0]"),
            ({"item": [-1, 2, 3]}, "$.features.item[0]"),
            ({"other": 1}, "$.features.other"),
            ({"seen": 3}, "$.features.seen"),
        ):
            status, _, body = post(server.url, {"features": features | change})
            assert (status, body["error"]["path"]) == (400, path), body
        for broken in (  # behind the field that is invalid, too
            b'{"features": {"age": true',
            b'{"features": {"age": true}, "features": 5}',
            b'{"features": {"age": true}, "user": ' + b"[" * 100_000,
        ):
            status, _, body = post(server.url, broken)
            assert (status, body["error"]["path"]) == (400, "$.features[...]"), body
        status, _, data = post(server.url, b"\x82\xa8features\x81\xa3age\xc3\xc1", content_type="application/msgpack")
        assert (status, msgspec.msgpack.decode(data)["error"]["path"]) == (400, "$.features[...]")
        many = {"age": 3, "price": [1.0] * 33, "user": 7, "item": 1, "seen": []}
        assert post(server.url, {"features": many})[0] == 400


def test_integers_of_more_than_64_bits_are_the_clients_fault_in_every_front(tmp_path: Path, fronts: int) -> None:
    features = {"age": [0.5, 1], "price": [1, 2], "user": [1, 2], "item": [3, 4], "seen": [[1, 2], [3, 4]]}
    with Server(make_ranker(tmp_path), sla=60.0, port=0, fronts=fronts).background() as server:
        for number in (2**64, -(2**63) - 1, 10**30):
            for change, path in (
                ({"ids": [5, number]}, "$.ids[1]"),
                ({"user": number}, "$.user"),
                ({"features": features | {"user": [1, number]}}, "$.features.user[1]"),
                ({"features": features | {"user": number}}, "$.features.user[0]"),
            ):
                status, _, found = post(server.url, {"features": features} | change)
                assert (status, found["error"]["path"]) == (400, path), found
        ids = [2**64 - 1, -(2**63)]
        found = post(server.url, {"features": features, "ids": ids, "top": 2})
        assert found[0] == 200
        assert sorted(found[2]["ids"]) == sorted(ids)


def test_a_ranker_takes_tensors_that_fit_its_columns(tmp_path: Path, fronts: int) -> None:
    fitting = {
        "age": {"datatype": "FP64", "shape": [2], "data": [0.5, 1]},
        "price": {"datatype": "FP32", "shape": [2, 1], "data": [1, 2]},
        "user": {"datatype": "UINT64", "shape": [2], "data": [1, 2]},
        "item": {"datatype": "UINT8", "shape": [2], "data": [3, 4]},
        "seen": {"datatype": "INT32", "shape": [2, 2], "data": [1, 2, 3, 4]},
    }

    def infer(change: dict, parameters: dict, **headers: str) -> tuple[int, dict]:
        inputs = [{"name": name, **one} for name, one in (fitting | change).items()]
        status, _, found = post(
            server.url, {"inputs": inputs, "parameters": parameters}, path="/v2/models/ranker/infer", **headers
        )
        return status, found

    with Server(make_ranker(tmp_path), sla=60.0, port=0, fronts=fronts).background() as server:
        features = {"age": [0.5, 1], "price": [1, 2], "user": [1, 2], "item": [3, 4], "seen": [[1, 2], [3, 4]]}
        plain = post(server.url, {"features": features})[2]["scores"]
        status, found = infer({}, {})
        assert status == 200, found
        assert {out["name"]: out["data"] for out in found["outputs"]} == plain
        assert infer({}, {}, content_encoding="gzip")[0] == 415
        for change, parameters, path in (
            ({"age": {"datatype": "FP32", "shape": [], "data": [1.0]}}, {}, "$.inputs.age"),
            ({"user": {"datatype": "FP32", "shape": [2], "data": [1.7, 2.2]}}, {}, "$.inputs.user"),  # not ids 1 and 2
            ({"user": {"datatype": "UINT64", "shape": [1], "data": [2**64 - 1]}}, {}, "$.inputs.user"),
            ({"seen": {"datatype": "FP32", "shape": [2, 1], "data": [1.5, 2]}}, {}, "$.inputs.seen"),
            ({}, {"features": features}, "$.parameters.features"),
            ({}, {"top": "many"}, "$.parameters.top"),
            ({}, {"top": 0}, "$.parameters.top"),
            ({}, {"label": "nothing"}, "$.parameters.label"),
            ({}, {"ids": [1, True]}, "$.parameters.ids[1]"),
            ({}, {"ids": [1, 2**64]}, "$.parameters.ids[1]"),
            ({}, {"strange": 1}, "$.parameters.strange"),
            ({"user": {"datatype": "INT64", "shape": [2], "data": [1, -2]}}, {}, "$.inputs.user[1]"),
            (
                {"age": {"datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8.0}}},
                {},
                "$.inputs[0].parameters.binary_data_size",
            ),
        ):
            status, found = infer(change, parameters)
            assert (status, found["error"]["path"]) == (400, path), found


def test_open_inference_protocol_by_hand(generative: Server) -> None:
    url = generative.url
    body = {"inputs": [{"name": "history", "shape": [1, 3], "datatype": "INT64", "data": [[1, 2, 3]]}], "parameters": {"top": 4}}  # fmt: skip
    scheduler = generative.service.first.scheduler
    assert scheduler is not None
    scheduler.margins._sent.clear()
    status, _, found = post(url, body, path="/v2/models/tiny/infer")
    assert status == 200
    assert get(url, "/v2/models/tiny")[0] == 200  # what follows an answer has happened when the next one is there
    wait_for(lambda: len(scheduler.margins._sent) == 1)  # how long it took to leave is learned on this path too
    outputs = {out["name"]: out for out in found["outputs"]}
    plain = post(url, {"history": [1, 2, 3], "top": 4})[2]
    assert outputs["items"]["data"] == plain["items"]
    assert outputs["items"]["shape"] == [4]
    assert json.loads(get(url, "/v2/models/tiny")[1])["versions"] == ["v0"]
    assert get(url, "/v2/models/tiny/versions/v0/ready")[0] == 200
    assert get(url, "/v2/models/tiny/versions/v9/ready")[0] == 404
    for change, path in (
        ({"shape": [2]}, "$.inputs[0].data"),
        ({"data": [1, 2.7, 3]}, "$.inputs[0].data"),  # no item is cut off to another one
        ({"data": ["1", "2", "3"]}, "$.inputs[0].data"),
        ({"data": [1, None, 3]}, "$.inputs[0].data"),
        ({"datatype": "FP99"}, "$.inputs[0].datatype"),
        ({"name": "nothing"}, "$.inputs"),
        ({"datatype": "FP32"}, "$.inputs.history"),
        ({"parameters": {"binary_data_size": 9}, "data": None}, "$.inputs[0].parameters.binary_data_size"),
    ):
        bad = {"inputs": [body["inputs"][0] | change]}  # type: ignore[index, operator]
        status, _, found = post(url, bad, path="/v2/models/tiny/infer")
        assert (status, found["error"]["path"]) == (400, path), found
    for parameters, path in (
        ({"top": 0}, "$.parameters.top"),  # as the request's type says
        ({"top": 99_999}, "$.parameters.top"),  # as this model says
        ({"timeout_ms": "soon"}, "$.parameters.timeout_ms"),
        ({"strange": 1}, "$.parameters.strange"),
    ):
        status, _, found = post(url, body | {"parameters": parameters}, path="/v2/models/tiny/infer")
        assert (status, found["error"]["path"]) == (400, path), found


def test_open_inference_protocol_with_tritons_own_client(generative: Server) -> None:
    np = pytest.importorskip("numpy")
    triton = pytest.importorskip("tritonclient.http")
    client = triton.InferenceServerClient(generative.url.removeprefix("http://"))
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.get_model_metadata("tiny")["name"] == "tiny"
    tensor = triton.InferInput("history", [3], "INT64")
    tensor.set_data_from_numpy(np.array([1, 2, 3], dtype=np.int64))  # binary, as the client does it by default
    found = client.infer("tiny", [tensor], outputs=[triton.InferRequestedOutput("items"), triton.InferRequestedOutput("scores")], parameters={"top": 4})  # fmt: skip
    plain = post(generative.url, {"history": [1, 2, 3], "top": 4})[2]
    assert found.as_numpy("items").tolist() == plain["items"]
    assert found.as_numpy("scores").tolist() == plain["scores"]
    client.close()
