"""Checkpoints on disk: a folder of safetensors files and one JSON file, complete or absent.

    <run>/checkpoints/step-00001000/
        model.safetensors        the model's state_dict: any safetensors reader can use it
        optimizer.safetensors    optimizer state, `<parameter>:<slot>`
        extra.safetensors        random generators, tensors of callbacks
        state.json               step, settings, data position, ... and the SHA-256 of every other file
    <run>/checkpoints/best.json  which step is the best one, by which metric

No pickle: reading a checkpoint cannot run code. A folder is written under a temporary name, every file is flushed to
the disk, then the folder is renamed; a crash at any point leaves either the whole checkpoint or none of it. Reading
compares every file with its checksum; a mismatch is a DamagedCheckpointError naming the file, never a guess.
"""

import hashlib
import json
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from loka.data.download import sha256_of
from loka.records import replacing, write_atomically

SCHEMA = 1
_STATE = "state.json"
_TEMPORARY = ".writing-"


class DamagedCheckpointError(ValueError):
    """A checkpoint is incomplete or does not match its checksums."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one step.

    Args:
        step: the step.
        tensors: groups of CPU tensors, one file each.
        state: JSON values.

    Example:
        >>> read_checkpoint(find_checkpoints(Path("runs/x/checkpoints"))[-1]).state["counters"]
    """

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def find_checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints of a run.

    Args:
        folder: the run's checkpoint folder.

    Returns:
        Their folders, oldest first.

    Example:
        >>> find_checkpoints(Path("runs/x/checkpoints"))[-1].name
        'step-00000020'
    """
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's folder name."""
    return int(path.name.removeprefix("step-"))


def write_checkpoint(folder: Path, snapshot: Snapshot) -> Path:
    """Write one checkpoint. It appears under its final name only when every byte is on disk."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{snapshot.step:08d}"
    temporary = folder / f"{_TEMPORARY}{final.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        digests = {}
        for name, tensors in snapshot.tensors.items():
            file = temporary / f"{name}.safetensors"
            with replacing(file) as written:
                save_file(tensors, written)
            digests[file.name] = sha256_of(file)
        body = {"schema": SCHEMA, "step": snapshot.step, "files": digests, "state": snapshot.state}
        text = json.dumps({**body, "checksum": _checksum(body)}, indent=1)
        write_atomically(temporary / _STATE, (text + "\n").encode())
        _flush(temporary)
        _move_into_place(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _flush(folder)
    return final


def _move_into_place(temporary: Path, final: Path) -> None:
    """Rename a folder. An older one of the same name (damaged, and rewritten by a resumed run) is moved aside first."""
    aside = final.with_name(f"{_TEMPORARY}old-{final.name}")
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    temporary.rename(final)
    shutil.rmtree(aside, ignore_errors=True)


def read_checkpoint(path: Path, *, groups: tuple[str, ...] | None = None) -> Snapshot:
    """Read and verify a checkpoint.

    Args:
        path: a checkpoint folder.
        groups: tensor files to load; None loads all.

    Returns:
        The state of the run.

    Raises:
        DamagedCheckpointError: a file is missing or does not match its checksum.

    Example:
        >>> newest = find_checkpoints(Path("runs/x/checkpoints"))[-1]
        >>> tensors = read_checkpoint(newest, groups=("model",)).tensors["model"]
    """
    from safetensors.torch import load_file

    body = read_state(path)
    names = [Path(file).stem for file in body["files"]]
    if groups is not None and (absent := sorted(set(groups) - set(names))):
        raise DamagedCheckpointError(f"checkpoint {path}: state.json lists no file for {absent}, only {names}")
    tensors = {}
    for name in names if groups is None else groups:
        file = path / f"{name}.safetensors"
        _verify(file, body["files"][file.name])
        tensors[name] = load_file(file)
    return Snapshot(body["step"], tensors, body["state"])


def read_state(path: Path) -> dict[str, Any]:
    """Read and verify state.json."""
    try:
        body = json.loads((path / _STATE).read_text(encoding="utf-8"))
        checksum = body.pop("checksum")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"checkpoint {path}: {_STATE} cannot be read ({type(error).__name__}: {error})"
        ) from error
    if checksum != _checksum(body):
        raise DamagedCheckpointError(f"checkpoint {path}: {_STATE} does not match its own checksum")
    if body["schema"] != SCHEMA:
        raise ValueError(f"checkpoint {path} has schema {body['schema']}, this version reads {SCHEMA}")
    return dict(body)


def prune(folder: Path, *, keep: int, protect: int | None) -> None:
    """Delete all but the newest `keep` checkpoints, but never the protected step."""
    for path in find_checkpoints(folder)[:-keep]:
        if step_of(path) != protect:
            shutil.rmtree(path)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed process was writing."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_best(folder: Path, best: dict[str, Any]) -> None:
    """Write the pointer to the best checkpoint, atomically."""
    write_atomically(folder / "best.json", (json.dumps(best) + "\n").encode())
    _flush(folder)


def keep_best(folder: Path, step: int, best: dict[str, Any] | None, *, keep: int) -> None:
    """After the checkpoint of a step was written: point to it if it is the best, and delete what is not kept."""
    if best is not None and best["step"] == step:
        write_best(folder, best)
    prune(folder, keep=keep, protect=None if best is None else best["step"])


def read_best(folder: Path) -> Path:
    """Find the best checkpoint of a run, by its monitored metric.

    Args:
        folder: the run's checkpoint folder.

    Returns:
        The folder of the checkpoint.

    Example:
        >>> load_weights(model, read_best(Path("runs/x/checkpoints")))
    """
    pointer = folder / "best.json"
    if not pointer.exists():
        raise ValueError(f"{folder} has no best checkpoint yet: it is written at the first evaluation")
    return folder / f"step-{json.loads(pointer.read_text(encoding='utf-8'))['step']:08d}"


def _verify(file: Path, expected: str) -> None:
    try:
        found = sha256_of(file)
    except OSError as error:
        raise DamagedCheckpointError(
            f"checkpoint {file.parent}: {file.name} cannot be read ({error.strerror})"
        ) from error
    if found != expected:
        size = file.stat().st_size
        raise DamagedCheckpointError(
            f"checkpoint {file.parent}: {file.name} ({size} bytes) does not match its checksum"
        )


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _flush(path: Path) -> None:
    """Force a file's content, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Saver:
    """Writes the checkpoints of a run in a thread, from snapshots in CPU memory.

    At most one write is in flight, so a slow disk costs time but not memory. An error of the thread is raised in the
    loop, at the next save or at the end. The thread is not a daemon: if the loop fails, the last snapshot is still
    written.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.last: Path | None = None
        self._pending: Future[None] | None = None
        remove_leftovers(folder)

    def save(self, snapshot: Snapshot) -> None:
        """Start writing; first wait for the previous write and raise its error."""
        self.wait()
        thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending = thread.submit(self._write, snapshot)
        thread.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until nothing is being written, and raise what went wrong."""
        error = None if self._pending is None else self._pending.exception()  # an interrupt leaves it pending
        self._pending = None
        if error is not None:
            if (
                isinstance(error, OSError) and error.errno
            ):  # of the disk; named after the folder, not after a temporary file in it
                raise OSError(error.errno, error.strerror, str(self.folder)) from error
            raise RuntimeError(f"a checkpoint could not be written to {self.folder}: {error}") from error

    def _write(self, snapshot: Snapshot) -> None:
        self.last = write_checkpoint(self.folder, snapshot)
        keep_best(self.folder, snapshot.step, snapshot.state["monitor"]["best"], keep=self.keep)
