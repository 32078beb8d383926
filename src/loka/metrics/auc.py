"""Area under the ROC curve: exact.

AUC is the probability that a random positive scores above a random negative, a tie counting one half:

    AUC = [ #(s+ > s-) + #(s+ = s-) / 2 ] / (P N)

`AUC` is exact: it keeps every score (9 bytes per example), sorts once, and counts pairs in integers, so the only
rounding is the last division.

With one class, or nothing, it is NaN.
"""

import math

import torch
from torch import Tensor

from loka.metrics.binary import BinaryMetric, Nonfinite


class AUC(BinaryMetric[float]):
    """Exact AUC with ties counted one half; memory grows with the data (9 bytes per example).

    Args:
        nonfinite: what becomes of predictions that are not finite: "raise", or "count" and leave out.

    Example:
        >>> auc = AUC()
        >>> auc.update(torch.tensor([0.1, 0.9]), torch.tensor([0.0, 1.0]))
        >>> auc.compute()
        1.0
    """

    def __init__(self, *, nonfinite: Nonfinite = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self._add_rows(torch.float64, "score")
        self._add_rows(torch.bool, "positive")

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Add a batch; predictions are any real scores, only their order matters."""
        score, y, valid = self._screen(predictions, labels)
        self._append(score=score[valid], positive=y[valid])

    def compute(self) -> float:
        """AUC over everything seen; NaN with fewer than two classes."""
        self._check()
        ordered, pairs = _count_pairs(self._row("score"), self._row("positive"))
        return ordered / pairs if pairs else math.nan


def _count_pairs(score: Tensor, positive: Tensor) -> tuple[int, int]:
    """Twice the number of correctly ordered pairs (ties once), and twice the number of pairs; integers, hence exact.

    Sorted by score, equal scores form a run. A run with p positives and n negatives, and m negatives before it, contributes p (2 m + n).
    """
    order = torch.argsort(score, stable=True)
    score, positive = score[order], positive[order].long()
    starts = torch.ones_like(positive, dtype=torch.bool)
    starts[1:] = score[1:] != score[:-1]
    run = starts.cumsum(0) - 1
    runs = torch.zeros(2, int(starts.sum()), dtype=torch.int64, device=score.device)
    runs[0].index_add_(0, run, positive)
    runs[1].index_add_(0, run, 1 - positive)
    below = runs[1].cumsum(0) - runs[1]
    positives, negatives = runs.sum(1).tolist()
    return int((runs[0] * (2 * below + runs[1])).sum()), 2 * positives * negatives
