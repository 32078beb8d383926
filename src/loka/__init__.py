"""loka: FP8 that is practical for recommendation models.

Importing this package is free: it initializes no CUDA, reads no environment variable and imports neither torch nor any
optional library. Public names are resolved on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loka.dispatch import Policy as Policy
    from loka.dispatch.database import Database as Database
    from loka.exporting import export as export
    from loka.formats import QTensor as QTensor
    from loka.formats import Spec as Spec
    from loka.lowp import Guard as Guard
    from loka.placing import Conversion as Conversion
    from loka.placing import LinearOptions as LinearOptions
    from loka.placing import convert as convert
    from loka.placing import load_scale_state as load_scale_state
    from loka.placing import refresh as refresh
    from loka.placing import revert as revert
    from loka.placing import scale_state as scale_state
    from loka.probe import Probe as Probe
    from loka.probe import Report as Report
    from loka.ptq.quantizing import quantize as quantize
    from loka.records import Plan as Plan
    from loka.tuning import Tuned as Tuned
    from loka.tuning import tune as tune

__version__ = "0.1.0.dev0"

_HOMES = {
    "Database": "loka.dispatch.database",
    "Guard": "loka.lowp",
    "Plan": "loka.records",
    "Policy": "loka.dispatch",
    "Probe": "loka.probe",
    "QTensor": "loka.formats",
    "Report": "loka.probe",
    "Spec": "loka.formats",
    "Conversion": "loka.placing",
    "LinearOptions": "loka.placing",
    "convert": "loka.placing",
    "export": "loka.exporting",
    "load_scale_state": "loka.placing",
    "refresh": "loka.placing",
    "scale_state": "loka.placing",
    "quantize": "loka.ptq",
    "revert": "loka.placing",
    "tune": "loka.tuning",
    "Tuned": "loka.tuning",
}
_ROOMS = (
    "comms", "data", "demo", "dispatch", "exporting", "formats", "inference", "integrations", "kernels", "lowp",
    "measure", "metrics", "models", "mods", "nn", "placing", "probe", "ptq", "records", "report", "semantic_ids", "serving", "training", "tuning", "units",
)  # fmt: skip

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return import_module(f"loka.{name}")
    raise AttributeError(f"module 'loka' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
