"""probe: look. Hooks, online statistics, real rows, evaluation of candidates, verdicts. Works on any nn.Module."""

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
