"""placing: apply a plan to a model, and undo it. `loka.convert` and `loka.revert` live here."""

from loka.lowp.binding import LinearOptions
from loka.lowp.linear import refresh
from loka.lowp.scaling import Scaling
from loka.placing.conversion import convert, converted, freeze_model, revert
from loka.placing.everything import plan_everything
from loka.placing.scales import calibrating, load_scale_state, scale_state
from loka.records import Conversion

__all__ = [
    "Conversion", "LinearOptions", "Scaling", "calibrating", "convert", "converted", "freeze_model",
    "load_scale_state", "plan_everything", "refresh", "revert", "scale_state",
]  # fmt: skip
