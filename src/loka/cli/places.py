"""Check the places that a verb will write to, before its work and not after it."""

import hashlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

_CLAIMED: dict[Path, IO[str]] = {}  # the folders that this process writes to, with what holds the lock


def check_file(option: str, path: Path | None, reads: Iterable[str | Path | None] = ()) -> None:
    """Raise ValueError if a file cannot be written there, or is one that the verb `reads`; None is no request."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {path}: is a folder, expected a file")
    _check_other(option, path, reads)
    _check_parent(option, path, path.absolute().parents)


def check_folder(option: str, path: Path | None, reads: Iterable[str | Path | None] = ()) -> None:
    """Raise ValueError if files cannot be written to that folder, or it is one that the verb `reads`.

    It may not exist yet. None is no request.
    """
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise ValueError(f"{option} {path}: is a file, expected a folder")
    _check_other(option, path, reads)
    _check_parent(option, path, (path.absolute(), *path.absolute().parents))


def claim_folder(option: str, path: Path | None) -> None:
    """Check a folder as `check_folder` does, and keep this user's other processes on this machine out of it while this one runs.

    Two jobs in one folder would replace each other's files. The lock is one of the operating system, which ends with
    the process, however it ends, and which its children do not inherit. Of several ranks, the first one claims.
    """
    check_folder(option, path)
    if path is None or os.environ.get("RANK", "0") != "0":
        return
    place = path.resolve()
    with suppress(ImportError, OSError):  # a system without such locks
        import fcntl

        if place in _CLAIMED:
            return
        name = f"loka-{os.getuid()}-{hashlib.sha256(str(place).encode()).hexdigest()[:16]}.lock"
        lock = Path(tempfile.gettempdir()) / name  # not in the folder, where it would be left behind
        # a link that somebody else put there is not followed: what it names would be emptied below
        file = os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise ValueError(
                f"{option} {path}: process {file.read().strip() or '?'} is writing there; hint: wait for it, or give "
                "another folder"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        _CLAIMED[place] = file


def _check_other(option: str, path: Path, reads: Iterable[str | Path | None]) -> None:
    """Raise ValueError if writing there would replace what is read."""
    if any(source is not None and path.resolve() == Path(source).resolve() for source in reads):
        raise ValueError(f"{option} {path}: would replace what this command reads; expected another place")


def _check_parent(option: str, path: Path, parents: Sequence[Path]) -> None:
    """Raise ValueError if nothing can be created in the first of these that exists."""
    folder = next(parent for parent in parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {path}: {folder} cannot be written")
