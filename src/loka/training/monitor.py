"""Track the best evaluation so far, and decide when to stop waiting for a better one.

One metric is monitored. An evaluation must be strictly better to count as an improvement; `patience` evaluations in a
row without one end the run. It is an error if the metric is missing or NaN, since the evaluation would be neither
better nor worse.
"""

import math
from collections.abc import Mapping
from typing import Any

from loka.training.config import TrainConfig

# Metrics whose better direction is known; any other name needs config.monitor_direction.
_LOWER_IS_BETTER = frozenset({"loss", "log_loss", "ne"})
_HIGHER_IS_BETTER = frozenset({"auc", "gauc", "hr", "ndcg", "mrr", "recall"})


class Monitor:
    """Tracks `config.monitor` over the evaluations of a run."""

    def __init__(self, config: TrainConfig) -> None:
        self.metric, self.patience = config.monitor, config.patience
        self.best: dict[str, Any] | None = None
        self.stale = 0
        self._sign = 0
        if config.evaluate_every:
            self._sign = 1 if _is_lower_better(config) else -1

    def update(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Record an evaluation. Return True if it is the best so far."""
        value = metrics.get(self.metric, math.nan)
        if not math.isfinite(value):
            raise ValueError(f"monitor {self.metric!r} has no finite value among {dict(metrics)}; watch another metric")
        if self.best is not None and self._sign * value >= self._sign * self.best["value"]:
            self.stale += 1
            return False
        self.stale = 0
        self.best = {"step": step, "metric": self.metric, "value": value}
        return True

    @property
    def gives_up(self) -> bool:
        """Whether `patience` has run out."""
        return self.patience is not None and self.stale >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"best": self.best, "stale": self.stale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.best, self.stale = state["best"], state["stale"]


def _is_lower_better(config: TrainConfig) -> bool:
    if config.monitor_direction != "auto":
        return config.monitor_direction == "min"
    stem = config.monitor.partition("/")[0].partition("@")[0].lower()
    if stem not in _LOWER_IS_BETTER | _HIGHER_IS_BETTER:
        known = ", ".join(sorted(_LOWER_IS_BETTER | _HIGHER_IS_BETTER))
        raise ValueError(
            f"monitor={config.monitor!r} is none of {known}; hint: for a metric of your own set monitor_direction to 'min' or 'max'"
        )
    return stem in _LOWER_IS_BETTER
