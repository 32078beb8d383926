"""Paired comparison of two AUCs on the same examples (DeLong), per example or per cluster.

AUC is no mean over examples, but its error is one to first order. Let V_i be the share of the other class that example
i is on the right side of (a tie counts one half): for a positive, the share of negatives below it; for a negative, the
share of positives above it. Then AUC = mean of V over the positives = mean of V over the negatives, and with D_i =
V_i(candidate) - V_i(baseline) and delta = the difference of the AUCs, example i moves delta by

    (D_i - delta) / P  for a positive,   (D_i - delta) / N  for a negative.

Summed per cluster (user), squared and added up, these give the variance; the interval is Student's t with one degree of
freedom per cluster, less one. This costs two sorts per model, no resampling. The verdict is that of
`loka.metrics.compare`.
"""

import torch
from torch import Tensor

from loka.metrics.bootstrap import find_t_quantile
from loka.metrics.compare import FEW_UNITS, Comparison, decide, minimum_detectable_effect

__all__ = ["compare_auc"]


def compare_auc(
    candidate: Tensor,
    baseline: Tensor,
    labels: Tensor,
    *,
    margin: float,
    groups: Tensor | None = None,
    confidence: float = 0.95,
    power: float = 0.8,
    metric: str = "AUC",
) -> Comparison:
    """Difference of the AUCs of two models' scores on the same labelled examples; `groups` names the independent units."""
    if not margin > 0 or not 0 < confidence < 1 or not 0 < power < 1:
        raise ValueError(f"margin={margin}, confidence={confidence}, power={power}: expected > 0, in (0, 1), in (0, 1)")
    first, second, positive = _check(candidate, baseline, labels)
    place_first, place_second = _place(first, positive), _place(second, positive)
    difference = place_first - place_second
    estimate = float(difference[positive].mean())
    share = torch.where(positive, 1.0 / positive.double().sum(), 1.0 / (~positive).double().sum())
    moves = _total(share * (difference - estimate), groups)
    units = moves.numel()
    if units < 2:
        raise ValueError(f"{units} independent unit(s): an interval needs at least two")
    error = float(torch.sqrt(moves.square().sum() * units / (units - 1)))
    few = units < FEW_UNITS
    half = find_t_quantile(1 - (1 - confidence) / 2, units - 1) * error
    return Comparison(
        metric=metric,
        estimate=estimate,
        low=estimate - half,
        high=estimate + half,
        standard_error=error,
        mde=minimum_detectable_effect(error, confidence=confidence, power=power, units=units if few else None),
        margin=float(margin),
        verdict=decide(estimate - half, estimate + half, margin=margin, lower_is_better=False),
        units=units,
        pairs=first.numel(),
        unit="",
        lower_is_better=False,
        confidence=confidence,
        power=power,
        method="student",
    )


def _place(scores: Tensor, positive: Tensor) -> Tensor:
    """V_i of every example: the share of the other class it is on the right side of."""
    ups, downs = scores[positive].sort().values, scores[~positive].sort().values

    def below(others: Tensor, values: Tensor) -> Tensor:
        strict, loose = torch.searchsorted(others, values), torch.searchsorted(others, values, right=True)
        return (strict + loose).double() / (2 * others.numel())

    result = torch.empty_like(scores)
    result[positive] = below(downs, scores[positive].contiguous())
    result[~positive] = 1 - below(ups, scores[~positive].contiguous())
    return result


def _total(values: Tensor, groups: Tensor | None) -> Tensor:
    if groups is None:
        return values
    groups = groups.detach().cpu().reshape(-1)
    if groups.shape != values.shape or groups.is_floating_point():
        raise ValueError(f"groups is {groups.dtype} [{groups.numel()}], expected integer ids [{values.numel()}]")
    ids, dense = torch.unique(groups, return_inverse=True)
    return torch.zeros(ids.numel(), dtype=torch.float64).index_add_(0, dense, values)


def _check(candidate: Tensor, baseline: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not candidate.shape == baseline.shape == labels.shape:
        shapes = f"{tuple(candidate.shape)}, {tuple(baseline.shape)}, {tuple(labels.shape)}"
        raise ValueError(f"candidate, baseline and labels have the shapes {shapes}: expected the same examples")
    first, second, y = (x.detach().cpu().double().reshape(-1) for x in (candidate, baseline, labels))
    bad = int((~(torch.isfinite(first) & torch.isfinite(second))).sum())
    if bad:
        raise ValueError(
            f"{bad} of {first.numel()} pairs hold NaN or infinity: leave them out knowingly, or find their cause"
        )
    if bool(((y != 0) & (y != 1)).any()):
        raise ValueError("labels must be 0 or 1; binarise them first")
    positive = y == 1
    if not bool(positive.any()) or bool(positive.all()):
        raise ValueError(f"{int(positive.sum())} of {y.numel()} labels are positive: AUC needs both classes")
    return first, second, positive
