"""Putting a new model in place while requests come: none lost, a bad one keeps the old."""

import asyncio
import contextlib
import gc
import http.client
import json
import threading
import time
import weakref
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from loka.inference import EngineConfig
from loka.serving import Servable, Server, open_model

from .client import post
from .sleeper import Sleeper
from .small import make_generative, write_bundle

pytest.importorskip("uvicorn")
COST = {(1, 0): 0.002, (4, 0): 0.004}


def open_sleeper(folder: str) -> Sleeper:
    if folder == "missing":
        raise ValueError("holds no bundle")
    model = Sleeper({(1, 0): 9.0 if folder == "slow" else 0.002, (2, 0): 0.003}, version=folder)
    if folder == "broken":
        model.broken = True
    return model


class Mute(Sleeper):
    """Answers, but with nothing."""

    def run(self, bucket: tuple[int, int], jobs: object) -> list:
        return [type(one)(number=-1, version=one.version) for one in super().run(bucket, jobs)]  # type: ignore[arg-type]


def wait_until(found: list, count: int) -> None:
    end = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.mark.parametrize("fronts", [0, 2])
def test_a_new_model_takes_over_between_batches_and_nobody_is_lost(fronts: int) -> None:
    with Server(
        Sleeper(COST, version="old"), sla=60.0, port=0, admin_port=0, opener=open_sleeper, fronts=fronts
    ).background() as server:
        found: list[tuple[int, str]] = []
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                status, _, body = post(server.url, {"number": 1})
                found.append((status, body.get("version", "")))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        wait_until(found, 8)
        status, _, body = post(server.admin_url or "", {"folder": "new"}, path="/reload")
        wait_until(found, len(found) + 20)
        stop.set()
        for thread in threads:
            thread.join()
        assert (status, body["version"]) == (200, "new")
        assert {code for code, _ in found} == {200}
        versions = [version for _, version in found]
        assert set(versions) == {"old", "new"}
        assert set(versions[-3:]) == {"new"}
        assert server.service.first.captured_since_ready == 0


def test_a_replaced_model_is_let_go_also_if_no_other_request_comes() -> None:
    """Else two reloads of an idle server need memory for three models."""
    with Server(open_sleeper("old"), sla=60.0, port=0, admin_port=0, opener=open_sleeper).background() as server:
        model = weakref.ref(server.service.first.model)
        parts = urlsplit(server.url)
        client = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=30)  # stays open
        client.request("POST", "/v1/recommend", json.dumps({"number": 1}), {"content-type": "application/json"})
        assert client.getresponse().read()
        assert post(server.admin_url or "", {"folder": "new"}, path="/reload")[0] == 200
        end = time.monotonic() + 10
        while gc.collect() >= 0 and model() is not None:
            assert time.monotonic() < end, gc.get_referrers(model())
            time.sleep(0.01)
        client.close()


@pytest.mark.parametrize(("folder", "why"), [("missing", "no bundle"), ("broken", "broken")])
def test_a_bad_bundle_keeps_the_old_model(folder: str, why: str) -> None:
    with Server(
        Sleeper(COST, version="old"), sla=60.0, port=0, admin_port=0, opener=open_sleeper
    ).background() as server:
        assert post(server.url, {"number": 1})[0] == 200
        status, _, body = post(server.admin_url or "", {"folder": folder}, path="/reload")
        assert status == 409
        assert why in body["error"]["message"]
        assert "the old model stays" in body["error"]["message"]
        assert post(server.url, {"number": 2})[2]["version"] == "old"


def test_a_model_that_answers_nothing_or_too_slowly_is_refused() -> None:
    models = {"mute": Mute(COST, version="mute"), "slow": Sleeper({(1, 0): 0.7}, version="slow")}
    with Server(
        Sleeper(COST), sla=0.6, port=0, admin_port=0, opener=lambda folder: models[folder]
    ).background() as server:
        assert post(server.url, {"number": 1})[0] == 200
        assert "empty" in post(server.admin_url or "", {"folder": "mute"}, path="/reload")[2]["error"]["message"]
        assert (
            "the SLA leaves" in post(server.admin_url or "", {"folder": "slow"}, path="/reload")[2]["error"]["message"]
        )


@pytest.mark.parametrize("fronts", [0, 2])
def test_a_bundle_from_disk(tmp_path: Path, fronts: int) -> None:
    first, second = write_bundle(tmp_path / "a"), write_bundle(tmp_path / "b", seed=5)

    def open_one(folder: str) -> Servable:
        return open_model(folder, beams=8, batches=(1, 2))

    with Server(
        open_one(str(first)), sla=60.0, port=0, admin_port=0, opener=open_one, fronts=fronts
    ).background() as server:
        before = post(server.url, {"history": [1, 2, 3], "top": 4})[2]
        (tmp_path / "c").mkdir()
        assert post(server.admin_url or "", {"folder": str(tmp_path / "c")}, path="/reload")[0] == 409
        assert post(server.admin_url or "", {"folder": str(second)}, path="/reload")[0] == 200
        after = post(server.url, {"history": [1, 2, 3], "top": 4})[2]
    assert before["version"] != after["version"]
    assert before["scores"] != after["scores"]
    direct = open_one(str(second))
    direct.warm()
    job = direct.read(direct.request_type(history=[1, 2, 3], top=4))
    assert next(direct.run(direct.buckets[0], [job])).scores == after["scores"]


def test_of_two_models_the_one_to_replace_must_be_named(tmp_path: Path) -> None:
    models = {name: Sleeper(COST, version="old", name=name) for name in ("a", "b")}
    with Server(
        models, sla=60.0, port=0, admin_port=0, shadow=True, events=tmp_path, opener=open_sleeper
    ).background() as server:
        status, _, body = post(server.admin_url or "", {"folder": "new"}, path="/reload")
        assert (status, body["error"]["path"]) == (400, "$.arm")
        assert "a, b" in body["error"]["message"]
        status, _, body = post(server.admin_url or "", {"folder": "new", "arm": "b"}, path="/reload")
        assert (status, body["arm"]) == (200, "b")
        assert [runner.model.version for runner in server.service.runners.values()] == ["old", "new"]


def test_models_in_memory_cannot_be_reloaded() -> None:
    with Server(
        make_generative(EngineConfig(beams=8, requests=(1,), dtype="fp32")), sla=5.0, port=0, admin_port=0
    ).background() as server:
        status, _, body = post(server.admin_url or "", {"folder": "x"}, path="/reload")
        assert status == 409
        assert "no opener to reload with" in body["error"]["message"]


def test_a_server_that_is_stopped_during_a_reload_tells_that_a_thread_is_in_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    opened, going = threading.Event(), threading.Event()

    def open_slowly(folder: str) -> Sleeper:
        opened.set()
        going.wait(60)
        return open_sleeper(folder)

    def ask(server: Server) -> None:
        with contextlib.suppress(OSError):
            post(server.admin_url or "", {"folder": "new"}, path="/reload")

    with Server(Sleeper(COST), sla=60.0, port=0, admin_port=0, opener=open_slowly).background() as server:
        asking = threading.Thread(target=ask, args=(server,))
        asking.start()
        assert opened.wait(30)
        assert server._loop is not None
        with caplog.at_level("WARNING", "loka.serving"):  # as after SIGHUP, which has no other answer
            again = server.service.reload_all({"sleeper": "newer"})
            asyncio.run_coroutine_threadsafe(again, server._loop).result(30)
        assert [one.fields for one in caplog.records] == [{"folder": "newer", "error": "a reload is under way"}]  # type: ignore[attr-defined]
    assert server.service.busy
    going.set()
    asking.join(30)
    end = time.monotonic() + 30
    while server.service.busy:
        assert time.monotonic() < end
