"""loka: FP8 that is practical for recommendation models.

Importing this package is free: it initialises no CUDA, reads no environment variable and imports neither torch nor any
optional library. Public names are resolved on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loka.convert import LinearOptions as LinearOptions
    from loka.convert import Summary as Summary
    from loka.convert import convert as convert
    from loka.convert import load_scale_state as load_scale_state
    from loka.convert import refresh as refresh
    from loka.convert import revert as revert
    from loka.convert import scale_state as scale_state
    from loka.dispatch import Policy as Policy
    from loka.dispatch.database import Database as Database
    from loka.formats import QTensor as QTensor
    from loka.formats import Spec as Spec
    from loka.probe import Probe as Probe
    from loka.probe import Report as Report
    from loka.ptq import quantize as quantize
    from loka.records import Plan as Plan

__version__ = "0.1.0.dev0"

_HOMES = {
    "Database": "loka.dispatch.database",
    "Plan": "loka.records",
    "Policy": "loka.dispatch",
    "Probe": "loka.probe",
    "QTensor": "loka.formats",
    "Report": "loka.probe",
    "Spec": "loka.formats",
    "Summary": "loka.convert",
    "LinearOptions": "loka.convert",
    "convert": "loka.convert",
    "load_scale_state": "loka.convert",
    "refresh": "loka.convert",
    "scale_state": "loka.convert",
    "quantize": "loka.ptq",
    "revert": "loka.convert",
}
_ROOMS = (
    "data",
    "dispatch",
    "formats",
    "inference",
    "kernels",
    "measure",
    "metrics",
    "models",
    "mods",
    "nn",
    "probe",
    "ptq",
    "records",
    "report",
    "semantic_ids",
    "serving",
    "training",
)

__all__ = [
    "Database",
    "LinearOptions",
    "Plan",
    "Policy",
    "Probe",
    "QTensor",
    "Report",
    "Spec",
    "Summary",
    "__version__",
    "convert",
    "load_scale_state",
    "quantize",
    "refresh",
    "revert",
    "scale_state",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return import_module(f"loka.{name}")
    raise AttributeError(f"module 'loka' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
