"""probe: look. Hooks, online statistics, real rows, evaluation of candidates, verdicts. Works on any nn.Module."""

from loka.probe.engine import Engine
from loka.probe.probe import Probe
from loka.probe.report import Report
from loka.probe.sensitivity import add_sensitivity, measure_sensitivity
from loka.probe.statistics import Statistics
from loka.probe.survey import DEFAULT_RECIPES, Settings

__all__ = [
    "DEFAULT_RECIPES",
    "Engine",
    "Probe",
    "Report",
    "Settings",
    "Statistics",
    "add_sensitivity",
    "measure_sensitivity",
]
