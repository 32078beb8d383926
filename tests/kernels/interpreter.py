"""Run a test file again under Triton's interpreter, in another process: the interpreter is chosen when Triton is imported."""

import inspect
import os
import tempfile
from pathlib import Path
from typing import Any

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
    _remember_builtins()
    os._exit(int(pytest.main(arguments)))


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


def version(text: str) -> tuple[int, int]:
    """Major and minor."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
