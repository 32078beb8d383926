"""probe: look. Hooks, online statistics, real rows, evaluation of candidates, verdicts. Works on any nn.Module."""

from loka.probe.adapter import KINDS, Adapter, register
from loka.probe.drift import describe_drift, survey_judge, would_change
from loka.probe.engine import Engine
from loka.probe.probe import Probe
from loka.probe.report import Report
from loka.probe.score import harm
from loka.probe.sensitivity import add_sensitivity, measure_sensitivity
from loka.probe.statistics import Statistics
from loka.probe.survey import DEFAULT_RECIPES, Settings
from loka.probe.swapping import Swapped, Switchable, swap

__all__ = [
    "DEFAULT_RECIPES",
    "KINDS",
    "Adapter",
    "Engine",
    "Probe",
    "Report",
    "Settings",
    "Statistics",
    "Swapped",
    "Switchable",
    "add_sensitivity",
    "describe_drift",
    "harm",
    "measure_sensitivity",
    "register",
    "survey_judge",
    "swap",
    "would_change",
]
