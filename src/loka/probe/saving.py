"""Background saving: a thread writes the already copied state to a temporary file and renames it.

After a crash the last complete file remains. Training waits only for the copy. There is one write at a time: a second
save waits for the first. An error in the thread is raised by the next save, or by `wait`.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from loka.records import replacing

FORMAT = "loka probe 1"


class Saver:
    """Writes states in the background."""

    def __init__(self) -> None:
        self._pending: Future[None] | None = None

    def save(self, state: Mapping[str, Tensor], path: str | Path) -> None:
        """Start writing. The tensors must not be modified afterwards."""
        self.wait()
        thread = ThreadPoolExecutor(1, "loka-probe-save")
        self._pending = thread.submit(_write, dict(state), Path(path))
        thread.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until nothing is being written; raises ValueError if a write failed."""
        error = None if self._pending is None else self._pending.exception()  # an interrupt leaves it pending
        self._pending = None
        if error is not None:
            raise ValueError(f"the probe's state could not be saved: {error}") from error


def _write(state: dict[str, Tensor], path: Path) -> None:
    with replacing(path) as temporary:
        save_file(state, temporary, metadata={"format": FORMAT})


def load_tensors(what: str, mine: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy tensors of a state into those of the same names, which must have the same shapes."""
    for name, tensor in mine.items():
        if name not in state or state[name].shape != tensor.shape:
            seen = tuple(state[name].shape) if name in state else "missing"
            raise ValueError(f"{what}: {name} is {seen}, expected {tuple(tensor.shape)}")
        tensor.copy_(state[name])


def select_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the part of a state whose names begin with a prefix, without it."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def read_state(path: str | Path) -> dict[str, Tensor]:
    """Read a saved state. Raises ValueError if the file is not one."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not a probe's state: {error}") from error
