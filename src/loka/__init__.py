"""loka: FP8 that is practical for recommendation models.

Importing this package is free: it initialises no CUDA, reads no environment variable and imports neither torch nor any
optional library. Public names are resolved on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loka.formats import QTensor as QTensor
    from loka.formats import Spec as Spec

__version__ = "0.1.0.dev0"

_HOMES = {
    "QTensor": "loka.formats",
    "Spec": "loka.formats",
}
_ROOMS = ("data", "formats", "metrics", "models", "records")

__all__ = ["QTensor", "Spec", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return import_module(f"loka.{name}")
    raise AttributeError(f"module 'loka' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
