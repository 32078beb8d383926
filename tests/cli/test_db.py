"""The database on the command line: filled, shown, exported, pruned; and plans for a target from it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dispatch.evidence import candidate, report, site
from dispatch.measured import interval, origin, row
from loka.cli import app
from loka.dispatch import Database
from loka.dispatch.rows import linear_variant
from loka.records import save
from loka.records.performance import PerformanceRow

runner = CliRunner()
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200"


def run(*words: object) -> tuple[int, str]:
    result = runner.invoke(app, [str(word) for word in words], obj={})
    if isinstance(result.exception, ValueError):
        raise result.exception
    return result.exit_code, result.stdout


def matching() -> PerformanceRow:
    """A row for evidence.site's 32 x 16 x 8."""
    variant = linear_variant("fprop", "e4m3:row", "e4m3:row", fast_accum=True, weights="dynamic")
    return row(variant=variant, m=32, k=16, n=8, speedup=interval(1.6, 0.01))


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "rows.sqlite"
    with Database.open(path) as database:
        database.add(origin(), [matching(), row(backend="triton", version="triton 3.6, loka 0")])
    return path


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    path = tmp_path / "probe.json"
    save(report(site("a", candidate(recipe="rowwise"), candidate(recipe="tensorwise"))), path)
    return path


def test_show(db: Path) -> None:
    code, text = run("db", "show", "--db", db)
    assert code == 0
    assert "fprop e4m3:row @ e4m3:row fast, weights dynamic" in text
    assert "2 of 2 matching rows; the database has 2" in text
    assert "machine: NVIDIA H200, driver 580, torch 2.11.0" in text
    code, text = run("db", "show", "--db", db, "--backend", "triton", "--json")
    (found,) = json.loads(text)
    assert (found["backend"], found["origin"]["device"]) == ("triton", "NVIDIA H200")


def test_a_filter_that_matches_nothing_says_what_there_is(db: Path, tmp_path: Path) -> None:
    shown = runner.invoke(app, ["db", "show", "--db", str(db), "--op", "nosuch", "--device", "NVIDIA H200"], obj={})
    assert shown.exit_code == 0
    assert shown.stderr == "--op nosuch: the rows have linear\n"
    Database.open(tmp_path / "empty.sqlite").close()
    shown = runner.invoke(app, ["db", "show", "--db", str(tmp_path / "empty.sqlite"), "--op", "linear"], obj={})
    assert "loka db show --shipped" in shown.stderr
    assert "0 of 0 matching rows; the database has 0" in shown.stdout


def test_merge_takes_exports_benchmarks_and_databases(db: Path, tmp_path: Path) -> None:
    exported = tmp_path / "rows.json"
    assert run("db", "export", "--db", db, "--out", exported)[1].startswith("2 rows of 1 runs")
    target = tmp_path / "new.sqlite"
    code, text = run("db", "merge", exported, RESULTS / "fused_linear.json", db, "--db", target)
    assert code == 0
    assert f"{db}: 2 rows written" in text
    assert "12 skipped: 'gemm torch' is a column of the benchmark" in text or "skipped: 'gemm torch'" in text
    answer = json.loads(run("db", "merge", exported, "--db", target, "--json")[1])
    assert answer["files"][0]["written"] == 2
    assert answer["rows"] == len(Database.open(target, create=False))


def test_merge_refuses_what_it_cannot_read(tmp_path: Path, probe: Path) -> None:
    target = tmp_path / "new.sqlite"
    with pytest.raises(ValueError, match="kind 'probe'; expected performance or kernel_bench"):
        run("db", "merge", probe, "--db", target)
    with pytest.raises(ValueError, match="cannot be read"):
        run("db", "merge", tmp_path / "none", "--db", target)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="neither a database nor a JSON record"):
        run("db", "merge", tmp_path / "text", "--db", target)


def test_prune(db: Path) -> None:
    with pytest.raises(ValueError, match="give --before DAY, or --others"):
        run("db", "prune", "--db", db)
    with pytest.raises(ValueError, match="Invalid isoformat"):
        run("db", "prune", "--db", db, "--before", "yesterday")
    assert json.loads(run("db", "prune", "--db", db, "--before", "2026-01-02", "--json")[1]) == {
        "deleted": 0,
        "left": 2,
    }
    assert run("db", "prune", "--db", db, "--others")[1] == "2 rows deleted, 0 left\n"


def test_a_missing_database_is_not_made_by_looking(tmp_path: Path) -> None:
    for verb in (["show"], ["export", "--out", tmp_path / "x.json"], ["prune", "--before", "2026-01-01"]):
        with pytest.raises(ValueError, match="there is no performance database"):
            run("db", *verb, "--db", tmp_path / "none.sqlite")
    assert not (tmp_path / "none.sqlite").exists()


def test_tune_without_a_gpu_says_so(probe: Path, tmp_path: Path) -> None:
    code, text = run("db", "tune", probe, "--device", "cpu", "--db", tmp_path / "new.sqlite")
    assert code == 1
    assert "not measured: no GPU" in text


def test_a_plan_for_a_target(db: Path, probe: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    code, text = run("plan", probe, "--target", "NVIDIA H200", "--db", db, "--out", out)
    assert code == 0
    assert "a  fprop e4m3:row @ e4m3:row on torch, fast accumulation" in text
    assert "note: speeds are of NVIDIA H200" in text
    code, text = run("explain", out, "a")
    assert "1.60x over bf16, 10.0 us: database row of 2026-01-02" in text
    assert json.loads(run("explain", out, "a", "--json")[1])["choices"][0]["backend"] == "torch"
    assert run("diff", out, out, "--json") == (0, "[]\n")
    code, text = run("translate", out, "torchao")
    assert code == 0
    assert "# left in high precision: a: N 8: not a multiple of 16" in text
    run("translate", out, "modelopt", "--out", tmp_path / "config.py")
    assert "{'quantizer_name': '*', 'enable': False}" in (tmp_path / "config.py").read_text()


def test_a_plan_uses_the_users_own_database_too(
    db: Path, probe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOKA_DB", str(tmp_path / "none.sqlite"))
    assert "the database has no row" in run("plan", probe, "--target", "NVIDIA H200")[1]  # only what ships
    assert not (tmp_path / "none.sqlite").exists()
    own = tmp_path / "own.sqlite"
    with Database.open(own) as database:
        database.add(origin(device="NVIDIA A100"), [matching()])
    monkeypatch.setenv("LOKA_DB", str(own))
    assert "e4m3:row @ e4m3:row on torch" in run("plan", probe, "--target", "NVIDIA A100")[1]


def test_options_of_a_target_need_one(db: Path, probe: Path) -> None:
    for option in (["--db", db], ["--weights", "cached"], ["--row-factor", "2"]):
        with pytest.raises(ValueError, match="name it with --target"):
            run("plan", probe, *option)
    with pytest.raises(ValueError, match="expected one of dynamic, cached"):
        run("plan", probe, "--target", "NVIDIA H200", "--weights", "frozen")


def test_prune_reads_every_spelling_of_a_day(db: Path) -> None:
    """`20260101` sorts after every row of 2026 as text."""
    for spelling in ("20260101", "2026-W01"):
        code, text = run("db", "prune", "--db", db, "--before", spelling, "--json")
        assert (code, json.loads(text)) == (0, {"deleted": 0, "left": 2})
    with pytest.raises(ValueError, match="expected a day"):
        run("db", "prune", "--db", db, "--before", "soon")


def test_a_negative_limit_is_refused(db: Path) -> None:
    with pytest.raises(ValueError, match="--limit -1"):
        run("db", "show", "--db", db, "--limit", -1)


def test_tune_refuses_devices_and_times_that_are_none(probe: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--device abacus"):
        run("db", "tune", probe, "--db", tmp_path / "new.sqlite", "--device", "abacus")
    with pytest.raises(ValueError, match="--seconds 0: expected a time above 0"):
        run("db", "tune", probe, "--db", tmp_path / "new.sqlite", "--device", "cpu", "--seconds", 0)


def test_suggest_refuses_a_model_that_was_not_probed(probe: Path) -> None:
    with pytest.raises(ValueError, match=r"--model wukong:tiny has none of the sites of .*probe\.json \(a\)"):
        run("mods", "suggest", probe, "--model", "wukong:tiny", "--data", "synthetic", "--data-option", "rows=1000")
