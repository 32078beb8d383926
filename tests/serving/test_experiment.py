"""Experiments: sticky assignment, exposures once, shadow mode, and what the events say afterwards."""

import asyncio
import json
import random
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from loka.serving import Front, Policy, Server, Service, Split
from loka.serving.experiment import EventLog
from loka.serving.online import judge_experiment, read_events, user_values

from .client import post, wait_for
from .sleeper import Sleeper

COST = {(1, 0): 0.001, (8, 0): 0.002}


def test_assignment_is_sticky_and_follows_the_shares() -> None:
    split = Split(("a", "b"), (95, 5), "autumn")
    arms = {f"user-{n}": split.arm(f"user-{n}") for n in range(20_000)}
    assert all(split.arm(user) == arm for user, arm in arms.items())
    assert 0.045 < sum(arm == "b" for arm in arms.values()) / 20_000 < 0.055
    other = Split(("a", "b"), (95, 5), "winter")
    moved = [user for user, arm in arms.items() if arm == "b" and other.arm(user) == "b"]
    assert len(moved) < 200  # another salt draws anew: 5 % of 5 %, not all
    wider = Split(("a", "b"), (90, 10), "autumn")
    assert all(wider.arm(user) == "b" for user, arm in arms.items() if arm == "b")  # growing an arm keeps its users
    assert split.arm(7) == split.arm("7")
    for bad in ((("a",), (1, 2), "s"), (("a", "a"), (1, 1), "s"), (("a", "b"), (1, 0), "s"), (("a", "b"), (1, 1), "")):
        with pytest.raises(ValueError, match=r"expected|salt"):
            Split(*bad)


@pytest.mark.parametrize("fronts", [0, 2])
def test_exposures_are_written_once_per_request_id(tmp_path: Path, fronts: int) -> None:
    pytest.importorskip("uvicorn")
    arms = {"a": Sleeper(COST, "a", "1"), "b": Sleeper(COST, "b", "2")}
    split = Split(("a", "b"), (50, 50), "test")
    with Server(arms, sla=60.0, port=0, split=split, events=tmp_path, fronts=fronts).background() as server:
        assert post(server.url, {"number": 1})[2]["error"]["path"] == "$.user"
        for n in range(40):
            body = {"number": n, "user": f"u{n % 10}"}
            status, _, found = post(server.url, body, x_request_id=f"r{n}", x_loka_simulated="1")
            assert status == 200
            assert found["arm"] == split.arm(f"u{n % 10}") == {"1": "a", "2": "b"}[found["version"]]
            assert post(server.url, body, x_request_id=f"r{n}")[0] == 200  # a retry
            outcome = {"request_id": f"r{n}", "name": "click", "value": float(n % 2)}
            assert post(server.url, outcome, path="/v1/outcome")[2]["written"]
            assert not post(server.url, outcome, path="/v1/outcome")[2]["written"]
    events = read_events(tmp_path)
    assert sum(arm.answered for arm in events.arms.values()) == 40
    assert events.simulated
    found = judge_experiment(tmp_path)
    assert found.metrics[0].outcome == "inconclusive"  # ten users
    assert "simulated" in found.notes[-1]
    with pytest.raises(ValueError, match="another experiment"):
        EventLog(tmp_path, Split(("a", "b"), (50, 50), "other"))


def read_lines(folder: Path) -> list[dict]:
    return [json.loads(line) for path in folder.glob("events-*") for line in path.read_text().splitlines()]


@pytest.mark.parametrize("fronts", [0, 2])
def test_shadow_mode_runs_both_and_shows_one(tmp_path: Path, fronts: int) -> None:
    pytest.importorskip("uvicorn")
    arms = {"a": Sleeper(COST, "a", "1"), "b": Sleeper(COST, "b", "2")}
    with Server(arms, sla=60.0, port=0, shadow=True, events=tmp_path, fronts=fronts).background() as server:
        for n in range(5):
            assert post(server.url, {"number": n, "user": "u"})[2]["version"] == "1"
        end = time.monotonic() + 30
        while sum(line["event"] == "shadow" for line in read_lines(tmp_path)) < 5 and time.monotonic() < end:
            time.sleep(0.05)
    lines = read_lines(tmp_path)
    assert [line["event"] for line in lines].count("shadow") == 5
    assert {line["arm"] for line in lines if line["event"] == "shadow"} == {"b"}
    with pytest.raises(ValueError, match="events of shadow mode, where a answers everybody"):
        judge_experiment(tmp_path)
    with pytest.raises(ValueError, match="split, or shadow"):
        Server(arms, sla=1.0)
    with pytest.raises(ValueError, match="--events"):
        Server(arms, sla=1.0, shadow=True)
    with pytest.raises(ValueError, match="no events without an experiment"):
        Server(arms["a"], sla=1.0, events=tmp_path)


def write(folder: Path, users: int, *, lift: float = 0.0, drop: float = 0.0, slow: float = 1.0, seed: int = 0) -> Path:
    """An experiment of simulated users, as a server writes it."""
    source, split = random.Random(seed), Split(("base", "new"), (50, 50), "sim")
    log = EventLog(folder, split)
    for n in range(users):
        arm = split.arm(n)
        if arm == "new" and source.random() < drop:
            continue
        for visit in range(1 + n % 3):
            name, factor = f"{n}-{visit}", 1.0 if arm == "base" else 1 + lift
            ms = source.gauss(20, 2) * (slow if arm == "new" else 1.0)
            log.write("exposure", name, user=n, arm=arm, ms=ms, status=200, empty=False, simulated=True)
            log.write("outcome", name, name="click", value=float(source.random() < 0.3 * factor))
    log.close()
    return folder


def test_the_four_verdicts_and_what_must_hold_before(tmp_path: Path) -> None:
    better = judge_experiment(write(tmp_path / "better", 8000, lift=0.3))
    assert [m.outcome for m in better.metrics] == ["better"]
    assert not better.split.mismatch
    assert not any(g.broken for g in better.guardrails)
    assert [m.outcome for m in judge_experiment(write(tmp_path / "worse", 8000, lift=-0.3)).metrics] == ["worse"]
    same = judge_experiment(write(tmp_path / "same", 8000), margin=0.2)
    assert [m.outcome for m in same.metrics] == ["equivalent"]
    assert [m.outcome for m in judge_experiment(tmp_path / "same", margin=0.001).metrics] == ["inconclusive"]
    assert judge_experiment(write(tmp_path / "lost", 8000, drop=0.1)).split.mismatch
    slow = judge_experiment(write(tmp_path / "slow", 4000, slow=2.0))
    assert [g.name for g in slow.guardrails if g.broken] == ["p99 ms"]
    few = judge_experiment(write(tmp_path / "few", 100, slow=2.0)).guardrails
    assert [(g.broken, g.verdict) for g in few if g.name == "p99 ms"] == [
        (False, "over it, too few answers to be sure")
    ]
    assert {g.verdict for g in better.guardrails} == {"kept"}


def test_events_of_several_processes_are_counted_once(tmp_path: Path) -> None:
    write(tmp_path, 500)
    first = judge_experiment(tmp_path)
    (file,) = tmp_path.glob("events-*.jsonl")
    (tmp_path / "events-2-2.jsonl").write_bytes(
        file.read_bytes()[:-20]
    )  # a replica that a proxy asked again, and that was killed
    again = judge_experiment(tmp_path)
    assert again.requests == first.requests
    assert again.duplicates > 500
    assert again.metrics == first.metrics
    assert "could not be read" in " ".join(again.notes)
    with pytest.raises(ValueError, match=r"experiment\.json"):
        judge_experiment(tmp_path / "nowhere")
    (tmp_path / "experiment.json").write_text('{"arms": ["a", "b"]}')
    with pytest.raises(ValueError, match=r"can be read .*shares"):
        judge_experiment(tmp_path)


def test_a_line_that_cannot_be_an_event_is_left_out_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path, 200)
    before = judge_experiment(tmp_path)
    (file,) = tmp_path.glob("events-*.jsonl")
    good, exposure = file.read_bytes(), '{"event": "exposure", "user": "new", "status": 200, "empty": false, "simulated": true, '  # fmt: skip
    wrong = [
        exposure + '"request_id": "x", "arm": "a"}',
        exposure + '"request_id": "x", "arm": "a", "ms": NaN}',
        exposure + '"request_id": "x", "arm": "of another experiment", "ms": 1.0}',
        '{"event": "outcome", "request_id": "r0", "name": "buy", "value": NaN}',
        '{"event": "outcome", "request_id": "r0", "name": "buy", "value": %s}' % ("9" * 400),
        "[" * 100_000,
        "null",
    ]
    file.write_bytes(good + "\n".join(wrong).encode())
    after = judge_experiment(tmp_path)
    assert (after.split, after.requests, after.metrics) == (before.split, before.requests, before.metrics)
    assert f"{len(wrong)} lines could not be read" in " ".join(after.notes)
    header = tmp_path / "experiment.json"
    header.write_text(json.dumps({**json.loads(header.read_text()), "shares": [1]}))
    with pytest.raises(ValueError, match="one share per arm"):
        judge_experiment(tmp_path)


@pytest.mark.parametrize("fronts", [0, 2])
def test_an_arm_that_is_asked_for_by_its_name_exposes_nobody(tmp_path: Path, fronts: int) -> None:
    pytest.importorskip("uvicorn")
    arms, split = {"a": Sleeper(COST, "a"), "b": Sleeper(COST, "b")}, Split(("a", "b"), (50, 50), "test")
    body = {"inputs": [{"name": "number", "shape": [1], "datatype": "INT64", "data": [1]}]}
    with Server(arms, sla=60.0, port=0, split=split, events=tmp_path, fronts=fronts).background() as server:
        for arm in arms:
            assert post(server.url, body, path=f"/v2/models/{arm}/infer")[0] == 200
        assert post(server.url, {"number": 1, "user": 7})[0] == 200
        wait_for(lambda: len(read_lines(tmp_path)) > 0)
    assert [line["user"] for line in read_lines(tmp_path)] == [7]


@pytest.mark.parametrize("who", ["one user", "a fifth of them"])
def test_a_guardrail_is_about_users(who: str, tmp_path: Path) -> None:
    """One client that breaks off a thousand requests says nothing about its arm; many users who get no answer do."""
    split = Split(("base", "new"), (50, 50), "sim")
    log, reached = EventLog(tmp_path, split), [n for n in range(1000) if split.arm(n) == "new"]
    unlucky = dict.fromkeys(reached[:1], 1000) if who == "one user" else dict.fromkeys(reached[::5], 2)
    for n in range(1000):
        statuses = [200, 200, *[499] * unlucky.get(n, 0)]
        for at, status in enumerate(statuses):
            log.write("exposure", f"{n}-{at}", user=n, arm=split.arm(n), ms=5.0, status=status, empty=False, simulated=True)  # fmt: skip
    log.close()
    refused = next(g for g in judge_experiment(tmp_path).guardrails if g.name == "refused")
    assert refused.candidate > 0.1 > refused.baseline
    assert (refused.broken, refused.doubtful) == ((False, True) if who == "one user" else (True, False))


def test_a_request_that_is_refused_and_then_answered_counts_as_both(tmp_path: Path) -> None:
    """Its outcome divided by no answer would make the arm that refuses more look better."""
    log = EventLog(tmp_path, Split(("a", "b"), (50, 50), "test"))
    for status in (429, 429, 200, 200):
        log.write("exposure", "r", user=1, arm="a", ms=5.0, status=status, empty=False, simulated=True)
    log.write("outcome", "r", name="click", value=1.0)
    log.write("exposure", "never", user=1, arm="a", ms=5.0, status=429, empty=True, simulated=True)
    log.write("outcome", "never", name="click", value=1.0)
    log.close()
    events = read_events(tmp_path)
    assert (events.arms["a"].answered, events.arms["a"].refused, events.orphans) == (1, 2, 1)
    assert user_values(events.arms["a"], "click") == [1.0]


def test_an_event_that_a_full_disk_did_not_take_may_be_written_again(tmp_path: Path) -> None:
    log, outcome = EventLog(tmp_path, Split(("a", "b"), (50, 50), "test")), {"name": "click", "value": 1.0}
    log.write("exposure", "r", user=1, arm="a", ms=5.0, status=200, empty=False, simulated=True)
    (file,) = tmp_path.glob("events-*")
    before, size = resource.getrlimit(resource.RLIMIT_FSIZE), file.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))  # a part of the next line fits
    try:
        with pytest.raises(OSError, match="events-"):
            log.write("outcome", "r", **outcome)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.stat().st_size == size
    assert log.write("outcome", "r", **outcome)
    assert not log.write("outcome", "r", **outcome)
    log.close()
    assert [line["event"] for line in read_lines(tmp_path)] == ["exposure", "outcome"]


def test_an_exposure_is_written_once_the_answer_has_left(tmp_path: Path) -> None:
    """A replica that is killed before it answered is asked again elsewhere: it must have written nothing."""
    split = Split(("a", "b"), (50, 50), "test")
    arms = {name: Sleeper(COST, name, "1") for name in "ab"}
    service = Service(arms, policy=Policy(sla=2.0), split=split, events=EventLog(tmp_path, split))
    front, sent = Front(service, manage=False), []

    async def ask(send: Any, number: int) -> None:
        inbox = asyncio.Queue[dict[str, Any]]()
        inbox.put_nowait({"type": "http.request", "body": json.dumps({"number": number, "user": "u"}).encode()})
        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"r%d" % number)]
        scope = {"type": "http", "method": "POST", "path": "/v1/recommend", "headers": headers}
        await front(scope, inbox.get, send)

    async def killed(message: dict[str, Any]) -> None:
        raise SystemExit

    async def send(message: dict[str, Any]) -> None:
        assert not read_lines(tmp_path)
        sent.append(message)

    async def play() -> None:
        await service.start()
        with pytest.raises(SystemExit):
            await ask(killed, 1)
        await ask(send, 2)
        assert service.events is not None
        service.events.write = full_disk  # type: ignore[method-assign]
        await ask(send_anyhow, 3)
        service.close()

    def full_disk(*values: Any, **named: Any) -> bool:
        raise OSError("no space left on device")

    async def send_anyhow(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(play())
    assert [m["type"] for m in sent] == ["http.response.start", "http.response.body"] * 2  # and no second answer
    assert [m["status"] for m in sent[::2]] == [200, 200]
    assert [line["request_id"] for line in read_lines(tmp_path)] == ["r2"]
