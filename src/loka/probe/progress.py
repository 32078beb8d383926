"""Progress of slow operations on stderr: a bar on a terminal, nothing if stderr is redirected."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loka.data.progress import make_bar, silent

Progress = Callable[[str, int, int], None]


@contextmanager
def telling(progress: Progress | None, what: str = "evaluate") -> Iterator[Progress]:
    """Yield a function to call with (name, done, total): the caller's own, or one that draws a bar."""
    if progress is not None or not sys.stderr.isatty():
        yield progress or silent
        return
    with make_bar(transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda name, done, total: bar.update(
            task, completed=done, total=total, description=f"{what} {name}", refresh=True
        )
