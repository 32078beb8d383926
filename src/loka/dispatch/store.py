"""The SQLite file behind the performance database: opening, schema check, reads, writes, and errors that name the file.

A read-only file can still be read: SQLite needs to create files next to a write-ahead log even to read. If it cannot
and no log is pending, the file is opened as immutable.
"""

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

MEMORY = ":memory:"
LOCK_SECONDS = 30.0


class Store:
    """One table of one SQLite file. `readonly` is True if the file or its folder cannot be written."""

    def __init__(self, path: str | Path, *, table: str, columns: str, schema: int, create: bool) -> None:
        self.path = str(path)
        self.readonly = self.path != MEMORY and _check_path(Path(path), create)
        with self.clear_errors():
            self.connection = self._connect_to_read() if self.readonly else self._connect(self.path)
            try:
                self._prepare(table, columns, schema)
            except BaseException:
                self.connection.close()
                raise

    def _connect(self, where: str, *, uri: bool = False) -> sqlite3.Connection:
        connection = sqlite3.connect(where, timeout=LOCK_SECONDS, isolation_level=None, uri=uri)
        connection.execute(f"PRAGMA busy_timeout = {int(1000 * LOCK_SECONDS)}")
        return connection

    def _connect_to_read(self) -> sqlite3.Connection:
        """Open read-only. If SQLite cannot create its log files and no log is pending, open the file as immutable."""
        where = f"file:{quote(os.path.abspath(self.path))}?mode=ro"
        connection = self._connect(where, uri=True)
        try:
            connection.execute("PRAGMA user_version").fetchone()
        except sqlite3.OperationalError as error:
            connection.close()
            log = Path(f"{self.path}-wal")
            if log.exists() and log.stat().st_size:
                raise ValueError(
                    f"{self.path} cannot be read here: {log.name} holds rows that were not written back, and the folder is read-only "
                    f"({error}); hint: copy both files to a folder you may write"
                ) from error
            return self._connect(f"{where}&immutable=1", uri=True)
        return connection

    def _prepare(self, table: str, columns: str, schema: int) -> None:
        (version,) = self.connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, schema):
            raise ValueError(f"{self.path} has schema {version}, this loka reads {schema}; hint: loka db export, merge")
        tables = [name for (name,) in self.connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        if tables and table not in tables:
            raise ValueError(f"{self.path} is not a loka database: it holds {', '.join(tables)}")
        if version == schema:
            return
        if self.readonly:
            raise ValueError(f"{self.path} is no performance database yet, and it is read-only")
        self._switch_to_wal()
        self.connection.execute("PRAGMA synchronous = NORMAL")
        with self._transaction():
            self.connection.execute(f"CREATE TABLE IF NOT EXISTS {table} {columns}")
            self.connection.execute(f"PRAGMA user_version = {schema}")

    def _switch_to_wal(self) -> None:
        """Enable the write-ahead log. This needs exclusive access, and SQLite does not always wait for it by itself, so
        retry in case another process creates the file at the same time."""
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                self.connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(0.01)

    @contextmanager
    def clear_errors(self) -> Iterator[None]:
        """Turn SQLite errors into ValueErrors that name the file and say what to do. ProgrammingErrors pass through."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise
        except sqlite3.OperationalError as error:  # a lock, a full disk, missing permissions
            raise ValueError(f"{self.path}: SQLite cannot do that: {error}") from error
        except sqlite3.DatabaseError as error:
            if "not a database" in str(error):  # may be an unrelated file: do not suggest replacing it
                raise ValueError(f"{self.path} is not a performance database: {error}") from error
            raise ValueError(f"{self.path} is damaged: {error}; hint: loka db merge into a new file") from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Take the write lock at the start: upgrading a read lock half-way could fail instead of waiting."""
        if self.readonly:
            raise ValueError(
                f"{self.path} is read-only: the file or its folder cannot be written; hint: another --db or LOKA_DB"
            )
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    def fetch(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with self.clear_errors():
            return self.connection.execute(query, tuple(values)).fetchall()

    def write(self, statement: str, values: Sequence[Sequence[Any]]) -> int:
        """Execute a statement for many values in one transaction and return how many rows it changed."""
        with self.clear_errors(), self._transaction():
            before = self.connection.total_changes
            self.connection.executemany(statement, values)
            return self.connection.total_changes - before

    def close(self) -> None:
        """Close the file."""
        self.connection.close()


def _check_path(path: Path, create: bool) -> bool:
    """Return True if the database at a path can only be read. Raises if there is none and none can be created."""
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if is_folder:
        raise ValueError(f"{path} is a folder, expected the file of a performance database")
    if not exists:
        if not create:
            raise ValueError(
                f"there is no performance database at {path}; hint: loka db merge FILE makes one, "
                "loka db show --shipped has the rows that ship with the package"
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{path} cannot be made: {path.parent}: {error.strerror}") from error
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ValueError(f"{path} cannot be made: {path.parent} is read-only; hint: another --db or LOKA_DB")
        return False
    if not os.access(path, os.R_OK):
        raise ValueError(f"{path} cannot be read: permission denied")
    return not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK | os.X_OK))
