import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loka.cli.data import app

from . import raw

RUNNER = CliRunner()


def run(*arguments: str | Path) -> tuple[int, str]:
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_list_get_info(tmp_path: Path) -> None:
    source = raw.write_criteo(tmp_path / "raw")
    code, out = run("info", "criteo", "--data-root", tmp_path)
    assert code == 1
    assert "not cached yet" in out
    code, out = run(
        "get",
        "criteo",
        "--source",
        source,
        "--data-root",
        tmp_path,
        "--set",
        "encoding=hash",
        "--set",
        "buckets=99",
        "--json",
    )
    assert code == 0
    found = json.loads(out)["caches"][0]
    assert found["examples"] == {"train": 500, "valid": 60, "test": 70}
    assert found["options"]["buckets"] == 99
    code, out = run("list", "--data-root", tmp_path, "--json")
    assert code == 0
    assert {row["name"]: row["caches"] for row in json.loads(out)}["criteo"] == 1
    code, out = run("info", "criteo", "--data-root", tmp_path, "--verify", "--json")
    assert code == 0
    assert json.loads(out)["caches"][0]["rows"]["train"] == 500
    code, out = run("info", "criteo", "--data-root", tmp_path)
    assert "category_26 99" in out


def test_damage_is_a_finding(tmp_path: Path) -> None:
    source = raw.write_amazon(tmp_path / "raw")
    code, out = run("get", "amazon-2014-beauty", "--source", source, "--data-root", tmp_path)
    assert code == 0
    assert "users 30, items 20" in out
    victim = next((tmp_path / "amazon-2014-beauty").rglob("items.npy"))
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    assert run("info", "amazon-2014-beauty", "--data-root", tmp_path)[0] == 0, (
        "sizes are right, only a checksum can tell"
    )
    code, out = run("info", "amazon-2014-beauty", "--data-root", tmp_path, "--verify")
    assert code == 1
    assert "items.npy" in out
    code, out = run("info", "amazon-2014-beauty", "--data-root", tmp_path, "--verify", "--json")
    assert "items.npy" in json.loads(out)["damaged"][0]["error"]


def test_an_unfinished_build_is_shown(tmp_path: Path) -> None:
    (tmp_path / "criteo" / "ranking-0123.building-x").mkdir(parents=True)
    code, out = run("info", "criteo", "--data-root", tmp_path)
    assert code == 1
    assert "unfinished build" in out
    assert "1 damaged or unfinished" in run("list", "--data-root", tmp_path)[1]


def test_bad_requests(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data set"):
        run("get", "nothing", "--data-root", tmp_path)
    with pytest.raises(ValueError, match="expected name=value"):
        run("get", "criteo", "--data-root", tmp_path, "--set", "buckets")
    with pytest.raises(ValueError, match="needs --kind"):
        run("get", "ml-1m", "--data-root", tmp_path, "--set", "max_history=3")
    with pytest.raises(ValueError, match="--source FOLDER"):
        run("get", "criteo", "--data-root", tmp_path)


def test_generated_data_needs_no_cache(tmp_path: Path) -> None:
    assert run("info", "synthetic", "--data-root", tmp_path)[0] == 0
    code, out = run("get", "synthetic", "--data-root", tmp_path, "--set", "rows=5000")
    assert code == 0
    assert "train 5,000" in out
