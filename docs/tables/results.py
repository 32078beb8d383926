"""Where tables come from and what they are made of: the committed results, and Markdown."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from loka.records import Record, load

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
R = TypeVar("R", bound=Record)
_READ: dict[str, None] = {}  # the files of the table that is being made, in order


def read(name: str) -> dict[str, Any] | None:
    """A result file as it is; None where it is not there."""
    path = _find(name)
    found: dict[str, Any] | None = None if path is None else json.loads(path.read_text(encoding="utf-8"))
    return found


def load_record(name: str, kind: type[R]) -> R | None:
    """A result file as a record; None where it is not there."""
    path = _find(name)
    return None if path is None else load(path, kind)


def _find(name: str) -> Path | None:
    path = RESULTS / name
    if not path.exists():
        return None
    _READ[name] = None
    return path


def make_with_records(make: Callable[[], str | None]) -> tuple[str | None, list[str]]:
    """Make a table, and note which result files it reads, as paths in `benchmarks/results`."""
    _READ.clear()
    return make(), list(_READ)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join('---' for _ in head)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
