"""Run a test file again under Triton's interpreter, in another process: the interpreter is chosen when Triton is imported."""

import os
import tempfile
from pathlib import Path

import numpy
import pytest

from forked import finish, start

NOT_RUN = "neither on a GPU nor interpreted"  # what tests say that need Triton and do not find it
LIMIT = 600  # seconds of a file


def run_interpreted(file: str, chosen: str = "triton") -> None:
    """The tests of `file` whose names match `chosen`; at least one must run, and all that run must pass."""
    triton = pytest.importorskip("triton", exc_type=ImportError)
    if version(triton.__version__) < (3, 7) and version(numpy.__version__) >= (2, 4):
        pytest.skip("Triton's interpreter before 3.7 makes scalars of arrays, which NumPy refuses since 2.4")
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen, file]
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        process = start(_run_tests, arguments, said=said, environment={"TRITON_INTERPRET": "1"})
        code, text = finish(process, LIMIT), said.read_text()
    assert code == 0, text[-6000:]
    assert "." in text.splitlines()[0], text
    assert NOT_RUN not in text


def _run_tests(arguments: list[str]) -> None:
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]  # of the worker that asked
    os._exit(int(pytest.main(arguments)))


def version(text: str) -> tuple[int, int]:
    """Major and minor."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
