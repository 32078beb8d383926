"""Write checkpoints beside the training, one at a time.

The loop hands over a snapshot that lives in its own CPU memory and goes on; a thread writes it. At most one snapshot is
in flight, so a slow disk costs waiting and never unbounded memory. An error of the thread is raised in the loop at the
next save or at the end. The thread is not a daemon: when the loop fails, what it handed over is still written.
"""

import threading
from pathlib import Path

from loka.training.checkpoint import Snapshot, prune, remove_leftovers, write_best, write_checkpoint


class Saver:
    """Asynchronous writer of one run's checkpoints."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.last: Path | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        remove_leftovers(folder)

    def save(self, snapshot: Snapshot) -> None:
        """Start writing; waits for the previous write and raises its error."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written; raise what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError(f"a checkpoint could not be written to {self.folder}: {error}") from error

    def _write(self, snapshot: Snapshot) -> None:
        try:
            self.last = write_checkpoint(self.folder, snapshot)
            best = snapshot.state["monitor"]["best"]
            if best is not None and best["step"] == snapshot.step:
                write_best(self.folder, best)
            prune(self.folder, keep=self.keep, protect=None if best is None else best["step"])
        except BaseException as error:  # handed to the loop, which raises it
            self._error = error
