"""Log loss, NE and relative log loss against scikit-learn and by hand."""

import math

import pytest
import torch
from sklearn.metrics import log_loss

from loka.metrics import LogLoss, NormalizedEntropy


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_matches_sklearn(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(1000, generator=generator)).to(dtype)
    labels = torch.randint(2, (1000,), generator=generator)
    probabilities = torch.sigmoid(logits.double())
    from_logits, from_probabilities = LogLoss(), LogLoss(inputs="probabilities")
    for start in range(0, 1000, 300):
        from_logits.update(logits[start : start + 300], labels[start : start + 300])
        from_probabilities.update(probabilities[start : start + 300], labels[start : start + 300])
    expected = log_loss(labels.numpy(), probabilities.numpy())
    assert from_logits.compute() == pytest.approx(expected, rel=1e-12)
    assert from_probabilities.compute() == pytest.approx(expected, rel=1e-12)


def test_certain_and_wrong_is_large_but_finite_as_in_sklearn() -> None:
    metric = LogLoss(inputs="probabilities")
    metric.update(torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64), torch.tensor([1, 0, 1]))
    assert metric.compute() == pytest.approx(log_loss([1, 0, 1], [0.0, 1.0, 0.5]), rel=1e-12)


def test_float64_sum_keeps_small_terms() -> None:
    """A float32 running sum would stop growing: 2**24 * 1 + 1 == 2**24."""
    metric = LogLoss()
    metric.update(torch.full((1,), -float(2**26)), torch.ones(1))
    for _ in range(4):
        metric.update(torch.zeros(1000), torch.ones(1000))
    assert metric.compute() * 4001 == pytest.approx(2**26 + 4000 * math.log(2), rel=1e-14)


def test_base_rate_has_ne_one() -> None:
    labels = (torch.arange(1000) < 37).long()
    metric = NormalizedEntropy(inputs="probabilities")
    metric.update(torch.full((1000,), 0.037, dtype=torch.float64), labels)
    assert metric.compute() == pytest.approx(1.0, rel=1e-12)


def test_ne_by_hand() -> None:
    metric = NormalizedEntropy(inputs="probabilities")
    metric.update(torch.tensor([0.8, 0.4], dtype=torch.float64), torch.tensor([1, 0]))
    assert metric.compute() == pytest.approx(-(math.log(0.8) + math.log(0.6)) / 2 / math.log(2), rel=1e-14)


@pytest.mark.parametrize("label", [0, 1])
def test_single_class(label: int) -> None:
    labels = torch.full((5,), label)
    loss, entropy = LogLoss(), NormalizedEntropy()
    loss.update(torch.zeros(5), labels)
    entropy.update(torch.zeros(5), labels)
    assert loss.compute() == pytest.approx(math.log(2))
    assert math.isnan(entropy.compute())
    assert (entropy.examples, entropy.positives) == (5, 5 * label)
