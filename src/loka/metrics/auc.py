"""Area under the ROC curve: exact, and per group (GAUC).

AUC is the probability that a random positive scores above a random negative, a tie counting one half:

    AUC = [ #(s+ > s-) + #(s+ = s-) / 2 ] / (P N)

`AUC` is exact: it keeps every score (9 bytes per example), sorts once, and counts pairs in integers, so the only
rounding is the last division.

`GAUC` is the mean of the exact AUC of each group (user) weighted by the group's impressions. A group without both
classes has no AUC: it is excluded, and counted. It keeps 17 bytes per example.

With one class, or nothing, AUC is NaN; GAUC is NaN when no group has both classes.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.metrics.binary import BinaryMetric, Nonfinite


class AUC(BinaryMetric[float]):
    """Exact AUC with ties counted one half; memory grows with the data (9 bytes per example).

    Args:
        nonfinite: how to treat predictions that are not finite: "raise", or "count" them and leave them out.

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
        """Return the AUC over all updates; NaN with fewer than two classes."""
        self._check()
        score, positive = self._row("score"), self._row("positive")
        twice, positives, negatives = _count_pairs(
            torch.zeros_like(positive, dtype=torch.int64), score, positive, groups=1
        )
        pairs = 2 * int(positives) * int(negatives)
        return int(twice) / pairs if pairs else math.nan


@dataclass(frozen=True)
class GroupedAUC:
    """GAUC and the groups it was computed from; `excluded_*` count groups that lack one of the classes."""

    value: float
    groups: int
    impressions: int
    excluded_groups: int
    excluded_impressions: int


class GAUC(BinaryMetric[GroupedAUC]):
    """Mean AUC per group, weighted by impressions; exact, 17 bytes per example.

    Args:
        nonfinite: as for `AUC`.

    Example:
        >>> gauc = GAUC()
        >>> scores, labels = torch.tensor([0.1, 0.9, 0.8, 0.3]), torch.tensor([0.0, 1.0, 0.0, 1.0])
        >>> gauc.update(scores, labels, torch.tensor([7, 7, 8, 8]))  # users
        >>> gauc.compute().value
        0.5
    """

    def __init__(self, *, nonfinite: Nonfinite = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self._add_rows(torch.float64, "score")
        self._add_rows(torch.bool, "positive")
        self._add_rows(torch.int64, "group")

    def update(self, predictions: Tensor, labels: Tensor, group: Tensor) -> None:
        """Add a batch; `group` holds any integer ids, one per example. A group may come in many batches."""
        if group.shape != predictions.shape:
            raise ValueError(f"group {tuple(group.shape)} and predictions {tuple(predictions.shape)} differ in shape")
        if group.is_floating_point() or group.dtype == torch.bool:
            raise ValueError(f"group has dtype {group.dtype}, expected integer ids")
        score, y, valid = self._screen(predictions, labels)
        (group,) = self._place(group.reshape(-1))
        self._append(score=score[valid], positive=y[valid], group=group[valid])

    def compute(self) -> GroupedAUC:
        """Return the weighted mean, and the number of groups and impressions included and excluded."""
        self._check()
        ids, dense = torch.unique(self._row("group"), return_inverse=True)
        twice, positives, negatives = _count_pairs(dense, self._row("score"), self._row("positive"), groups=ids.numel())
        size, pairs = positives + negatives, 2 * positives * negatives
        usable = pairs > 0
        weight = size[usable].double()
        auc = twice[usable].double() / pairs[usable].double()
        impressions, groups = int(size[usable].sum()), int(usable.sum())
        return GroupedAUC(
            value=float((auc * weight).sum() / weight.sum()) if groups else math.nan,
            groups=groups,
            impressions=impressions,
            excluded_groups=ids.numel() - groups,
            excluded_impressions=int(size.sum()) - impressions,
        )


def _count_pairs(group: Tensor, score: Tensor, positive: Tensor, *, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return per group, in exact int64: twice the number of correctly ordered pairs (ties once), positives, negatives.

    Sorted by (group, score), equal scores of a group form a run. A run with p positives and n negatives, and m
    negatives of its group before it, contributes p (2 m + n).
    """
    order = torch.argsort(score, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    group, score, positive = group[order], score[order], positive[order].long()
    totals = torch.zeros(2, groups, dtype=torch.int64, device=score.device)
    totals[0].index_add_(0, group, positive)
    totals[1].index_add_(0, group, 1 - positive)
    starts = torch.ones_like(group, dtype=torch.bool)
    starts[1:] = (group[1:] != group[:-1]) | (score[1:] != score[:-1])
    run = starts.cumsum(0) - 1
    runs = torch.zeros(2, int(starts.sum()), dtype=torch.int64, device=score.device)
    runs[0].index_add_(0, run, positive)
    runs[1].index_add_(0, run, 1 - positive)
    owner = group[starts]
    before_group = totals[1].cumsum(0) - totals[1]
    below = runs[1].cumsum(0) - runs[1] - before_group[owner]
    twice = torch.zeros(groups, dtype=torch.int64, device=score.device)
    twice.index_add_(0, owner, runs[0] * (2 * below + runs[1]))
    return twice, totals[0], totals[1]
