"""Background saving: a thread writes the already copied state to a temporary file and renames it.

After a crash the last complete file remains. Training waits only for the copy. There is one write at a time: a second
save waits for the first. An error in the thread is raised by the next save, or by `wait`.
"""

import threading
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from loka.records import replacing

FORMAT = "loka probe 1"


class Saver:
    """Writes states in the background."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, state: Mapping[str, Tensor], path: str | Path) -> None:
        """Start writing. The tensors must not be modified afterwards."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(dict(state), Path(path)), name="loka-probe-save")
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written; raises ValueError if a write failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise ValueError(f"the probe's state could not be saved: {error}") from error

    def _write(self, state: dict[str, Tensor], path: Path) -> None:
        try:
            with replacing(path) as temporary:
                save_file(state, temporary, metadata={"format": FORMAT})
        except BaseException as error:
            self._error = error


def read_state(path: str | Path) -> dict[str, Tensor]:
    """Read a saved state. Raises ValueError if the file is not one."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not a probe's state: {error}") from error
