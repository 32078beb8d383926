"""Progress of something slow, on stderr: a bar where a person sits at a terminal, nothing where the output goes to a file."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]


@contextmanager
def telling(progress: Progress | None, what: str = "evaluate") -> Iterator[Progress]:
    """What to call with (name, done, total): the caller's own, or a bar that is cleared at the end."""
    if progress is not None or not sys.stderr.isatty():
        yield progress or _say_nothing
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda name, done, total: bar.update(
            task, completed=done, total=total, description=f"{what} {name}", refresh=True
        )


def _say_nothing(name: str, done: int, total: int) -> None:
    """Nobody is watching."""
