"""Log loss and what is derived from it: normalised entropy and the relative change against a baseline.

    log loss = mean_i [ -y_i ln p_i - (1 - y_i) ln(1 - p_i) ]            natural logarithm
    NE       = log loss / ( -q ln q - (1 - q) ln(1 - q) ),  q = mean y     1 means "no better than knowing the base rate"
    relative = 100 (log loss of the candidate / log loss of the baseline - 1), in percent; negative is better

On the same examples the relative change of NE equals the relative change of log loss: the denominator cancels.

Undefined values are NaN: log loss of no examples; NE of no examples or of a single class (the base-rate entropy is 0);
the relative change when the baseline's loss is 0. `examples`, `positives` and `nonfinite_count` tell why.
"""

import math

import torch
from torch import Tensor

from loka.metrics.binary import BinaryMetric, Inputs, Nonfinite, log_losses

__all__ = ["LogLoss", "NormalizedEntropy", "RelativeLogLoss", "relative_change"]


def relative_change(candidate: float, baseline: float) -> float:
    """100 (candidate / baseline - 1), in percent; NaN when the baseline is 0 or either is NaN."""
    return 100.0 * (candidate - baseline) / baseline if baseline else math.nan


class LogLoss(BinaryMetric[float]):
    """Mean log loss, natural logarithm."""

    def __init__(self, *, inputs: Inputs = "logits", nonfinite: Nonfinite = "raise") -> None:
        super().__init__(inputs=inputs, nonfinite=nonfinite)
        self._add_sums(torch.float64, "loss")
        self._add_sums(torch.int64, "examples", "positives")

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Add a batch of any shape; predictions and labels have the same shape."""
        z, y, valid = self._screen(predictions, labels)
        self._sums["loss"] += torch.where(valid, log_losses(z, y, inputs=self.inputs), 0.0).sum()
        self._sums["examples"] += valid.sum()
        self._sums["positives"] += (valid & (y == 1)).sum()

    @property
    def examples(self) -> int:
        """Examples in the mean."""
        return int(self._sums["examples"])

    @property
    def positives(self) -> int:
        """Examples with label 1 in the mean."""
        return int(self._sums["positives"])

    def compute(self) -> float:
        """Mean log loss; NaN when nothing was seen."""
        self._check()
        return float(self._sums["loss"]) / self.examples if self.examples else math.nan


class NormalizedEntropy(LogLoss):
    """Log loss divided by the entropy of the base rate of the same examples."""

    def compute(self) -> float:
        """NE; NaN when nothing or only one class was seen."""
        loss = super().compute()
        if self.positives in (0, self.examples):
            return math.nan
        rate = self.positives / self.examples
        return loss / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


class RelativeLogLoss(BinaryMetric[float]):
    """Percent change of log loss of a candidate against a baseline on the same examples.

    An example counts only when both predictions are finite, so that both means are over the same examples.
    For an interval around the number see `loka.metrics.compare.compare_paired(..., relative=True)`.
    """

    def __init__(self, *, inputs: Inputs = "logits", nonfinite: Nonfinite = "raise") -> None:
        super().__init__(inputs=inputs, nonfinite=nonfinite)
        self._add_sums(torch.float64, "candidate", "baseline")
        self._add_sums(torch.int64, "examples")

    def update(self, candidate: Tensor, baseline: Tensor, labels: Tensor) -> None:
        """Add both models' predictions for a batch."""
        if candidate.shape != baseline.shape:
            raise ValueError(f"candidate {tuple(candidate.shape)} and baseline {tuple(baseline.shape)} differ in shape")
        both = torch.where(torch.isfinite(baseline), candidate.double(), math.nan)  # unusable if either is
        z, y, valid = self._screen(both, labels)
        (reference,) = self._place(baseline.reshape(-1))
        reference = torch.where(valid, reference.double(), 0.0)
        if self.inputs == "probabilities":
            outside = ((reference < 0) | (reference > 1)).sum()
            if self.nonfinite == "raise":
                self._reject(0, 0, int(outside), size=reference.numel())
            self._sums["outside"] += outside
        self._sums["candidate"] += torch.where(valid, log_losses(z, y, inputs=self.inputs), 0.0).sum()
        self._sums["baseline"] += torch.where(valid, log_losses(reference, y, inputs=self.inputs), 0.0).sum()
        self._sums["examples"] += valid.sum()

    def compute(self) -> float:
        """Percent change, negative is better; NaN when nothing was seen or the baseline's loss is 0."""
        self._check()
        return relative_change(float(self._sums["candidate"]), float(self._sums["baseline"]))
