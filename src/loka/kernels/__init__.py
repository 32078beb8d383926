"""kernels: compute. The registry, and one folder per op with one file per backend; `reference.py` is the law."""

from loka.kernels.backend import Backend, UnsupportedError, Verdict
from loka.kernels.registry import BACKENDS, backend, pick, verdicts

__all__ = ["BACKENDS", "Backend", "UnsupportedError", "Verdict", "backend", "pick", "verdicts"]
