"""Front processes: what they share with the engine's process, and what happens when one of them, or that process, dies."""

import asyncio
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loka.serving import Limits, Policy, RankRequest, Server, Service
from loka.serving import link as frames
from loka.serving.call import Outcome
from loka.serving.front_process import FrontProcess, RemoteService
from loka.serving.fronts import Fronts, Process, Reply, bind_fronts
from loka.serving.queues import Batch
from loka.serving.rank_reader import RankReader
from loka.serving.rehearsal import Turns
from loka.serving.runner import Refused, Ticket
from loka.serving.servable import FieldError, Job, Sealed
from loka.serving.times import Bucket
from loka.serving.wire import Codec

from .client import call, dial, get, post, wait_for
from .sleeper import Ask, Said, Sleeper, SleeperReader
from .small import SCHEMA, make_ranker

pytest.importorskip("uvicorn")
COST = {(1, 0): 0.002, (4, 0): 0.004}
ASK = b'POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 13\r\n\r\n{"number": 1}'


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def read_status(sock: Any) -> bytes:
    """The status of the next response; nothing if the connection broke."""
    try:
        return bytes(sock.recv(65536)[9:12])
    except OSError:
        return b""


def test_answers_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    model, source = make_ranker(tmp_path, batch_invariant=True), random.Random(0)
    bodies: list[dict[str, Any]] = []
    for n in range(12):
        rows = source.randint(1, 32)
        features = {
            "age": source.gauss(0, 1) if n % 2 else [source.gauss(0, 1) for _ in range(rows)],
            "price": [source.gauss(0, 1) for _ in range(rows)],
            "user": source.randrange(120),
            "item": [source.randrange(60) for _ in range(rows)],
            "seen": [source.randrange(60) for _ in range(n)]
            if n % 3
            else [[source.randrange(60)] * k for k in range(rows)],
        }
        bodies.append({"features": features, "top": 3, "label": "buy", "ids": list(range(100, 100 + rows))} if n % 4 else {"features": features})  # fmt: skip
    found = []
    for fronts in (0, 2):
        with Server(model, sla=60.0, port=0, fronts=fronts).background() as server:
            told = [post(server.url, body)[2] for body in bodies]
            head = {"content-type": "application/msgpack"}
            packed = [call(server.url, "POST", "/v1/recommend", msgspec.msgpack.encode(b), head)[2] for b in bodies]
            v2 = {"inputs": [{"name": name, "shape": [2], "datatype": "FP32" if name in SCHEMA.dense else "INT64", "data": [1, 2]} for name in ("age", "price", "user", "item")]
                  + [{"name": "seen", "shape": [2, 2], "datatype": "INT64", "data": [1, 2, 3, 4]}], "parameters": {"top": 1}}  # fmt: skip
            told += [post(server.url, v2, path="/v2/models/ranker/infer")[2]]
        told += [msgspec.msgpack.decode(one) for one in packed]
        assert all("error" not in one for one in told), told
        found.append([{k: v for k, v in one.items() if k not in ("request_id", "id")} for one in told])
    assert found[0] == found[1]


def test_a_packed_request_is_unpacked_as_it_was_read() -> None:
    reader = pickle.loads(pickle.dumps(RankReader(SCHEMA, 32)))
    for seen in ([1, 2, 60, 3, 4, 5, 6], [], [[1], [], [2, 3]]):
        features = {"age": 1.5, "price": [1.0, 2.0, 3.0], "user": [1, 2, 300], "item": 7, "seen": seen}
        request = RankRequest(features=features)
        wanted, packed = reader.rows.read(request).data, reader.pack(request)
        data = memoryview(b"".join(np.ascontiguousarray(array).tobytes() for array in packed.arrays))
        sealed = Sealed(msgspec.msgpack.encode(request), RankRequest)
        job = reader.unpack(sealed, packed, data)
        assert (job.units, job.raw, job.request.open()) == (3, True, request)
        found = job.data
        assert (found.count, found.unknown, found.cut) == (wanted.count, wanted.unknown, wanted.cut)
        for kind in ("dense", "categorical"):
            for part in ("same", "places", "varying"):
                a, b = (getattr(getattr(rows, kind), part) for rows in (found, wanted))
                assert a.dtype == b.dtype
                assert np.array_equal(a, b)
        assert [row.tolist() for row in found.sequences["seen"]] == [row.tolist() for row in wanted.sequences["seen"]]


def test_fronts_do_without_torch() -> None:
    """It takes a second to import and hundreds of megabytes, in each of them."""
    code = "import sys, loka.serving.front_process, loka.serving.rank_reader, loka.serving.recommend; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_request_is_counted_once() -> None:
    with Server(Sleeper(COST), sla=60.0, port=0, admin_port=0, fronts=2).background() as server:
        for n in range(30):
            assert post(server.url, {"number": n})[0] == 200
        for _ in range(7):
            assert post(server.url, b"{")[0] == 400
        told = server.service.telemetry
        codes = told.counters.setdefault("loka_requests_total", {})
        wait_for(lambda: sum(codes.values()) >= 37)
        time.sleep(0.3)  # would they be counted again?
        assert codes == {(("model", "sleeper"), ("code", "200")): 30, (("model", "-"), ("code", "400")): 7}
        metrics = get(server.admin_url or "", "/metrics")[1].decode()
        assert 'loka_requests_total{model="sleeper",code="200"} 30\n' in metrics
        assert 'loka_latency_seconds_count{model="sleeper"} 30\n' in metrics
        assert 'loka_queue_seconds_count{model="sleeper"} 30\n' in metrics
        seconds = json.loads(get(server.admin_url or "", "/stats.json")[1])["seconds"]
        assert sum(second["answered"] for second in seconds) == 30


def test_a_front_that_dies_is_replaced_and_loses_only_its_own(caplog: pytest.LogCaptureFixture) -> None:
    model, free = Sleeper({(32, 0): 0.001}), threading.Event()
    run = model.run
    free.set()
    model.run = lambda *given: (free.wait(60), run(*given))[1]  # type: ignore[method-assign]
    with Server(model, sla=60.0, port=0, fronts=2).background() as server:
        free.clear()
        before = server._fronts.pids
        sockets = [dial(server.url) for _ in range(24)]
        try:
            for sock in sockets:
                sock.sendall(ASK)
            scheduler = server.service.first.scheduler
            assert scheduler is not None
            wait_for(lambda: scheduler.running is not None and len(scheduler) + len(scheduler.running.entries) == 24)
            os.kill(before[0], signal.SIGKILL)
            wait_for(lambda: "a front died" in caplog.text)
            free.set()
            found = [read_status(sock) for sock in sockets]
        finally:
            for sock in sockets:
                sock.close()
        assert set(found) == {b"200", b""}  # 24 connections that are all on one front: one chance in 8 million
        wait_for(lambda: server._fronts.ready)
        assert len(set(server._fronts.pids) - set(before)) == 1
        for n in range(12):
            assert post(server.url, {"number": n})[2]["number"] == 2 * n
        wait_for(lambda: len(scheduler) == 0 and scheduler.running is None)  # what nobody waits for left the queue
        assert not any(process._pending for process in server._fronts._processes)
    assert "a front died" in caplog.text
    assert not any(map(is_running, [*before, *server._fronts.pids]))


SCRIPT = """
    import sys
    sys.path[:0] = {path!r}
    from serving.sleeper import Sleeper
    from loka.serving import Server
    import threading, time
    model = Sleeper({{(4, 0): 0.001}})
    server = Server(model, sla=60.0, port=0, fronts=2)
    def count():
        scheduler = server.service.first.scheduler
        running = scheduler.running
        return sum(model.batches) + len(scheduler) + (0 if running is None else len(running.entries))
    def tell():
        while not server.ready:
            time.sleep(0.01)
        model.cost[4, 0] = {seconds}
        model.batches.clear()
        print(server.port, *server._fronts.pids, flush=True)
        while count() < {requests}:
            time.sleep(0.001)
        print("queued", flush=True)
    threading.Thread(target=tell, daemon=True).start()
    server.run()
"""


def start(seconds: float, requests: int) -> tuple["subprocess.Popen[str]", str, list[int]]:
    """A server in a process of its own, its URL, and its fronts; it says when so many requests have come."""
    code = textwrap.dedent(SCRIPT.format(path=sys.path, seconds=seconds, requests=requests))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port, *pids = map(int, process.stdout.readline().split())
    return process, f"http://127.0.0.1:{port}", pids


def test_without_the_engines_process_the_fronts_end_and_nobody_hangs() -> None:
    process, url, pids = start(30.0, 6)
    try:
        sockets = [dial(url) for _ in range(6)]
        for sock in sockets:
            sock.sendall(ASK)
        assert process.stdout is not None
        assert process.stdout.readline() == "queued\n"
        process.kill()
        assert {read_status(sock) for sock in sockets} <= {b"503", b""}
        wait_for(lambda: not any(map(is_running, pids)))
        for sock in sockets:
            sock.close()
        with pytest.raises(OSError, match="refused"):
            dial(url)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("whole_group", [False, True])
def test_sigterm_answers_whoever_waits(whole_group: bool) -> None:
    process, url, pids = start(0.3, 10)
    try:
        sockets = [dial(url) for _ in range(10)]
        for sock in sockets:
            sock.sendall(ASK)
        assert process.stdout is not None
        assert process.stdout.readline() == "queued\n"
        for pid in [process.pid, *(pids if whole_group else [])]:
            os.kill(pid, signal.SIGTERM)
        assert [read_status(sock) for sock in sockets] == [b"200"] * 10
        assert process.wait(30) == 0
        assert not any(map(is_running, pids))
        for sock in sockets:
            sock.close()
    finally:
        process.kill()
        process.wait()


def test_a_ranker_is_replaced_while_packed_requests_wait(tmp_path: Path) -> None:
    """They were read for the old model, in another process; the new one reads them again."""
    old, new = make_ranker(tmp_path / "old", rows=(8,)), make_ranker(tmp_path / "new", rows=(32,), seed=1)
    new.version = "2"
    held = threading.Event()
    run = old.run

    def wait(*args: Any) -> Any:
        held.wait(60)
        return run(*args)

    features = {"age": 3, "price": [1.0, 2.5, 0.5], "user": 7, "item": [1, 2, 999], "seen": [4, 5, 6]}
    found: list[dict[str, Any]] = []
    held.set()
    with Server(old, sla=60.0, port=0, fronts=2).background() as server:
        old.run = wait  # type: ignore[method-assign]
        held.clear()
        threads = [
            threading.Thread(target=lambda: found.append(post(server.url, {"features": features})[2])) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        runner = server.service.first
        wait_for(lambda: runner.scheduler is not None and len(runner.scheduler) > 0)
        assert server._loop is not None
        swapping = asyncio.run_coroutine_threadsafe(runner.swap(new, runner.prepare(new, Turns())), server._loop)
        wait_for(lambda: runner._next is not None)
        held.set()
        swapping.result(60)
        for thread in threads:
            thread.join(60)
        assert {one["version"] for one in found} == {"1", "2"}
        many = {**features, "price": [1.0] * 20, "item": 3, "age": 1.0}
        wait_for(lambda: post(server.url, {"features": many})[0] == 200)  # 20 rows: what the new model alone can read
        after = post(server.url, {"features": features})[2]
    job = new.read(RankRequest(features=features))
    (direct,) = new.run(new.buckets[0], [job])
    assert after["scores"] == direct.scores  # type: ignore[union-attr]
    assert len(found) == 6
    assert all(one["scores"] == direct.scores for one in found if one["version"] == "2")  # type: ignore[union-attr]


def test_what_cannot_be_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unread(Sleeper):
        reader = None  # type: ignore[assignment]

    with pytest.raises(ValueError, match="the model sleeper has no `reader`"):
        Server(Unread(COST), sla=1.0, port=0, fronts=2)
    script = type("Script", (SleeperReader,), {"__module__": "__main__"})
    monkeypatch.setattr(Unread, "reader", script())
    with pytest.raises(ValueError, match=r"Script, of the model sleeper, is defined in the script.*hint: move it"):
        Server(Unread(COST), sla=1.0, port=0, fronts=2)
    with pytest.raises(ValueError, match="fronts=-1: expected a number of processes"):
        Server(Sleeper(COST), sla=1.0, port=0, fronts=-1)
    with pytest.raises(ValueError, match="expected one a front"):
        Server(Sleeper(COST), sla=1.0, port=0, fronts=4, limits=Limits(connections=3))
    with Server(Sleeper(COST), sla=60.0, port=0, fronts=2).background() as server:
        with (
            pytest.raises(ValueError, match=r"cannot listen.*hint: another port"),
            Server(Sleeper(COST), sla=60.0, port=server.port, fronts=2).background(),
        ):
            pass
        assert post(server.url, {"number": 1})[0] == 200
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="ended before it listened"), Server(Sleeper(COST), sla=60.0, port=0, fronts=2).background():  # fmt: skip
        pass


class Post:
    """A link that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, frame: Any) -> None:
        self.sent.append(frame)


def test_a_front_uses_its_memory_again_and_sheds_when_there_is_none() -> None:
    async def work() -> None:
        service = Service(Sleeper(COST), policy=Policy(sla=60.0))
        fronts = Fronts(service, 1, limits=Limits(), token_file=None, verbose=False)
        post, size = Post(), 64 * 3
        remote = RemoteService(pickle.loads(fronts.describe(settings=True).data), post, memoryview(bytearray(size)))  # type: ignore[arg-type]
        ask = service.codec.decode(b'{"number": 3}', "application/json")
        tickets = [remote.submit(ask, remote.first, arrived=time.monotonic()) for _ in range(3)]
        with pytest.raises(Refused) as refused:
            remote.submit(ask, remote.first, arrived=time.monotonic())
        assert (refused.value.status, refused.value.reason) == (429, "queue")
        with pytest.raises(Refused) as refused:
            remote.submit(type(ask)(number=3, user="u" * size), remote.first, arrived=time.monotonic())
        assert (refused.value.status, refused.value.reason) == (413, "size")  # waiting would not help
        first, second, third = post.sent
        told = {"id": first.id, "name": "s", "version": "7", "raw": False, "started": 0.0, "ended": 0.0, "bucket": (1, 0), "batch": 1}  # fmt: skip
        remote.hear(frames.Answer(data=msgspec.msgpack.encode({"number": 6, "version": "7"}), **told))  # type: ignore[arg-type]
        assert (tickets[0].future.result().number, tickets[0].model.version) == (6, "7")  # type: ignore[union-attr]
        remote.first.cancel(tickets[1])
        assert post.sent[-1] == frames.Cancel(second.id)
        remote.hear(frames.Released(second.id))
        remote.hear(frames.Refusal(third.id, 429, "late", "would be answered too late", 0.5))
        with pytest.raises(Refused, match="too late"):
            tickets[2].future.result()
        assert remote._blocks._free == [(0, size)]
        assert not remote._asked

    asyncio.run(work())


def test_what_a_dead_front_asked_is_not_answered_to_the_one_that_replaces_it() -> None:
    """Both count their requests from zero: an answer to the wrong one would free memory that is in use."""

    async def work() -> None:
        service = Service(Sleeper(COST), policy=Policy(sla=60.0))
        process = Process(Fronts(service, 1, limits=Limits(), token_file=None, verbose=False), None)  # type: ignore[arg-type]
        frame = frames.Submit(0, "sleeper", 0, 0.0, "r", None, 0, 0, 0)
        links, replies = [Post(), Post()], []
        for each in links:
            process.link = each  # type: ignore[assignment]
            replies.append(Reply(process, frame, service.first))
            process._pending[0] = replies[-1]
        replies[0].gone = True  # its batch was running when the front died, and ends now
        replies[0].set_result(None)
        assert (links[0].sent, links[1].sent) == ([frames.Released(0)], [])
        assert process._pending == {0: replies[1]}
        replies[1].set_exception(Refused(429, "late", "would be answered too late"))
        assert links[1].sent[0].status == 429
        assert not process._pending

    asyncio.run(work())


def test_integers_that_only_json_has_are_the_clients_fault_and_leave_nothing_behind() -> None:
    async def work() -> None:
        service = Service(Sleeper(COST), policy=Policy(sla=60.0))
        fronts = Fronts(service, 1, limits=Limits(), token_file=None, verbose=False)
        sender = frames.Link(frames.TO_FRONT, lambda _: None, lambda: None)
        sender.connection_made(object())  # type: ignore[arg-type]
        remote = RemoteService(pickle.loads(fronts.describe(settings=True).data), sender, memoryview(bytearray(640)))
        for codec, body in (
            (remote.codec, b'{"number": 3, "user": 1000000000000000000000000}'),
            (Codec(Outcome), b'{"request_id": "r", "name": "click", "value": 1, "user": 1000000000000000000000000}'),
        ):
            with pytest.raises(Refused, match="more than 64 bits") as refused:
                codec.decode(body, "application/json")
            assert (refused.value.status, refused.value.path) == (400, "$.user")
        with pytest.raises(FieldError, match="more than 64 bits"):  # within a field, which nobody has looked into
            remote.submit(Ask(number=3, user=10**24), remote.first, arrived=time.monotonic())
        assert (remote._blocks._free, remote._asked, remote._outcomes) == ([(0, 640)], {}, {})

    asyncio.run(work())


def test_two_servers_cannot_have_the_same_port_while_their_fronts_start() -> None:
    sockets = bind_fronts("127.0.0.1", 0, 2)
    try:
        with pytest.raises(ValueError, match=r"cannot listen.*hint: another port"):
            bind_fronts("127.0.0.1", sockets[0].getsockname()[1], 2)
    finally:
        for sock in sockets:
            sock.close()


def test_a_server_may_be_made_in_one_process_and_run_in_another(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    with monkeypatch.context() as made_elsewhere:
        made_elsewhere.setattr(os, "getpid", lambda: 1)
        server = Server(Sleeper(COST), sla=60.0, port=0, fronts=1)
    with server.background():
        codes = server.service.telemetry.counters.setdefault("loka_requests_total", {})
        for n in range(3):
            assert post(server.url, {"number": n})[0] == 200
            wait_for(lambda n=n: sum(codes.values()) == n + 1)  # type: ignore[misc]  # its parent was looked at
    assert "a front died" not in caplog.text


def test_a_front_that_did_not_start_in_time_is_forgotten() -> None:
    async def work() -> None:
        service = Service(Sleeper(COST), policy=Policy(sla=60.0))
        process = Process(Fronts(service, 1, limits=Limits(), token_file=None, verbose=False), None)  # type: ignore[arg-type]
        process.link = made = Post()  # type: ignore[assignment]
        process.up.cancel()  # as asyncio.wait_for does
        process._lost(made)  # type: ignore[arg-type]
        assert process.link is None
        assert not process._tasks  # whoever waited for it starts another

    asyncio.run(work())


def test_a_front_that_cannot_listen_does_not_say_that_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loka.serving.front_process.log_to_stderr", lambda level: None)

    async def work() -> None:
        service = Service(Sleeper(COST), policy=Policy(sla=60.0))
        fronts = Fronts(service, 1, limits=Limits(), token_file=None, verbose=False)
        (ours, theirs), heard = socket.socketpair(), []
        memory = os.memfd_create("test")
        os.ftruncate(memory, fronts.settings.memory)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wrong:
            link = frames.Link(frames.TO_ENGINE, heard.append, lambda: None)
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
            link.send(fronts.describe(settings=True))
            with pytest.raises(ValueError, match=r"SOCK_STREAM|Stream Socket"):
                await asyncio.wait_for(FrontProcess(theirs, memory, wrong).serve(), 30)
        assert not heard
        link.close()
        os.close(memory)

    asyncio.run(work())


def test_a_model_without_a_reader_does_not_replace_one_that_has_one() -> None:
    class Unread(Sleeper):
        reader = None  # type: ignore[assignment]

    service = Service(Sleeper(COST), policy=Policy(sla=60.0), opener=lambda _: Unread(COST))
    with pytest.raises(ValueError, match="it has no `reader`"):
        service._open(service.first, "folder", [])


def test_an_answer_that_cannot_be_sent_fails_alone() -> None:
    """Raised in the loop over a batch, it would fail the requests of others."""

    async def work() -> None:
        service = Service(Sleeper(COST), policy=Policy(sla=60.0))
        process = Process(Fronts(service, 1, limits=Limits(), token_file=None, verbose=False), None)  # type: ignore[arg-type]
        process.link = sent = Post()  # type: ignore[assignment]
        batch = Batch(Bucket(4, 0), [], 0.0, 0.0, 0.0)
        for n, number in enumerate((2**70, 3)):
            reply = Reply(process, frames.Submit(n, "sleeper", 0, 0.0, "r", None, 0, 0, 0), service.first)
            reply.ticket = Ticket(reply, Job(None, 1, 0, None), None, service.first.model, batch, 0.0)
            reply.set_result(Said(number=number, version="1"))
            assert reply.done()
        assert (sent.sent[0].status, type(sent.sent[1])) == (500, frames.Answer)

    asyncio.run(work())
