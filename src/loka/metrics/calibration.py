"""Calibration: do predicted probabilities match observed frequencies?

    ratio = sum p / sum y                              1 is calibrated on average, above 1 over-predicts
    ECE   = sum_b (n_b / n) | mean p in b - mean y in b |   expected calibration error over bins of p

Bins are fixed, so the state is a few sums and merges exactly: `spacing="uniform"` cuts [0, 1] into equal widths (the
common definition), `spacing="logit"` cuts the logit over [-12, 12], which still resolves click rates near 0 where all
of them would share the first uniform bin. A bin includes its lower edge; the last includes 1.

Undefined values are NaN: everything when nothing was seen, the ratio when there is no positive. Bins of equal mass need
all scores and are not offered.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from loka.metrics.binary import BinaryMetric, Inputs, Nonfinite

__all__ = ["Calibration", "CalibrationResult"]

Spacing = Literal["uniform", "logit"]
_LOGIT_LIMIT = 12.0  # sigmoid(-12) = 6e-6, below the click rates anyone models


@dataclass(frozen=True)
class CalibrationResult:
    """Ratio, ECE, and the reliability curve: per non-empty bin (examples, mean prediction, mean label)."""

    ratio: float
    ece: float
    examples: int
    curve: tuple[tuple[int, float, float], ...]


class Calibration(BinaryMetric[CalibrationResult]):
    """Calibration ratio and expected calibration error over fixed bins."""

    def __init__(
        self,
        *,
        bins: int = 20,
        spacing: Spacing = "uniform",
        inputs: Inputs = "logits",
        nonfinite: Nonfinite = "raise",
    ) -> None:
        if bins < 1:
            raise ValueError(f"bins={bins}, expected at least 1")
        if spacing not in ("uniform", "logit"):
            raise ValueError(f"spacing={spacing!r}, expected 'uniform' or 'logit'")
        super().__init__(inputs=inputs, nonfinite=nonfinite, bins=bins, spacing=spacing)
        self.bins, self.spacing = bins, spacing
        self._add_sums(torch.int64, "count", "positives", shape=(bins,))
        self._add_sums(torch.float64, "predicted", shape=(bins,))

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Add a batch of logits (or probabilities, if so configured)."""
        z, y, valid = self._screen(predictions, labels)
        p = torch.sigmoid(z) if self.inputs == "logits" else z
        place = p if self.spacing == "uniform" else (torch.logit(p) / (2 * _LOGIT_LIMIT) + 0.5).clamp(0, 1)
        index = (place * self.bins).long().clamp(0, self.bins - 1)
        self._sums["count"].index_add_(0, index, valid.long())
        self._sums["positives"].index_add_(0, index, (valid & (y == 1)).long())
        self._sums["predicted"].index_add_(0, index, torch.where(valid, p, 0.0))

    def compute(self) -> CalibrationResult:
        """Ratio, ECE and curve over everything seen."""
        self._check()
        count, positives, predicted = (self._sums[name].cpu() for name in ("count", "positives", "predicted"))
        examples, clicks = int(count.sum()), int(positives.sum())
        used = count > 0
        mean_p = predicted[used] / count[used]
        mean_y = positives[used].double() / count[used]
        gap = float((count[used] * (mean_p - mean_y).abs()).sum())
        return CalibrationResult(
            ratio=float(predicted.sum()) / clicks if clicks else math.nan,
            ece=gap / examples if examples else math.nan,
            examples=examples,
            curve=tuple(zip(count[used].tolist(), mean_p.tolist(), mean_y.tolist(), strict=True)),
        )
