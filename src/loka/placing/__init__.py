"""placing: a plan placed in a model, whole, and taken back. `loka.convert` and `loka.revert` live here."""

from loka.placing.conversion import (
    Conversion,
    LinearOptions,
    Scaling,
    calibrating,
    convert,
    load_scale_state,
    refresh,
    revert,
    scale_state,
)

__all__ = [
    "Conversion",
    "LinearOptions",
    "Scaling",
    "calibrating",
    "convert",
    "load_scale_state",
    "refresh",
    "revert",
    "scale_state",
]
