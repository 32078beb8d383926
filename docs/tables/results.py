"""Where tables come from and what they are made of: the committed results, and Markdown."""

import json
from pathlib import Path
from typing import Any, TypeVar

from loka.records import Record, load

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
R = TypeVar("R", bound=Record)


def read(name: str) -> dict[str, Any] | None:
    """A result file as it is; None where it is not there."""
    path = RESULTS / name
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


def load_record(name: str, kind: type[R]) -> R | None:
    """A result file as a record; None where it is not there."""
    path = RESULTS / name
    return load(path, kind) if path.exists() else None


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join('---' for _ in head)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
