"""Run a test file again under Triton's interpreter, in another process: the interpreter is chosen when Triton is imported.

These processes are forked from one that has imported torch and Triton once: doing so takes longer than most of the files.
"""

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import numpy
import pytest

NOT_RUN = "neither on a GPU nor interpreted"  # what tests say that need Triton and do not find it
SWITCH = "TRITON_INTERPRET"
LIMIT = 600  # seconds of a file


def run_interpreted(file: str, chosen: str = "triton") -> None:
    """The tests of `file` whose names match `chosen`; at least one must run, and all that run must pass."""
    triton = pytest.importorskip("triton", exc_type=ImportError)
    if version(triton.__version__) < (3, 7) and version(numpy.__version__) >= (2, 5):
        pytest.skip("Triton's interpreter before 3.7 makes scalars of arrays, which NumPy refuses since 2.5")
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen, file]
        code = _run_elsewhere(arguments, said)
        text = said.read_text() if said.exists() else "it said nothing"
    assert code == 0, text[-6000:]
    assert "." in text.splitlines()[0], text
    assert NOT_RUN not in text


def _run_elsewhere(arguments: list[str], said: Path) -> int | None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton", "triton.language", "torch._dynamo", "hypothesis", "pytest"])
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"  # the server of forks reads it when it starts
    try:
        process = context.Process(target=_run_tests, args=(arguments, str(said)))
        process.start()
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before
    process.join(LIMIT)
    if process.is_alive():
        process.kill()
    return process.exitcode


def _run_tests(arguments: list[str], said: str) -> None:
    os.environ |= {SWITCH: "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]  # of the worker that asked
    with open(said, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        code = pytest.main(arguments)
        sys.stdout.flush()
        os._exit(int(code))


def version(text: str) -> tuple[int, int]:
    """Major and minor."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
