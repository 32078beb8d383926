"""The same core on Ray Serve; needs Ray, and some seconds."""

import json
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from loka.serving.ray_app import Settings, build_app, from_file, run
from loka.serving.ray_replica import reload_replicas

from .client import get, post
from .small import make_ranker


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"folders": {}}, "folders is empty"),
        ({"folders": {"a": "x", "b": "y"}}, "a split, or shadow mode"),
        ({"folders": {"a": "x", "b": "y"}, "shares": (1, 1), "salt": "s"}, "--events"),
        ({"folders": {"a": "x", "b": "y"}, "shares": (1,), "salt": "s", "events": "e"}, "one share per arm"),
        ({"folders": {"a": "x"}, "log": "some"}, "all, errors or none"),
    ],
)
def test_what_cannot_be_served_is_refused_before_ray_starts(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Settings(sla=0.1, **settings)


def test_a_public_address_needs_a_token() -> None:
    with pytest.raises(ValueError, match="needs a token"):
        run(Settings(folders={"x": "x"}, sla=0.1), host="0.0.0.0", port=1, replicas=1)


def test_replicas_are_counted() -> None:
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match="at least one"):
        build_app(Settings(folders={"x": "x"}, sla=0.1), replicas=0)
    with pytest.raises(ValueError, match="at least one"):
        from_file({"folders": {"x": "x"}, "sla": 0.1, "replicas": 0})


@pytest.mark.slow
def test_two_replicas_run_an_experiment(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    from ray import serve

    for name in ("a", "b"):
        make_ranker(tmp_path / name)
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-the-test\n")
    settings = Settings(
        folders={name: str(tmp_path / name) for name in ("a", "b")},
        sla=5.0,
        options={"rows": (8, 32)},
        token_file=str(tokens),
        shares=(50, 50),
        salt="test",
        events=str(tmp_path / "events"),
    )
    try:
        run(settings, host="127.0.0.1", port=8299, replicas=2, wait=False)
        url, features = "http://127.0.0.1:8299", {"age": 3, "price": [1.0, 2.0], "user": 7, "item": [1, 2], "seen": []}
        known = {"authorization": "Bearer a-token-of-the-test"}
        assert post(url, {"features": features})[0] == 401
        answers = [post(url, {"features": features, "user": f"u{n}"}, x_request_id=f"r{n}", **known) for n in range(12)]
        assert [status for status, _, _ in answers] == [200] * 12
        assert {body["arm"] for _, _, body in answers} == {"a", "b"}
        assert len({str(body["scores"]) for _, _, body in answers}) == 1
        assert [headers["x-request-id"] for _, headers, _ in answers] == [f"r{n}" for n in range(12)]
        assert post(url, {"features": {}, "user": "u"}, **known)[0] == 400
        assert get(url, "/v2/health/ready")[0] == 200
        assert get(url, "/-/healthz") == (200, b"success")
        lines = [line for path in (tmp_path / "events").glob("*.jsonl") for line in path.read_bytes().splitlines()]
        assert sorted(json.loads(line)["request_id"] for line in lines) == sorted(f"r{n}" for n in range(12))
        assert post(url, b" " * (settings.body + 1), **known)[0] == 413
        before = {str(get(url, "/v2/models/a", **known)) for _ in range(8)}
        make_ranker(tmp_path / "a", seed=1)
        reload_replicas(serve.get_app_handle("loka"), 2)
        after = {str(get(url, "/v2/models/a", **known)) for _ in range(8)}  # connections of their own, to both replicas
        assert len(before) == len(after) == 1
        assert before != after
        assert survive(8299, {"features": features}, known) == [200] * 8
    finally:
        serve.shutdown()
        ray.shutdown()


def survive(port: int, body: dict[str, Any], headers: dict[str, str]) -> list[int]:
    """Heads of eight requests, then a replica is killed, then their bodies: what became of each.

    HAProxy sends a request again only if it had all of it when it began to send it: one that it passed on by its head alone would be lost with the replica.
    """
    ray = pytest.importorskip("ray")
    waiting = [HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(8)]
    for number, connection in enumerate(waiting):
        data = json.dumps({**body, "user": f"late{number}"}).encode()
        connection.putrequest("POST", "/v1/recommend")
        for name, value in {**headers, "content-type": "application/json", "content-length": str(len(data))}.items():
            connection.putheader(name, value)
        connection.endheaders()
    time.sleep(0.5)
    actors = [one for one in ray.util.list_named_actors(all_namespaces=True) if "SERVE_REPLICA" in one["name"]]
    ray.kill(ray.get_actor(**actors[0]))
    for number, connection in enumerate(waiting):
        connection.send(json.dumps({**body, "user": f"late{number}"}).encode())
    return [connection.getresponse().status for connection in waiting]
