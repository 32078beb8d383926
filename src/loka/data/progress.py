"""Progress of long jobs: a callable, so that packages need not depend on a progress bar, and the bar of those that draw one."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

Progress = Callable[[str, int, int | None], None]
"""progress(stage, done, total); total is None when it is unknown"""


def silent(stage: str, done: int, total: int | None) -> None:
    """Report nothing."""


def make_bar(*, transient: bool = False) -> "Bar":
    """Return rich's progress bar on stderr: what runs, how far it is, how long it has taken and will take.

    Args:
        transient: remove the bar when it is stopped.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description:<34}"), BarColumn(bar_width=28), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), console=Console(stderr=True), transient=transient,
    )  # fmt: skip
