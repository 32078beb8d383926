"""Progress of slow operations on stderr: a bar on a terminal, nothing if stderr is redirected."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]


@contextmanager
def telling(progress: Progress | None, what: str = "evaluate") -> Iterator[Progress]:
    """Yield a function to call with (name, done, total): the caller's own, or one that draws a bar."""
    if progress is not None or not sys.stderr.isatty():
        yield progress or _ignore
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda name, done, total: bar.update(
            task, completed=done, total=total, description=f"{what} {name}", refresh=True
        )


def _ignore(name: str, done: int, total: int) -> None:
    pass
