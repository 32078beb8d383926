"""The database keeps the newest row of a key, is safe under several processes, and never hands out a row of another machine."""

import multiprocessing
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from loka.dispatch.database import Database, Key, bucket_of, default_path
from loka.records import from_json, to_json
from loka.records.performance import PerformanceRows

from .measured import H200, interval, origin, row

KEY = Key("linear", row().variant, 2048, 1024, 512, "torch")


def memory() -> Database:
    return Database(":memory:")


@pytest.mark.parametrize(
    ("m", "edge"),
    [(1, 1), (13, 13), (15, 15), (16, 16), (17, 17), (24, 17), (32, 32), (48, 48), (63, 49), (64, 64), (80, 64), (96, 96), (100, 97),
     (1000, 769), (1024, 1024), (1536, 1536), (2047, 1537), (2048, 2048), (3000, 2049), (3072, 3072), (32768, 32768)],
)  # fmt: skip
def test_buckets_round_down_and_keep_alignment(m: int, edge: int) -> None:
    assert bucket_of(m) == edge
    assert edge <= m
    assert bucket_of(edge) == edge
    assert (edge % 16 == 0) == (m % 16 == 0)


def test_m_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        bucket_of(0)


def test_a_row_is_found_for_every_m_of_its_bucket() -> None:
    database = memory()
    database.add(origin(), [row()])
    for m in (2048, 2064, 3056):
        assert database.find(replace(KEY, m=m), H200).row == row()
    for m in (2047, 2049, 3072, 1024):
        found = database.find(replace(KEY, m=m), H200)
        assert found.row is None
        assert "no row for linear" in found.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "NVIDIA H100"}, "device NVIDIA H100, here NVIDIA H200"),
        ({"driver": "570"}, "driver 570, here 580"),
        ({"driver": None}, "driver unknown, here 580"),
        ({"torch": "2.10"}, "torch 2.10, here 2.11.0"),
    ],
)
def test_rows_of_other_machines_are_refused_by_name(change: dict[str, str], reason: str) -> None:
    database = memory()
    database.add(origin(**change), [row()])
    found = database.find(KEY, H200)
    assert found.row is None
    assert reason in found.reason
    assert "2026-01-02" in found.reason


def test_rows_of_another_version_are_refused_by_name() -> None:
    database = memory()
    database.add(origin(), [row(version="torch 2.9, loka 0")])
    found = database.find(KEY, H200)
    assert found.row is None
    assert "torch torch 2.9, loka 0, here torch 2.11.0, loka 0" in found.reason
    assert database.find(KEY, replace(H200, versions={})).row is None


def test_the_right_row_is_found_among_stale_ones() -> None:
    database = memory()
    database.add(origin(date="2027-01-01", torch="2.12"), [row(microseconds=interval(1.0))])
    database.add(origin(), [row()])
    found = database.find(KEY, H200)
    assert found.row == row()
    assert found.origin == origin()


def test_the_newest_row_of_a_key_wins_whatever_the_order() -> None:
    old, new = row(microseconds=interval(20.0)), row(microseconds=interval(5.0))
    for order in ([("2026-01-01", old), ("2026-02-01", new)], [("2026-02-01", new), ("2026-01-01", old)]):
        database = memory()
        written = [database.add(origin(date=date), [found]) for date, found in order]
        assert len(database) == 1
        assert database.find(KEY, H200).row == new
        assert sum(written) == (2 if order[0][1] is old else 1)


def test_a_row_off_its_buckets_edge_is_refused() -> None:
    with pytest.raises(ValueError, match="M = 2048 for this one"):
        memory().add(origin(), [row(m=2064)])


def test_a_failing_add_writes_nothing() -> None:
    database = memory()
    with pytest.raises(ValueError, match="edge of a bucket"):
        database.add(origin(), [row(), row(m=2064)])
    assert len(database) == 0


def test_export_and_merge_round_trip() -> None:
    database = memory()
    database.add(origin(), [row(), row(k=479, refusal="no kernel", microseconds=None)])
    database.add(origin(date="2026-03-03"), [row(n=13)])
    exported = database.export()
    assert sorted(len(group.rows) for group in exported.groups) == [1, 2]
    other = memory()
    assert other.merge(from_json(to_json(exported), PerformanceRows)) == 3
    assert other.export() == exported
    assert other.merge(exported) == 3  # the same rows again: equal dates are written over, nothing is doubled
    assert len(other) == 3


def test_export_filters_by_column() -> None:
    database = memory()
    database.add(origin(), [row(), row(backend="triton", version="triton 3.6, loka 0")])
    (group,) = database.export(backend="triton").groups
    assert [r.backend for r in group.rows] == ["triton"]
    with pytest.raises(ValueError, match="no column speed"):
        database.export(speed=1)


def test_machines_are_told_apart_newest_first() -> None:
    database = memory()
    database.add(origin(), [row(), row(backend="triton", version="triton 3.5, loka 0")])
    database.add(origin(date="2026-01-09"), [row(k=2048, backend="triton", version="triton 3.6, loka 0")])
    database.add(origin(date="2026-01-05", torch="2.12"), [row(version="torch 2.12, loka 0")])
    first, second = database.machines()
    assert (first.torch, first.versions) == (
        "2.11.0",
        {"torch": "torch 2.11.0, loka 0", "triton": "triton 3.6, loka 0"},
    )
    assert second.torch == "2.12"
    assert str(first) == "NVIDIA H200, driver 580, torch 2.11.0"


def test_prune_by_date_and_by_machine() -> None:
    def full() -> Database:
        database = memory()
        database.add(origin(), [row(), row(k=2048, version="torch 2.9, loka 0")])
        database.add(origin(date="2026-05-01", device="NVIDIA A100"), [row()])
        return database

    database = full()
    assert database.prune(before="2026-02-01") == 2
    assert [o.device for o, _ in database.entries()] == ["NVIDIA A100"]
    database = full()
    assert database.prune(except_machines=[H200]) == 2
    assert [r for _, r in database.entries()] == [row()]
    with pytest.raises(ValueError, match="what to delete"):
        database.prune()


def write_rows(path: Path, number: int, count: int) -> None:
    for index in range(count):
        with Database.open(path) as database:  # a fresh connection each time: creation and locking are raced for too
            database.add(origin(date=f"2026-01-{number + 1:02d}"), [row(k=number * 1000 + index), row(k=999_999)])


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    path, count, writers = tmp_path / "new" / "rows.sqlite", 25, 4
    context = multiprocessing.get_context("fork")  # importing torch four times more would take longer than the test
    running = [context.Process(target=write_rows, args=(path, i, count)) for i in range(writers)]
    for process in running:
        process.start()
    for process in running:
        process.join(timeout=60)
        assert process.exitcode == 0
    with Database.open(path, create=False) as database:
        assert len(database) == writers * count + 1
        assert next(o.date for o, r in database.entries(k=999_999)) == "2026-01-04"  # the newest, whoever wrote last
        (mode,) = database._connection.execute("PRAGMA journal_mode").fetchone()
        assert mode == "wal"


def test_the_default_place_is_read_when_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LOKA_DB", raising=False)
    assert default_path() == tmp_path / "loka" / "performance.sqlite"
    monkeypatch.setenv("LOKA_DB", str(tmp_path / "mine.sqlite"))
    assert default_path() == tmp_path / "mine.sqlite"
    with Database.open() as database:
        database.add(origin(), [row()])
    with Database.open(tmp_path / "mine.sqlite") as database:
        assert len(database) == 1


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.sqlite"
    text.write_text("hello " * 1000)
    with pytest.raises(ValueError, match="not a performance database"):
        Database.open(text)
    foreign = tmp_path / "foreign.sqlite"
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE songs (name TEXT)")
    connection.commit()
    connection.close()
    with pytest.raises(ValueError, match="somebody else's database: it holds songs"):
        Database.open(foreign)
    with pytest.raises(ValueError, match="there is no performance database"):
        Database.open(tmp_path / "missing.sqlite", create=False)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    Database.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(ValueError, match="schema 9, this loka reads 1"):
        Database.open(path)


def test_a_row_needs_a_time_or_a_reason() -> None:
    with pytest.raises(ValueError, match="a time, or a refusal"):
        row(microseconds=None)
