"""probe: observe a model while it trains and predict which of its GEMMs tolerate low precision.

Hooks collect online statistics and a few real rows from any nn.Module; an evaluation then measures candidates and gives
verdicts.
"""

from loka.probe.adapter import Adapter, register
from loka.probe.engine import Engine
from loka.probe.probe import Probe
from loka.probe.report import Report
from loka.probe.score import harm
from loka.probe.sensitivity import add_sensitivity, measure_sensitivity
from loka.probe.swapping import Switchable, swap

__all__ = [
    "Adapter", "Engine", "Probe", "Report", "Switchable", "add_sensitivity", "harm", "measure_sensitivity",
    "register", "swap",
]  # fmt: skip
