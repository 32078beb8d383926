"""The SQLite file behind the performance database: opened, prepared, read and written, with errors that name the file. It knows no rows.

Write-ahead log, one short transaction per write, a wait of 30 s for the lock. A file that may not be written can still be read: SQLite wants to put
files of its own beside a write-ahead log even to read, and where it cannot and none is pending, the file is opened as one that does not change.
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
    """One table of one SQLite file. `readonly`: the file or its folder cannot be written."""

    def __init__(self, path: str | Path, *, table: str, columns: str, schema: int, create: bool) -> None:
        self.path = str(path)
        self.readonly = self.path != MEMORY and _look_at(Path(path), create)
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
        """A write-ahead log needs files beside the database; where there can be none and none is pending, the file is all there is."""
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
            raise ValueError(f"{self.path} is somebody else's database: it holds {', '.join(tables)}")
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
        """Needs the file alone for a moment, and SQLite does not always wait for that: two processes may create it at once."""
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
        """What SQLite says, with the file's name and what can be done. A mistake in how it is used (ProgrammingError) stays what it is."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise
        except sqlite3.OperationalError as error:  # a lock, a full disk, rights
            raise ValueError(f"{self.path}: SQLite cannot do that: {error}") from error
        except sqlite3.DatabaseError as error:
            if "not a database" in str(error):  # perhaps a file of another kind: nothing here may suggest to delete it
                raise ValueError(f"{self.path} is not a performance database: {error}") from error
            raise ValueError(f"{self.path} is damaged: {error}; hint: loka db merge into a new file") from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Take the write lock at once: a reader that turned writer half-way could fail instead of waiting."""
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
        """Every row of a query."""
        with self.clear_errors():
            return self.connection.execute(query, tuple(values)).fetchall()

    def write(self, statement: str, values: Sequence[Sequence[Any]]) -> int:
        """One statement for many values in one transaction; how many rows it changed."""
        with self.clear_errors(), self._transaction():
            before = self.connection.total_changes
            self.connection.executemany(statement, values)
            return self.connection.total_changes - before

    def close(self) -> None:
        """Give the file back."""
        self.connection.close()


def _look_at(path: Path, create: bool) -> bool:
    """Whether a database there can only be read; raises where there is none and none can be made."""
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if is_folder:
        raise ValueError(f"{path} is a folder, expected the file of a performance database")
    if not exists:
        if not create:
            raise ValueError(f"there is no performance database at {path}; hint: loka db merge FILE makes one")
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
