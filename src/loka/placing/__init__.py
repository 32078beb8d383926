"""placing: apply a plan to a model, and undo it.

conversion.py   `loka.convert` and `loka.revert`; freeze a converted model for serving
checking.py     whether what is asked for makes sense for this model
linears.py      resolve a plan, or a recipe, to the linears of a model
everything.py   a plan without measurements: every chain in FP8
scales.py       save, load and calibrate remembered scales
flops.py        the share of a model's FLOPs in low precision
"""

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
