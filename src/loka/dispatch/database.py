"""The performance database: what was measured, where, kept in one SQLite file so that nothing has to be measured twice.

    database = Database.open()                       $LOKA_DB, else $XDG_CACHE_HOME/loka/performance.sqlite, else ~/.cache/loka/...
    database.add(origin, rows)                       the newest row of a key wins
    database.find(key, machine) -> Found             a row, or every reason why the rows that exist were not used

M is bucketed, always rounded down: 16, 32, 48, 64, 96, 128, 192, 256, ... (powers of two and the middles between them; below 16 exact), plus one
where M is no multiple of 16, since unaligned operands are padded and are slower. A row is measured *at* its bucket's edge, so what it claims for a
larger M in the bucket is on the careful side: FP8 gains with M. K and N are never rounded.

A row counts only for the machine it was measured on: the same GPU, driver, torch and backend version. Rows that fail this are not used, and `find`
names them. A plan for a machine that is elsewhere uses that machine's own description (`machines`), never a mixture.

Several processes may read and write at once: write-ahead log, one short transaction per `add`, a wait of 30 s for the lock. Not for a network file
system, where SQLite's locks do not hold.
"""

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loka.records.performance import Origin, PerformanceRow, PerformanceRows, RowGroup

__all__ = ["Database", "Found", "Key", "Machine", "bucket_of", "default_path"]

SCHEMA = 1
LOCK_SECONDS = 30.0
_KEY = ("op", "variant", "m", "k", "n", "backend", "version", "device", "driver", "torch")
_CREATE = f"""
CREATE TABLE IF NOT EXISTS rows (
    op TEXT NOT NULL, variant TEXT NOT NULL, m INTEGER NOT NULL, k INTEGER NOT NULL, n INTEGER NOT NULL,
    backend TEXT NOT NULL, version TEXT NOT NULL, device TEXT NOT NULL, driver TEXT NOT NULL, torch TEXT NOT NULL,
    date TEXT NOT NULL, origin BLOB NOT NULL, row BLOB NOT NULL, PRIMARY KEY ({", ".join(_KEY)})
) WITHOUT ROWID"""


def bucket_of(m: int) -> int:
    """The M a row for this M is measured at: rounded down to a bucket's edge, plus one where M is no multiple of 16."""
    if m < 1:
        raise ValueError(f"M must be positive, got {m}")
    if m < 16:
        return m
    power = 1 << (m.bit_length() - 1)
    middle = power + power // 2
    edge = middle if m >= middle and middle % 16 == 0 else power
    return edge if m % 16 == 0 else edge + 1


@dataclass(frozen=True)
class Machine:
    """What a row must match. `versions` maps a backend to the version that would run."""

    device: str
    driver: str | None
    torch: str
    versions: dict[str, str]

    def __str__(self) -> str:
        return f"{self.device}, driver {self.driver or 'unknown'}, torch {self.torch}"


@dataclass(frozen=True)
class Key:
    """One call on one backend; M is rounded to its bucket."""

    op: str
    variant: str
    m: int
    k: int
    n: int
    backend: str

    def __str__(self) -> str:
        return f"{self.op} {self.m}x{self.k}x{self.n} {self.variant} on {self.backend}"


@dataclass(frozen=True)
class Found:
    """The row that counts, or None with every reason."""

    row: PerformanceRow | None
    origin: Origin | None
    reason: str = ""
    stale: bool = False  # there are rows, of another machine or version


def default_path() -> Path:
    """Where the database lives unless told: read when asked, never at import."""
    if os.environ.get("LOKA_DB"):
        return Path(os.environ["LOKA_DB"])
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "loka" / "performance.sqlite"


class Database:
    """Rows on disk, or in memory (`path=":memory:"`)."""

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path = str(path)
        if self.path != ":memory:":
            if not create and not Path(path).exists():
                raise ValueError(f"there is no performance database at {path}; hint: loka db merge FILE makes one")
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(self.path, timeout=LOCK_SECONDS, isolation_level=None)
        try:
            self._prepare()
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise ValueError(f"{self.path} is not a performance database: {error}") from error

    @classmethod
    def open(cls, path: str | Path | None = None, *, create: bool = True) -> "Database":
        """The database at a path, or at the default one."""
        return cls(default_path() if path is None else path, create=create)

    def _prepare(self) -> None:
        self._connection.execute(f"PRAGMA busy_timeout = {int(1000 * LOCK_SECONDS)}")
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA):
            raise ValueError(f"{self.path} has schema {version}, this loka reads {SCHEMA}; hint: loka db export, merge")
        if version == SCHEMA:
            return
        tables = [name for (name,) in self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        if tables and "rows" not in tables:
            raise ValueError(f"{self.path} is somebody else's database: it holds {', '.join(tables)}")
        self._switch_to_wal()
        self._connection.execute("PRAGMA synchronous = NORMAL")
        with self._transaction():
            self._connection.execute(_CREATE)
            self._connection.execute(f"PRAGMA user_version = {SCHEMA}")

    def _switch_to_wal(self) -> None:
        """Needs the file alone for a moment, and SQLite does not always wait for that: two processes may create it at once."""
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(0.01)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Take the write lock at once: a reader that turned writer half-way could fail instead of waiting."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def close(self) -> None:
        """Give the file back."""
        self._connection.close()

    def __enter__(self) -> "Database":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        (count,) = self._connection.execute("SELECT COUNT(*) FROM rows").fetchone()
        return int(count)

    def add(self, origin: Origin, rows: Iterable[PerformanceRow]) -> int:
        """Write rows of one origin; a row of the same key stays when it is newer. Returns how many were written."""
        values = [_columns(origin, row) for row in rows]
        names = (*_KEY, "date", "origin", "row")
        keep = ", ".join(f"{name} = excluded.{name}" for name in ("date", "origin", "row"))
        statement = (
            f"INSERT INTO rows ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "
            f"ON CONFLICT ({', '.join(_KEY)}) DO UPDATE SET {keep} WHERE excluded.date >= rows.date"
        )
        with self._transaction():
            before = self._connection.total_changes
            self._connection.executemany(statement, values)
            return self._connection.total_changes - before

    def merge(self, record: PerformanceRows) -> int:
        """Write the rows of an export."""
        return sum(self.add(group.origin, group.rows) for group in record.groups)

    def find(self, key: Key, machine: Machine) -> Found:
        """The row of a key for a machine; otherwise why what is there does not count."""
        m = bucket_of(key.m) if key.m else 0
        found = self._select(op=key.op, variant=key.variant, m=m, k=key.k, n=key.n, backend=key.backend)
        version = machine.versions.get(key.backend)
        reasons = []
        for origin, row in found:
            why = _mismatch(origin, row, machine, version)
            if not why:
                return Found(row, origin)
            reasons.append(f"a row of {origin.date[:10]} was not used: {', '.join(why)}")
        missing = f"no row for {key.op} {m}x{key.k}x{key.n} {key.variant} on {key.backend}"
        if reasons:
            return Found(None, None, "; ".join(dict.fromkeys(reasons)), stale=True)
        return Found(None, None, f"{missing} from {machine.device}")

    def entries(self, **filters: Any) -> Iterator[tuple[Origin, PerformanceRow]]:
        """Rows whose columns equal the filters, newest first."""
        unknown = set(filters) - {*_KEY}
        if unknown:
            raise ValueError(f"no column {', '.join(sorted(unknown))}; columns are {', '.join(_KEY)}")
        yield from self._select(**filters)

    def _select(self, **filters: Any) -> list[tuple[Origin, PerformanceRow]]:
        where = " AND ".join(f"{name} = ?" for name in filters) or "1"
        query = f"SELECT origin, row FROM rows WHERE {where} ORDER BY date DESC, {', '.join(_KEY)}"
        return [_decode(*found) for found in self._connection.execute(query, tuple(filters.values()))]

    def machines(self) -> list[Machine]:
        """Every machine rows were measured on, the one with the newest row first. A backend's version is its newest there."""
        query = (
            "SELECT device, driver, torch, backend, version, MAX(date) AS newest FROM rows "
            "GROUP BY device, driver, torch, backend, version ORDER BY newest DESC"
        )
        found: dict[tuple[str, str, str], dict[str, str]] = {}
        for device, driver, torch, backend, version, _ in self._connection.execute(query):
            found.setdefault((device, driver, torch), {}).setdefault(backend, version)
        return [Machine(device, driver or None, torch, versions) for (device, driver, torch), versions in found.items()]

    def export(self, **filters: Any) -> PerformanceRows:
        """Rows as one record, grouped by origin."""
        groups: dict[Origin, list[PerformanceRow]] = {}
        for origin, row in self.entries(**filters):
            groups.setdefault(origin, []).append(row)
        return PerformanceRows(groups=[RowGroup(origin=origin, rows=rows) for origin, rows in groups.items()])

    def prune(self, *, before: str | None = None, except_machines: Sequence[Machine] = ()) -> int:
        """Delete rows older than an ISO date, and rows no listed machine can use. Returns how many."""
        if before is None and not except_machines:
            raise ValueError("prune needs to know what to delete: a date, or the machines whose rows to keep")
        doomed = []
        for origin, row in self._select():
            old = before is not None and origin.date < before
            usable = any(not _mismatch(origin, row, m, m.versions.get(row.backend)) for m in except_machines)
            if old or (except_machines and not usable):
                doomed.append(_columns(origin, row)[: len(_KEY)])
        with self._transaction():
            self._connection.executemany(
                f"DELETE FROM rows WHERE {' AND '.join(f'{name} = ?' for name in _KEY)}", doomed
            )
        return len(doomed)


def _columns(origin: Origin, row: PerformanceRow) -> tuple[Any, ...]:
    if row.m and row.m != bucket_of(row.m):
        raise ValueError(
            f"{row.op} {row.m}x{row.k}x{row.n}: rows are measured at the edge of a bucket, M = {bucket_of(row.m)} for this one"
        )
    key = (row.op, row.variant, row.m, row.k, row.n, row.backend, row.version)
    where = (origin.device, origin.driver or "", origin.torch)
    return (*key, *where, origin.date, msgspec.json.encode(origin), msgspec.json.encode(row))


def _decode(origin: bytes, row: bytes) -> tuple[Origin, PerformanceRow]:
    return msgspec.json.decode(origin, type=Origin), msgspec.json.decode(row, type=PerformanceRow)


def _mismatch(origin: Origin, row: PerformanceRow, machine: Machine, version: str | None) -> list[str]:
    """In what a row's machine differs from the one that asks."""
    pairs = [
        ("device", origin.device, machine.device),
        ("driver", origin.driver, machine.driver),
        ("torch", origin.torch, machine.torch),
        (f"{row.backend}", row.version, version),
    ]
    return [f"{name} {was or 'unknown'}, here {now or 'unknown'}" for name, was, now in pairs if was != now]
