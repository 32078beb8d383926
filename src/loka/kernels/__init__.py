"""kernels: the compute ops. One folder per op, one file per backend; `reference.py` defines the correct result."""

from loka.kernels.backend import Backend, UnsupportedError, Verdict
from loka.kernels.registry import BACKENDS, backend, pick, verdicts

__all__ = ["BACKENDS", "Backend", "UnsupportedError", "Verdict", "backend", "pick", "verdicts"]
