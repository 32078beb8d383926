"""How long jobs tell what they are doing: a callable, so that this room knows no progress bar."""

from collections.abc import Callable

Progress = Callable[[str, int, int | None], None]
"""progress(stage, done, total); total is None when it is unknown"""


def silent(stage: str, done: int, total: int | None) -> None:
    """Say nothing."""
