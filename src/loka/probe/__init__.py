"""probe: look. Hooks, online statistics, real rows, evaluation of candidates, verdicts. Works on any nn.Module."""

from loka.probe.probe import DEFAULT_RECIPES, Probe
from loka.probe.report import Report
from loka.probe.sensitivity import add_sensitivity, measure_sensitivity
from loka.probe.statistics import Statistics

__all__ = ["DEFAULT_RECIPES", "Probe", "Report", "Statistics", "add_sensitivity", "measure_sensitivity"]
