"""placing: a plan placed in a model, whole, and taken back. `loka.convert` and `loka.revert` live here."""

from loka.placing.conversion import (
    Conversion,
    LinearOptions,
    Scaling,
    calibrating,
    convert,
    freeze_model,
    load_scale_state,
    refresh,
    revert,
    scale_state,
)
from loka.placing.everything import plan_everything

__all__ = [
    "Conversion",
    "LinearOptions",
    "Scaling",
    "calibrating",
    "convert",
    "freeze_model",
    "load_scale_state",
    "plan_everything",
    "refresh",
    "revert",
    "scale_state",
]
