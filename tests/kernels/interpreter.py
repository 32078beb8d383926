"""Run a test file again under Triton's interpreter, in a child process: the interpreter is chosen when Triton is imported."""

import os
import subprocess
import sys

import pytest


def run_interpreted(file: str, chosen: str = "triton") -> None:
    """The tests of `file` whose names match `chosen`; at least one must run and pass."""
    pytest.importorskip("triton", exc_type=ImportError)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", chosen, file]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "." in result.stdout.splitlines()[0], result.stdout
