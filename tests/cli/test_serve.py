"""`loka serve` and `loka load` as a user runs them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from loka import cli
from loka.cli.serve import name_arms, parse_seconds, parse_split, spell_caps


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_durations_and_splits_are_read_strictly() -> None:
    assert (parse_seconds("50ms"), parse_seconds("0.1s"), parse_seconds("2")) == (0.05, 0.1, 2.0)
    for bad in ("fast", "-1ms", "0", "5m", "1.2.3s"):
        with pytest.raises(ValueError, match="not a duration"):
            parse_seconds(bad)
    split = parse_split(["a", "b"], "95,5", "salt", False)
    assert split is not None
    assert split.shares == (95.0, 5.0)
    for arguments, why in (
        ((["a", "b"], None, "salt", False), "--split"),
        ((["a", "b"], "95,5", None, False), "--salt"),
        ((["a", "b"], "x", "s", False), "expected shares"),
        ((["a", "b"], "1,1", "s", True), "--shadow"),
    ):
        with pytest.raises(ValueError, match=why):
            parse_split(*arguments)
    assert name_arms([Path("/x/m"), Path("/y/m")]) == ["x-m", "y-m"]
    with pytest.raises(ValueError, match="same names"):
        name_arms([Path("/x/m"), Path("/x/m")])


def test_requests_that_cannot_be_honoured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn")
    folder = str(tmp_path)
    assert "give the folder" in fails(["serve"], capsys)
    assert "neither bundle.json nor ranker.json" in fails(["serve", folder], capsys)
    assert "not a duration" in fails(["serve", folder, "--sla", "soon"], capsys)
    assert "--on ray" in fails(["serve", folder, "--replicas", "2"], capsys)
    assert "every replica reads its own" in fails(["serve", folder, "--on", "ray", "--fronts", "4"], capsys)
    assert "--fronts -1: expected a number" in fails(["serve", folder, "--fronts", "-1"], capsys)
    assert "expected local or ray" in fails(["serve", folder, "--on", "mars"], capsys)
    assert "expected all, errors or none" in fails(["serve", folder, "--log", "some"], capsys)
    assert "whole numbers" in fails(["serve", folder, "--rows", "a"], capsys)
    assert "--admin-port" in fails(["serve", folder, "--on", "ray", "--admin-port", "9"], capsys)
    assert "takes no folders" in fails(["serve", folder, "--check", "http://127.0.0.1:1"], capsys)
    assert "no answer" in fails(["serve", "--check", "http://127.0.0.1:1"], capsys)
    assert "http://host:port" in fails(["load", "ftp://x", "--model", "m"], capsys)
    assert "give two models" in fails(["ab"], capsys)
    assert "takes no models" in fails(["ab", folder, folder, "--online", folder], capsys)


@pytest.mark.slow
@pytest.mark.parametrize("fronts", ["0", "2"])
def test_from_a_bundle_to_an_answer_and_back_to_the_shell(tmp_path: Path, fronts: str) -> None:
    pytest.importorskip("uvicorn")
    import torch

    from loka.data.schema import Field, Schema
    from loka.models import build_ranker
    from loka.serving import open_model, save_ranker

    torch.manual_seed(0)
    schema = Schema(("price",), (Field("item", 50),), (), ("click",))
    save_ranker(build_ranker(schema, "wukong", "tiny"), schema, tmp_path / "ranker", family="wukong", size="tiny")
    with pytest.raises(ValueError, match="has no beams"):
        open_model(tmp_path / "ranker", beams=3)
    loka = [sys.executable, "-m", "loka"]
    command = [
        "serve",
        str(tmp_path / "ranker"),
        "--sla",
        "2s",
        "--port",
        "0",
        "--admin-port",
        "-1",
        "--rows",
        "8,32",
        "--fronts",
        fronts,
        "--json",
    ]
    server = subprocess.Popen(
        [*loka, *command], stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert server.stdout is not None
        told = json.loads(server.stdout.readline())
        assert told["models"][0]["captures"] == 2
        checked = subprocess.run(
            [*loka, "serve", "--check", told["url"], "--json"], capture_output=True, text=True, timeout=120, check=False
        )
        assert (checked.returncode, json.loads(checked.stdout)["ready"]) == (0, True)
        record = tmp_path / "load.json"
        load = ["load", told["url"], "--model", "ranker", "--rate", "20", "--seconds", "1", "--sla", "2s", "--rows", "4", "--vocabulary", "40", "--out", str(record)]  # fmt: skip
        done = subprocess.run([*loka, *load], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(record.read_text())
        assert found["codes"] == {"200": found["offered"]}
        requests = tmp_path / "requests.jsonl"
        requests.write_text('{"features": {"item": 3}}\n')
        done = subprocess.run(
            [*loka, *load[:8], "--requests", str(requests)], capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, "the first 400 said: $.features.price: is missing" in done.stdout) == (1, True)
        assert done.stderr == "finding: answers with status 400\n"
        server.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        assert server.wait(60) == 0
        assert time.monotonic() - begin < 30
    finally:
        server.kill()


def test_a_check_that_is_refused_names_the_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def look(url: str, token: str | None) -> dict[str, object]:
        return {"live": True, "ready": False, "status": 401, "server": {}}

    monkeypatch.setattr("loka.serving.load.look", look)
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--check", "http://127.0.0.1:1"])
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert said == "http://127.0.0.1:1: live and not ready, this client is refused (401); hint: --token\n"


def test_the_largest_batches_are_told_in_words() -> None:
    assert spell_caps({"0": 1024}) == "1,024 rows"
    assert (
        spell_caps({"50": 16, "100": 8}) == "16 requests with 50 items of history, 8 requests with 100 items of history"
    )


def test_an_experiment_is_read_from_its_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import random

    from loka.serving import EventLog, Split

    source, split = random.Random(0), Split(("base", "new"), (50, 50), "sim")
    log = EventLog(tmp_path / "events", split)
    for user in range(3000):
        arm, name = split.arm(user), f"r{user}"
        log.write("exposure", name, user=user, arm=arm, ms=10.0, status=200, empty=False, simulated=True)
        log.write("outcome", name, name="click", value=float(source.random() < (0.5 if arm == "base" else 0.3)))
    log.close()
    with pytest.raises(SystemExit) as ended:
        cli.main(["ab", "--online", str(tmp_path / "events"), "--out", str(tmp_path / "records" / "online.json")])
    told = capsys.readouterr().out
    assert ended.value.code == 1  # a metric is worse
    assert "click" in told
    assert ": worse" in told
    assert "no mismatch found" in told
    assert "simulated" in told
    silent = EventLog(tmp_path / "silent", split)
    for user in range(20):
        silent.write("exposure", f"r{user}", user=user, arm=split.arm(user)[0], ms=10.0, status=200, empty=False)
    silent.close()
    with contextlib.suppress(SystemExit):
        cli.main(["ab", "--online", str(tmp_path / "silent"), "--out", str(tmp_path / "silent.json")])
    assert "no metric: no outcome of an answered request was sent to POST /v1/outcome" in capsys.readouterr().out
    from loka.report.render import render
    from loka.report.results import Results

    page = render(Results.load(tmp_path / "silent.json"))
    assert "No metric: no outcome of an answered request was recorded." in page
    assert 'aria-label="Metrics by user"' not in page  # a head without rows
    page = render(Results.load(tmp_path / "records"))
    assert "new against base on live traffic" in page
    assert "users are simulated" in page


@pytest.mark.parametrize("busy", [False, True])
def test_a_process_with_a_thread_in_a_model_ends_without_waiting_for_it(
    busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped:
        ready, url, admin_url, service = False, "", None, SimpleNamespace(failed="stopped", busy=busy)

        def run(self) -> None:
            """Return at once, as after SIGTERM."""

    ended: list[int] = []
    monkeypatch.setattr("loka.cli.serve.make_server", lambda *_, **__: Stopped())
    monkeypatch.setattr("os._exit", ended.append)
    with contextlib.suppress(SystemExit):
        cli.main(["serve", "anything", "--log", "none"])
    assert ended == [0] * busy
