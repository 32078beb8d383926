"""Check the places that a verb will write to, before its work and not after it."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path


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


def _check_other(option: str, path: Path, reads: Iterable[str | Path | None]) -> None:
    """Raise ValueError if writing there would replace what is read."""
    if any(source is not None and path.resolve() == Path(source).resolve() for source in reads):
        raise ValueError(f"{option} {path}: would replace what this command reads; expected another place")


def _check_parent(option: str, path: Path, parents: Sequence[Path]) -> None:
    """Raise ValueError if nothing can be created in the first of these that exists."""
    folder = next(parent for parent in parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {path}: {folder} cannot be written")
