"""The performance database: kernel times and errors with the machine they were measured on, cached in one SQLite file.

    database = Database.open()              $LOKA_DB, else $XDG_CACHE_HOME/loka/performance.sqlite, else
                                            ~/.cache/loka/...
    database.add(origin, rows)              the newest row of a key wins
    database.find(key, machine) -> Found    a row, or every reason why the existing rows were not used

M is bucketed, always rounded down: 16, 32, 48, 64, 96, 128, 192, 256, ... (powers of two and the midpoints between
them; exact below 16), plus one where M is not a multiple of 16, since unaligned operands are padded and slower. A row
is measured *at* its bucket's lower edge, so its speed-up is conservative for the larger M of the bucket: FP8 gains with
M. K and N are never rounded.

A row is valid only for the machine it was measured on: same GPU, driver, torch and backend version. Other rows are not
used, and `find` says why. A plan for another machine uses one description of that machine (`machines`), never a
mixture.

Several processes may read and write at once: write-ahead log, one short transaction per `add`, up to 30 s of waiting
for the lock. Do not put the file on a network file system, where SQLite's locks do not hold. A read-only file can be
read. SQLite errors are raised as a ValueError that names the file.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from loka.dispatch.store import Store
from loka.records.performance import Origin, PerformanceRow, PerformanceRows, RowGroup

SCHEMA = 1
_KEY = ("op", "variant", "m", "k", "n", "backend", "version", "device", "driver", "torch")
_COLUMNS = f"""(
    op TEXT NOT NULL, variant TEXT NOT NULL, m INTEGER NOT NULL, k INTEGER NOT NULL, n INTEGER NOT NULL,
    backend TEXT NOT NULL, version TEXT NOT NULL, device TEXT NOT NULL, driver TEXT NOT NULL, torch TEXT NOT NULL,
    date TEXT NOT NULL, origin BLOB NOT NULL, row BLOB NOT NULL, PRIMARY KEY ({", ".join(_KEY)})
) WITHOUT ROWID"""


def bucket_of(m: int) -> int:
    """Return the M at which calls with `m` rows are measured and looked up.

    Args:
        m: rows of a call.

    Returns:
        The lower edge of its bucket, plus one if `m` is not a multiple of 16.

    Example:
        >>> bucket_of(4096)
        4096
    """
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
    """The machine on which database rows must have been measured to be used.

    Args:
        device: name of the GPU.
        driver: driver version; None if unknown.
        torch: torch version.
        versions: version of each backend.

    Example:
        >>> Machine("NVIDIA H200", "580.65", "2.13.0", {"torch": "2.13.0"})
    """

    device: str
    driver: str | None
    torch: str
    versions: dict[str, str]

    def __str__(self) -> str:
        return f"{self.device}, driver {self.driver or 'unknown'}, torch {self.torch}"


@dataclass(frozen=True)
class Key:
    """Identifies a call on a backend. `find` rounds M down to its bucket."""

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
    """The matching row, or None with the reasons."""

    row: PerformanceRow | None
    origin: Origin | None
    reason: str = ""
    stale: bool = False  # rows exist, but of another machine or version


def default_path() -> Path:
    """Return the default path of the database. The environment is read at each call, not at import."""
    if os.environ.get("LOKA_DB"):
        return Path(os.environ["LOKA_DB"])
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "loka" / "performance.sqlite"


class Database:
    """The performance database, on disk or in memory. Also a context manager that closes it.

    Args:
        path: the SQLite file; ":memory:" for a database in memory.
        create: create a missing file; False raises ValueError instead.

    Example:
        >>> with Database.open() as database:
        ...     len(database)
    """

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self._store = Store(path, table="rows", columns=_COLUMNS, schema=SCHEMA, create=create)
        self.path = self._store.path

    @classmethod
    def open(cls, path: str | Path | None = None, *, create: bool = True) -> "Database":
        """Open the database at a path, by default at `default_path()`."""
        return cls(default_path() if path is None else path, create=create)

    def close(self) -> None:
        """Close the file."""
        self._store.close()

    def __enter__(self) -> "Database":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return int(self._store.fetch("SELECT COUNT(*) FROM rows")[0][0])

    def add(self, origin: Origin, rows: Iterable[PerformanceRow]) -> int:
        """Write rows of one origin and return how many were written. An existing row is kept if it is newer."""
        values = [_to_columns(origin, row) for row in rows]
        names = (*_KEY, "date", "origin", "row")
        keep = ", ".join(f"{name} = excluded.{name}" for name in ("date", "origin", "row"))
        statement = (
            f"INSERT INTO rows ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "
            f"ON CONFLICT ({', '.join(_KEY)}) DO UPDATE SET {keep} WHERE excluded.date >= rows.date"
        )
        return self._store.write(statement, values)

    def merge(self, record: PerformanceRows) -> int:
        """Write the rows of an export and return how many were written."""
        return sum(self.add(group.origin, group.rows) for group in record.groups)

    def find(self, key: Key, machine: Machine) -> Found:
        """Look up the row of a key for a machine. If none matches, the result says why."""
        m = bucket_of(key.m) if key.m else 0
        found = self._select(**{**asdict(key), "m": m})
        version = machine.versions.get(key.backend)
        reasons = []
        for origin, row in found:
            why = _find_mismatches(origin, row, machine, version)
            if not why:
                return Found(row, origin)
            reasons.append(f"a row of {origin.date[:10]} was not used: {', '.join(why)}")
        if reasons:
            return Found(None, None, "; ".join(dict.fromkeys(reasons)), stale=True)
        return Found(None, None, f"no row for {key.op} {m}x{key.k}x{key.n} {key.variant} from {machine.device}")

    def entries(self, **filters: Any) -> Iterator[tuple[Origin, PerformanceRow]]:
        """Yield rows whose key columns equal the filters, newest first."""
        unknown = set(filters) - {*_KEY}
        if unknown:
            raise ValueError(f"no column {', '.join(sorted(unknown))}; columns are {', '.join(_KEY)}")
        yield from self._select(**filters)

    def _select(self, **filters: Any) -> list[tuple[Origin, PerformanceRow]]:
        where = " AND ".join(f"{name} = ?" for name in filters) or "1"
        query = f"SELECT origin, row FROM rows WHERE {where} ORDER BY date DESC, {', '.join(_KEY)}"
        found = self._store.fetch(query, tuple(filters.values()))
        try:
            return [_decode(*pair) for pair in found]
        except msgspec.DecodeError as error:
            raise ValueError(f"{self.path} is damaged: a row cannot be read: {error}") from error

    def machines(self) -> list[Machine]:
        """List the machines that rows were measured on, newest row first, with the newest version of each backend."""
        query = (
            "SELECT device, driver, torch, backend, version, MAX(date) AS newest FROM rows "
            "GROUP BY device, driver, torch, backend, version ORDER BY newest DESC"
        )
        found: dict[tuple[str, str, str], dict[str, str]] = {}
        for device, driver, torch, backend, version, _ in self._store.fetch(query):
            found.setdefault((device, driver, torch), {}).setdefault(backend, version)
        return [Machine(device, driver or None, torch, versions) for (device, driver, torch), versions in found.items()]

    def export(self, **filters: Any) -> PerformanceRows:
        """Return matching rows as one record, grouped by origin."""
        groups: dict[Origin, list[PerformanceRow]] = {}
        for origin, row in self.entries(**filters):
            groups.setdefault(origin, []).append(row)
        return PerformanceRows(groups=[RowGroup(origin=origin, rows=rows) for origin, rows in groups.items()])

    def prune(self, *, before: str | None = None, except_machines: Sequence[Machine] = ()) -> int:
        """Delete rows measured before a day (any ISO format) and rows that no listed machine can use; return how many.

        A row that another process measures again in the meantime has a new date and is kept.
        """
        if before is None and not except_machines:
            raise ValueError("prune needs to know what to delete: a date, or the machines whose rows to keep")
        day = None if before is None else _parse_day(before)
        doomed = []
        for origin, row in self._select():
            old = day is not None and origin.date < day
            usable = any(not _find_mismatches(origin, row, m, m.versions.get(row.backend)) for m in except_machines)
            if old or (except_machines and not usable):
                doomed.append(_to_columns(origin, row)[: len(_KEY) + 1])
        where = " AND ".join(f"{name} = ?" for name in (*_KEY, "date"))
        return self._store.write(f"DELETE FROM rows WHERE {where}", doomed)


def _parse_day(text: str) -> str:
    """Normalize an ISO day to YYYY-MM-DD: dates are compared as text, and 20260101 sorts after 2026-12-31."""
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise ValueError(f"before={text!r}: expected a day such as 2026-01-31 ({error})") from error


def _to_columns(origin: Origin, row: PerformanceRow) -> tuple[Any, ...]:
    if row.m and row.m != bucket_of(row.m):
        raise ValueError(
            f"{row.op} {row.m}x{row.k}x{row.n}: rows are measured at the edge of a bucket, M = {bucket_of(row.m)} for this one"
        )
    key = (row.op, row.variant, row.m, row.k, row.n, row.backend, row.version)
    where = (origin.device, origin.driver or "", origin.torch)
    return (*key, *where, origin.date, msgspec.json.encode(origin), msgspec.json.encode(row))


def _decode(origin: bytes, row: bytes) -> tuple[Origin, PerformanceRow]:
    return msgspec.json.decode(origin, type=Origin), msgspec.json.decode(row, type=PerformanceRow)


def _find_mismatches(origin: Origin, row: PerformanceRow, machine: Machine, version: str | None) -> list[str]:
    """List how a row's machine and backend version differ from the requested ones."""
    pairs = [
        ("device", origin.device, machine.device),
        ("driver", origin.driver, machine.driver),
        ("torch", origin.torch, machine.torch),
        (f"{row.backend}", row.version, version),
    ]
    return [f"{name} {was or 'unknown'}, here {now or 'unknown'}" for name, was, now in pairs if was != now]
