"""Processes for tests, forked from servers that have imported torch and this library once: importing them takes longer than most of what the processes do.

There are two servers, because Triton reads when it is imported whether its interpreter is wanted.
"""

import contextlib
import inspect
import io
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch", "torch._dynamo", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.checkpoint", "pytest", "hypothesis",
    "loka", "loka.tuning", "loka.training",
]  # fmt: skip
SWITCH = "TRITON_INTERPRET"
_servers: dict[bool, forkserver.ForkServer] = {}


def start(target: Callable[..., None], *values: Any, said: Path, environment: dict[str, str] | None = None) -> Any:
    """A process that runs `target(*values)` of a module, and writes what it says to a file.

    Args:
        target: a function of a module; what it raises ends the process with 1.
        values: that can be pickled.
        said: file for stdout and stderr.
        environment: beside what this process has now.

    Returns:
        The process, started; its `exitcode` is negative where a signal ended it.
    """
    told = {**os.environ, **(environment or {})}
    process = multiprocessing.get_context("forkserver").Process(target=_live, args=(target, values, str(said), told))
    with _server(interpreted=told.get(SWITCH) == "1"):
        process.start()
    return process


def run_script(path: Path, *words: str, folder: Path | None = None, timeout: float = 250) -> tuple[int, str]:
    """As `python path words...`, in a folder: its exit code, and what it said on stdout and stderr."""
    with tempfile.TemporaryDirectory() as own:
        said = Path(own) / "said"
        process = start(_run_script, str(path), words, str(folder or own), said=said)
        return finish(process, timeout), said.read_text()


@contextlib.contextmanager
def _server(*, interpreted: bool) -> Iterator[None]:
    """Processes are forked from the one of two servers; the standard library knows one."""
    server = _servers.setdefault(interpreted, forkserver.ForkServer())
    server.set_forkserver_preload(PRELOADED)
    before, connect = os.environ.get(SWITCH), forkserver.connect_to_new_process
    os.environ[SWITCH] = "1" if interpreted else "0"
    forkserver.connect_to_new_process = server.connect_to_new_process  # type: ignore[assignment]
    try:
        yield
    finally:
        forkserver.connect_to_new_process = connect
        del os.environ[SWITCH]
        if before is not None:
            os.environ[SWITCH] = before


def _live(target: Callable[..., None], values: tuple[Any, ...], said: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)
    if environment.get(SWITCH) == "1":
        with contextlib.suppress(ImportError):  # no Triton
            _remember_builtins()
    target(*values)


def _remember_builtins() -> None:
    """Triton's interpreter looks through its whole language at every call of a device function, for builtins that are still to be replaced: two fifths of the time of our tests. Which names are builtins is asked once."""
    import triton.language as tl
    from triton.runtime import interpreter

    places = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    names = {
        place: [name for name, value in inspect.getmembers(place) if tl.core.is_builtin(value)] for place in places
    }

    def patch(place: Any, builder: Any, *scope: Any) -> None:
        for name in names[place]:
            value = getattr(place, name)
            if tl.core.is_builtin(value):  # not replaced yet
                interpreter._patch_attr(place, name, value, builder, *scope)

    interpreter._patch_builtin = patch


def _run_script(path: str, words: tuple[str, ...], folder: str) -> None:
    os.chdir(folder)
    sys.argv = [path, *words]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def finish(process: Any, timeout: float) -> int:
    """Its exit code; a process that takes longer is killed."""
    process.join(timeout)
    with contextlib.suppress(ProcessLookupError):
        if process.is_alive():
            process.kill()
            process.join()
    return int(process.exitcode)
