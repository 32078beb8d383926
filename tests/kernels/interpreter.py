"""Run a test file again under Triton's interpreter, in a child process: the interpreter is chosen when Triton is imported."""

import os
import subprocess
import sys

import numpy
import pytest

NOT_RUN = "neither on a GPU nor interpreted"  # what tests say that need Triton and do not find it


def run_interpreted(file: str, chosen: str = "triton") -> None:
    """The tests of `file` whose names match `chosen`; at least one must run, and all that run must pass."""
    triton = pytest.importorskip("triton", exc_type=ImportError)
    if version(triton.__version__) < (3, 7) and version(numpy.__version__) >= (2, 5):
        pytest.skip("Triton's interpreter before 3.7 makes scalars of arrays, which NumPy refuses since 2.5")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", chosen, file]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "." in result.stdout.splitlines()[0], result.stdout
    assert NOT_RUN not in result.stdout


def version(text: str) -> tuple[int, int]:
    """Major and minor."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
