"""Processes for tests, forked from one that has imported torch once: importing it takes longer than most of what they do.

That one has not imported Triton, so that a process can still choose its interpreter.
"""

import contextlib
import io
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOADED = ["torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.checkpoint", "pytest"]


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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    told = {**os.environ, **(environment or {})}
    process = context.Process(target=_live, args=(target, values, str(said), told))
    process.start()
    return process


def _live(target: Callable[..., None], values: tuple[Any, ...], said: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)
    target(*values)


def finish(process: Any, timeout: float) -> int:
    """Its exit code; a process that takes longer is killed."""
    process.join(timeout)
    with contextlib.suppress(ProcessLookupError):
        if process.is_alive():
            process.kill()
            process.join()
    return int(process.exitcode)
