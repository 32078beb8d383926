"""A progress bar on stderr: the current phase, how far it is and how long it has taken."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loka.data.progress import Progress as Told
from loka.data.progress import make_bar


class Progress:
    """Progress bar of a `loka.tune` call.

    Args:
        show: True or False; None shows it only in a terminal. A function(phase, done, total) is called instead of
            showing a bar; its total is None if unknown.
    """

    def __init__(self, show: "bool | Told | None" = None) -> None:
        self._told = show if callable(show) else None
        self.show = sys.stderr.isatty() if show is None else show is True
        self._bar: Any = None
        self._task: Any = None

    @contextmanager
    def phase(self, name: str, seconds: dict[str, float]) -> Iterator[None]:
        """Show a phase while the block runs, and add its time to `seconds`."""
        began = time.monotonic()
        self._open(name)
        if self._told is not None:
            self._told(name, 0, None)
        try:
            yield
        finally:
            seconds[name] = round(seconds.get(name, 0.0) + time.monotonic() - began, 3)
            self._close()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Report how far a phase is."""
        if self._told is not None:
            self._told(phase, done, total)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def finish(self, text: str) -> None:
        """Print the verdict."""
        if self.show:
            print(f"loka tune: {text}", file=sys.stderr)

    def _open(self, name: str) -> None:
        if self.show:
            self._bar = make_bar()
            self._bar.start()
            self._task = self._bar.add_task(name, total=None)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None
