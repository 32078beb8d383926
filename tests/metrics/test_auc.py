"""AUC against scikit-learn, ties included; the histogram within its own bound; GAUC against a loop over groups."""

import math

import pytest
import torch
from sklearn.metrics import roc_auc_score

from loka.metrics import AUC, GAUC


def draw(seed: int, size: int, *, levels: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator, dtype=torch.float64) * 2
    labels = (torch.rand(size, generator=generator) < torch.sigmoid(logits)).long()
    if levels is not None:
        logits = (logits * levels / 4).round() / levels * 4
    return logits, labels


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("levels", [None, 1, 3, 20])
def test_exact_auc_matches_sklearn(seed: int, levels: int | None) -> None:
    logits, labels = draw(seed, 777, levels=levels)
    metric = AUC()
    for chunk in range(0, 777, 100):
        metric.update(logits[chunk : chunk + 100], labels[chunk : chunk + 100])
    assert metric.compute() == pytest.approx(roc_auc_score(labels, logits), abs=1e-14)


def test_all_tied_is_one_half_exactly() -> None:
    metric = AUC()
    metric.update(torch.zeros(10), torch.arange(10) % 2)
    assert metric.compute() == 0.5


def test_order_is_all_that_matters_and_inverts() -> None:
    metric, flipped = AUC(), AUC()
    scores, labels = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 0, 1, 1])
    metric.update(scores.exp(), labels)
    flipped.update(-scores, labels)
    assert (metric.compute(), flipped.compute()) == (1.0, 0.0)


@pytest.mark.parametrize("kind", [AUC])
@pytest.mark.parametrize("label", [0, 1])
def test_single_class_is_nan(kind: type[AUC], label: int) -> None:
    metric = kind()
    metric.update(torch.randn(5), torch.full((5,), label))
    assert math.isnan(metric.compute())


@pytest.mark.parametrize("levels", [None, 3])
@pytest.mark.parametrize("seed", range(3))
def test_gauc_matches_a_loop(seed: int, levels: int | None) -> None:
    logits, labels = draw(seed, 600, levels=levels)
    group = torch.randint(-5, 60, (600,), generator=torch.Generator().manual_seed(seed)) * 1_000_003
    metric = GAUC()
    for chunk in range(0, 600, 128):
        metric.update(*(x[chunk : chunk + 128] for x in (logits, labels, group)))
    total, weight, excluded, left_out = 0.0, 0, 0, 0
    for one in group.unique():
        mine = group == one
        size = int(mine.sum())
        if labels[mine].unique().numel() < 2:
            excluded, left_out = excluded + 1, left_out + size
            continue
        total += size * float(roc_auc_score(labels[mine], logits[mine]))
        weight += size
    result = metric.compute()
    assert result.value == pytest.approx(total / weight, rel=1e-13)
    assert (result.impressions, result.excluded_groups, result.excluded_impressions) == (weight, excluded, left_out)
    assert result.groups + result.excluded_groups == group.unique().numel()


def test_gauc_of_one_group_is_auc() -> None:
    logits, labels = draw(5, 300)
    grouped, plain = GAUC(), AUC()
    grouped.update(logits, labels, torch.full((300,), 9))
    plain.update(logits, labels)
    assert grouped.compute().value == plain.compute()


def test_gauc_without_usable_groups() -> None:
    metric = GAUC()
    metric.update(torch.randn(4), torch.tensor([0, 1, 1, 1]), torch.tensor([1, 2, 3, 3]))
    result = metric.compute()
    assert math.isnan(result.value)
    assert (result.groups, result.excluded_groups, result.excluded_impressions) == (0, 3, 4)


def test_gauc_wants_integer_groups() -> None:
    with pytest.raises(ValueError, match="integer ids"):
        GAUC().update(torch.zeros(2), torch.tensor([0, 1]), torch.tensor([0.0, 1.0]))
