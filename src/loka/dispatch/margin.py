"""Margin: how much the metric may move, for a whole model and for one of its units.

    0.02 % of the loss         what the field calls a significant regression
    0.1 %                      for the end of the interval where the examples cannot resolve that, and then it is said; the change as measured is held to the finer one all the same
    margin / sqrt(units)       for one unit alone: independent errors add in squares

What was measured is judged by the end of its interval that is further from no change: a change for the better on these examples is noise that may turn around on others.
"""

import math
from dataclasses import dataclass

from loka.records import Interval

MARGIN = 0.0002
COARSE_MARGIN = 0.001


def share_of_margin(margin: float, units: int) -> float:
    """What one of several units may cost: margin / sqrt(units)."""
    return margin / math.sqrt(max(units, 1))


@dataclass(frozen=True)
class Allowance:
    """What a measured change is held against, and what came of it."""

    allowed: float
    within: bool
    text: str


def allow(change: Interval, *, margin: float = MARGIN, units: int = 1) -> Allowance:
    """Judge a measured change by its upper end.

    Args:
        change: relative change of the metric.
        margin: for the whole model.
        units: that share it; 1 for a change of all together.

    Returns:
        The bound that was taken (the coarse one where the interval cannot resolve the fine one), whether the change is within, and the sentence.

    Example:
        >>> allow(Interval(value=0.0, low=-0.0001, high=0.0001)).within
        True
    """
    fine, coarse = (share_of_margin(m, units) for m in (margin, max(COARSE_MARGIN, margin)))
    resolved = (change.high - change.low) / 2 <= fine
    allowed = fine if resolved else coarse
    # what shows more is resolved; and none passes for being noisy: as measured a change, of one unit too, is held to the margin of the whole
    within = furthest(change) <= allowed and max(change.low, -change.high) <= fine and abs(change.value) <= margin
    share = (
        f", {margin if resolved else max(COARSE_MARGIN, margin):.2%} divided by the square root of {units} units"
        if units > 1
        else ""
    )
    words = f"{change:+.4%}, allowed {allowed:.4%}{share}"
    if not resolved and margin < COARSE_MARGIN:
        words += f"; these examples cannot resolve {fine:.4%}, so {COARSE_MARGIN:.1%} counts for the ends of the interval, and {margin:.4%} for the change"
    return Allowance(allowed, within, words)


def furthest(change: Interval) -> float:
    """The end of an interval that is further from no change."""
    return max(abs(change.low), abs(change.high))
