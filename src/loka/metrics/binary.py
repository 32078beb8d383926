"""Input validation shared by all metrics of (prediction, 0/1 label) pairs.

Predictions are logits by default, because rankers emit logits and because log loss from logits does not lose digits
near 0 and 1; pass `inputs="probabilities"` otherwise. Metrics that depend only on the order (AUC, GAUC) accept any real
score.

Bad input is never ignored:

- a prediction that is NaN or infinite: `nonfinite="raise"` (the default) raises in `update`; `nonfinite="count"` leaves
  the example out and counts it in `nonfinite_count`. "raise" costs one device synchronization per update, "count" costs
  none for the sums;
- a label that is not 0 or 1, or a probability outside [0, 1]: raises, in `update` under "raise", in `compute` under
  "count".
"""

from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from loka.metrics.accumulator import Metric

Inputs = Literal["logits", "probabilities"]
Nonfinite = Literal["raise", "count"]
Result = TypeVar("Result")
# Probabilities are clamped this far from 0 and 1 before the logarithm; scikit-learn does the same for float64.
PROBABILITY_GUARD = torch.finfo(torch.float64).eps


def log_losses(predictions: Tensor, labels: Tensor, *, inputs: Inputs = "logits") -> Tensor:
    """Return the log loss of each example: softplus(z) - y z for logits z, -y ln p - (1-y) ln(1-p) for probabilities p.

    Args:
        predictions: logits or probabilities. They are not validated; NaN gives NaN.
        labels: 0 or 1, of the same shape.
        inputs: "logits" or "probabilities".

    Returns:
        float64 of the same shape, suitable for `compare_paired`.

    Example:
        >>> log_losses(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 1.0]))
        tensor([0.6931, 0.6931], dtype=torch.float64)
    """
    if predictions.shape != labels.shape:
        raise ValueError(
            f"predictions {tuple(predictions.shape)} and labels {tuple(labels.shape)} must have the same shape"
        )
    y = labels.double()
    if inputs == "logits":
        z = predictions.double()
        return torch.clamp(z, min=0) + torch.log1p(torch.exp(-z.abs())) - y * z
    p = predictions.double().clamp(PROBABILITY_GUARD, 1 - PROBABILITY_GUARD)
    return -(y * torch.log(p) + (1 - y) * torch.log1p(-p))


class BinaryMetric(Metric[Result], Generic[Result]):
    """Base of metrics of predictions and 0/1 labels: validates its input and counts the examples it leaves out."""

    def __init__(self, *, inputs: Inputs = "logits", nonfinite: Nonfinite = "raise", **config: Any) -> None:
        if inputs not in ("logits", "probabilities"):
            raise ValueError(f"inputs={inputs!r}, expected 'logits' or 'probabilities'")
        if nonfinite not in ("raise", "count"):
            raise ValueError(f"nonfinite={nonfinite!r}, expected 'raise' or 'count'")
        super().__init__(inputs=inputs, nonfinite=nonfinite, **config)
        self.inputs: Inputs = inputs
        self.nonfinite: Nonfinite = nonfinite
        self._add_sums(torch.int64, "nonfinite", "bad_labels", "outside")

    @property
    def nonfinite_count(self) -> int:
        """Examples left out because their prediction was NaN or infinite (only with `nonfinite="count"`)."""
        return int(self._sums["nonfinite"])

    def _screen(self, predictions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Validate a batch; returns flat (predictions float64, labels int64, mask of usable ones) on our device."""
        if predictions.shape != labels.shape:
            raise ValueError(
                f"predictions {tuple(predictions.shape)} and labels {tuple(labels.shape)} must have the same shape; "
                "with several labels use one metric per label"
            )
        predictions, labels = self._place(predictions.reshape(-1), labels.reshape(-1))
        predictions = predictions.double()
        finite = torch.isfinite(predictions)
        bad_labels = ((labels != 0) & (labels != 1)).sum()
        outside = predictions.new_zeros((), dtype=torch.int64)
        if self.inputs == "probabilities":
            outside = (finite & ((predictions < 0) | (predictions > 1))).sum()
        nonfinite = (~finite).sum()
        if self.nonfinite == "raise":  # before the state changes, so that a rejected batch has no effect
            self._reject(*torch.stack([nonfinite, bad_labels, outside]).tolist(), size=predictions.numel())
        for name, count in (("nonfinite", nonfinite), ("bad_labels", bad_labels), ("outside", outside)):
            self._sums[name] += count
        return torch.where(finite, predictions, 0.0), (labels == 1).long(), finite

    def _check(self) -> None:
        """Raise the errors that "count" deferred: invalid labels and probabilities."""
        self._reject(0, int(self._sums["bad_labels"]), int(self._sums["outside"]))

    def _reject(self, nonfinite: int, bad_labels: int, outside: int, *, size: int | None = None) -> None:
        name, among = type(self).__name__, "" if size is None else f" of {size}"
        if nonfinite:
            raise ValueError(
                f"{name}: {nonfinite}{among} predictions are NaN or infinite, expected finite ones; "
                "find the layer that made them, or pass nonfinite='count' to leave them out and count them"
            )
        if bad_labels:
            raise ValueError(f"{name}: {bad_labels}{among} labels are neither 0 nor 1; binarise the labels first")
        if outside:
            raise ValueError(
                f"{name}: {outside}{among} probabilities lie outside [0, 1]; for logits pass inputs='logits'"
            )
