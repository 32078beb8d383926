"""The margin: how much the metric may change, for a whole model and for one of its units.

    0.02 % of the loss         what the field calls a significant regression
    0.1 %                      for the ends of the interval if the examples cannot resolve 0.02 %; the text then says
                               so. The measured change itself must still be within the finer margin
    margin / sqrt(units)       for one unit alone: independent errors add in squares

A measured change is judged by the end of its interval that is further from zero: an improvement on these examples is
noise that may reverse on others.
"""

import math
from dataclasses import dataclass

from loka.records import Interval

MARGIN = 0.0002
COARSE_MARGIN = 0.001


def share_of_margin(margin: float, units: int) -> float:
    """Return the change allowed for one of several units: margin / sqrt(units)."""
    return margin / math.sqrt(max(units, 1))


@dataclass(frozen=True)
class Allowance:
    """The bound for a measured change, whether the change is within it, and a description."""

    allowed: float
    within: bool
    text: str


def allow(change: Interval, *, margin: float = MARGIN, units: int = 1) -> Allowance:
    """Judge a measured change by the end of its interval that is further from zero.

    `units` share the margin; 1 for a change of all units together. The bound is the coarse one if the interval cannot
    resolve the fine one.
    """
    fine, coarse = (share_of_margin(m, units) for m in (margin, max(COARSE_MARGIN, margin)))
    resolved = (change.high - change.low) / 2 <= fine
    allowed = fine if resolved else coarse
    # The coarse bound is for noise only: an interval that lies wholly beyond the fine bound is resolved, and the
    # measured value, even of a single unit, must be within the margin of the whole model.
    furthest = max(abs(change.low), abs(change.high))
    within = furthest <= allowed and max(change.low, -change.high) <= fine and abs(change.value) <= margin
    words = f"{change:+.4%}, allowed {allowed:.4%}"
    if not resolved and margin < COARSE_MARGIN:
        words += (
            f" at the ends of the interval (these examples cannot resolve {fine:.4%}) and {margin:.4%} for the change"
        )
    return Allowance(allowed, within, words)
