"""AUC against scikit-learn, ties included."""

import math

import pytest
import torch
from sklearn.metrics import roc_auc_score

from loka.metrics import AUC


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
