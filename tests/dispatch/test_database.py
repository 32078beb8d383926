"""The database keeps the newest row of a key, is safe under several processes, and never hands out a row of another machine."""

import multiprocessing
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from loka.dispatch.database import Database, Key, bucket_of, default_path
from loka.records import from_json, to_json
from loka.records.performance import Origin, PerformanceRow, PerformanceRows

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


@pytest.mark.parametrize("spelling", ["2026-01-03", "20260103", "2026-W01-6", "2026W016"])
def test_a_day_means_the_same_in_every_spelling(spelling: str) -> None:
    database = memory()
    database.add(origin(date="2026-01-02T10:00:00+00:00"), [row()])
    database.add(origin(date="2026-01-03T00:00:00+00:00"), [row(k=2048)])
    database.add(origin(date="2026-12-31"), [row(k=4096)])
    assert database.prune(before=spelling) == 1
    assert {r.k for _, r in database.entries()} == {2048, 4096}


@pytest.mark.parametrize("nonsense", ["", "2026", "yesterday", "2026-13-01", "2026-01-01T00:00"])
def test_what_is_no_day_deletes_nothing(nonsense: str) -> None:
    database = memory()
    database.add(origin(), [row()])
    with pytest.raises(ValueError, match="expected a day such as"):
        database.prune(before=nonsense)
    assert len(database) == 1


def test_a_row_measured_again_while_prune_looks_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.sqlite"
    with Database.open(path) as database:
        database.add(origin(), [row(), row(k=2048)])
        look = database._select

        def look_then_somebody_writes(**filters: object) -> list[tuple[Origin, PerformanceRow]]:
            found = look(**filters)
            with Database.open(path) as other:
                other.add(origin(date="2030-01-01"), [row()])
            return found

        monkeypatch.setattr(database, "_select", look_then_somebody_writes)
        assert database.prune(before="2029-01-01") == 1
        monkeypatch.undo()
        assert [(o.date, r.k) for o, r in database.entries()] == [("2030-01-01", row().k)]


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
        (mode,) = database._store.connection.execute("PRAGMA journal_mode").fetchone()
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
    with pytest.raises(ValueError, match="not a loka database: it holds songs"):
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


def damage(path: Path) -> None:
    """Write over the pages of the table, and leave the header as it is."""
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(bytes(data))


def test_a_damaged_database_is_named_whatever_is_asked_of_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    with Database.open(path) as database:
        database.add(origin(), [row(k=k) for k in range(1, 200)])
    damage(path)
    for ask in (len, Database.machines, Database.export, lambda d: d.find(KEY, H200), lambda d: d.prune(before="2027-01-01")):  # fmt: skip
        with Database.open(path) as database, pytest.raises(ValueError, match=r"rows\.sqlite is damaged"):
            ask(database)


def test_a_row_that_cannot_be_decoded_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    with Database.open(path) as database:
        database.add(origin(), [row()])
        database._store.connection.execute("UPDATE rows SET row = '{'")
        with pytest.raises(ValueError, match=r"rows\.sqlite is damaged: a row cannot be read"):
            list(database.entries())


def test_places_where_no_database_can_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder"):
        Database.open(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="cannot be made"):
        Database.open(tmp_path / "file" / "rows.sqlite")


def as_somebody_else(ask: Callable[[], None]) -> None:
    """Run in a child that is not root: root may write everything."""

    def run() -> None:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        ask()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(timeout=60)
    assert process.exitcode == 0


@pytest.fixture
def locked() -> Iterator[Path]:
    """A database in a folder that cannot be written; not tmp_path, whose parents only its owner may enter."""
    folder = Path(tempfile.mkdtemp())
    with Database.open(folder / "rows.sqlite") as database:
        database.add(origin(), [row()])
    (folder / "rows.sqlite").chmod(0o444)
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_what_may_not_be_written_can_be_read(locked: Path) -> None:
    def ask() -> None:
        with Database.open(locked / "rows.sqlite", create=False) as database:
            assert database.find(KEY, H200).row == row()
            assert len(database) == 1
            with pytest.raises(ValueError, match="is read-only"):
                database.add(origin(), [row()])
            with pytest.raises(ValueError, match="is read-only"):
                database.prune(before="2027-01-01")
        with pytest.raises(ValueError, match=r"cannot be made.*read-only"):
            Database.open(locked / "new.sqlite")
        with pytest.raises(ValueError, match=r"cannot be made.*denied"):
            Database.open(locked / "new" / "rows.sqlite")

    as_somebody_else(ask)


def test_rows_that_wait_in_a_log_are_not_passed_over(locked: Path) -> None:
    locked.chmod(0o755)
    (locked / "rows.sqlite-wal").write_bytes(b"x" * 100)
    (locked / "rows.sqlite-wal").chmod(0o444)
    locked.chmod(0o555)

    def ask() -> None:
        with pytest.raises(ValueError, match="not written back"):
            Database.open(locked / "rows.sqlite", create=False)

    as_somebody_else(ask)
