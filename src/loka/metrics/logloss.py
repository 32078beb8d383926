"""Log loss and normalized entropy.

    log loss = mean_i [ -y_i ln p_i - (1 - y_i) ln(1 - p_i) ]            natural logarithm
    NE       = log loss / ( -q ln q - (1 - q) ln(1 - q) ),  q = mean y     1 means "no better than the base rate"

On the same examples the relative change of NE equals the relative change of log loss: the denominator cancels.

Undefined values are NaN: log loss of no examples; NE of no examples or of a single class (the base-rate entropy is 0).
`examples`, `positives` and `nonfinite_count` tell why.
"""

import math

import torch
from torch import Tensor

from loka.metrics.binary import BinaryMetric, Inputs, Nonfinite, log_losses


class LogLoss(BinaryMetric[float]):
    """Mean log loss, natural logarithm.

    Args:
        inputs: "logits" or "probabilities".
        nonfinite: as for `AUC`.

    Example:
        >>> loss = LogLoss()
        >>> loss.update(torch.zeros(4), torch.ones(4))
        >>> round(loss.compute(), 4)
        0.6931
    """

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
        """Number of examples in the mean."""
        return int(self._sums["examples"])

    @property
    def positives(self) -> int:
        """Number of examples with label 1 in the mean."""
        return int(self._sums["positives"])

    def compute(self) -> float:
        """Return the mean log loss; NaN without examples."""
        self._check()
        return float(self._sums["loss"]) / self.examples if self.examples else math.nan


class NormalizedEntropy(LogLoss):
    """Log loss divided by the entropy of the base rate of the same examples.

    Args:
        inputs: as for `LogLoss`.
        nonfinite: as for `LogLoss`.

    Example:
        >>> ne = NormalizedEntropy()
        >>> ne.update(torch.zeros(4), torch.tensor([0.0, 1.0, 0.0, 1.0]))  # no better than the mean
        >>> ne.compute()
        1.0
    """

    def compute(self) -> float:
        """Return NE; NaN without examples or with only one class."""
        loss = super().compute()
        if self.positives in (0, self.examples):
            return math.nan
        rate = self.positives / self.examples
        return loss / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
