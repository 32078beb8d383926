"""loka: FP8 that is practical for recommendation models.

Importing this package is free: it initialises no CUDA, reads no environment variable and imports neither torch nor any
optional library. Public names are resolved on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loka.convert import Summary as Summary
    from loka.convert import convert as convert
    from loka.convert import revert as revert
    from loka.dispatch import Policy as Policy
    from loka.formats import QTensor as QTensor
    from loka.formats import Spec as Spec
    from loka.probe import Probe as Probe
    from loka.probe import Report as Report
    from loka.records import Plan as Plan

__version__ = "0.1.0.dev0"

_HOMES = {
    "Plan": "loka.records",
    "Policy": "loka.dispatch",
    "Probe": "loka.probe",
    "QTensor": "loka.formats",
    "Report": "loka.probe",
    "Spec": "loka.formats",
    "Summary": "loka.convert",
    "convert": "loka.convert",
    "revert": "loka.convert",
}
_ROOMS = (
    "data",
    "dispatch",
    "formats",
    "kernels",
    "measure",
    "metrics",
    "models",
    "nn",
    "probe",
    "records",
    "report",
    "training",
)

__all__ = [
    "Plan",
    "Policy",
    "Probe",
    "QTensor",
    "Report",
    "Spec",
    "Summary",
    "__version__",
    "convert",
    "revert",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return import_module(f"loka.{name}")
    raise AttributeError(f"module 'loka' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
