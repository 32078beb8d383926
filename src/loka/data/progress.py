"""Progress of long jobs: a callable, so that this package does not depend on a progress bar."""

from collections.abc import Callable

Progress = Callable[[str, int, int | None], None]
"""progress(stage, done, total); total is None when it is unknown"""


def silent(stage: str, done: int, total: int | None) -> None:
    """Report nothing."""
