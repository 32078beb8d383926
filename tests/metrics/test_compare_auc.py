"""DeLong's comparison: the estimate is the difference of the AUCs, its error is that of repeated experiments."""

import math

import pytest
import torch
from sklearn.metrics import roc_auc_score

from loka.metrics import compare_auc


def draw(size: int, *, noise: float, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Candidate, baseline (the same score with more noise), labels."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(size, generator=generator, dtype=torch.float64)
    labels = (torch.rand(size, generator=generator, dtype=torch.float64) < torch.sigmoid(2 * truth)).long()
    first = truth + 0.5 * torch.randn(size, generator=generator, dtype=torch.float64)
    return first, first + noise * torch.randn(size, generator=generator, dtype=torch.float64), labels


@pytest.mark.parametrize("ties", [False, True])
def test_estimate_is_the_difference_of_aucs(ties: bool) -> None:
    first, second, labels = draw(800, noise=0.5, seed=0)
    if ties:
        first, second = first.round(), second.round()
    result = compare_auc(first, second, labels, margin=0.001)
    assert result.estimate == pytest.approx(roc_auc_score(labels, first) - roc_auc_score(labels, second), abs=1e-12)


def test_standard_error_matches_repeated_experiments() -> None:
    results = [compare_auc(*draw(400, noise=0.5, seed=seed), margin=0.001) for seed in range(300)]
    estimates = torch.tensor([result.estimate for result in results], dtype=torch.float64)
    errors = torch.tensor([result.standard_error for result in results], dtype=torch.float64)
    assert float(errors.mean()) == pytest.approx(float(estimates.std()), rel=0.12)
    truth = float(estimates.mean())
    covered = sum(result.low <= truth <= result.high for result in results) / 300
    assert covered == pytest.approx(0.95, abs=0.04)


def test_clusters_of_copies_count_once() -> None:
    """Every example five times over: clustered, the error is that of the originals; naive, it is too small by sqrt(5)."""
    first, second, labels = draw(300, noise=0.5, seed=1)
    original = compare_auc(first, second, labels, margin=0.001)
    copies = [x.repeat_interleave(5) for x in (first, second, labels)]
    naive = compare_auc(*copies, margin=0.001)
    clustered = compare_auc(*copies, margin=0.001, groups=torch.arange(300).repeat_interleave(5))
    assert clustered.standard_error == pytest.approx(original.standard_error, rel=1e-9)
    assert naive.standard_error == pytest.approx(original.standard_error / math.sqrt(5), rel=0.01)
    assert (clustered.units, clustered.pairs) == (300, 1500)


def test_verdicts() -> None:
    first, second, labels = draw(4000, noise=1.0, seed=2)
    assert compare_auc(first, second, labels, margin=0.001).verdict == "better"
    assert compare_auc(second, first, labels, margin=0.001).verdict == "worse"
    assert compare_auc(first, first + 1e-4 * second, labels, margin=0.001).verdict == "equivalent"
    small = [x[:60] for x in draw(60, noise=0.3, seed=3)]
    assert compare_auc(small[0], small[1], small[2], margin=0.001).verdict == "inconclusive"


def test_bad_requests() -> None:
    first, second, labels = draw(50, noise=1.0, seed=0)
    with pytest.raises(ValueError, match="same examples"):
        compare_auc(first, second[:4], labels, margin=0.1)
    with pytest.raises(ValueError, match="both classes"):
        compare_auc(first, second, torch.ones(50), margin=0.1)
    with pytest.raises(ValueError, match="1 of 50 pairs"):
        compare_auc(torch.where(torch.arange(50) == 7, torch.nan, first), second, labels, margin=0.1)
    with pytest.raises(ValueError, match="0 or 1"):
        compare_auc(first, second, labels * 2, margin=0.1)
    with pytest.raises(ValueError, match="margin"):
        compare_auc(first, second, labels, margin=0)
    with pytest.raises(ValueError, match="at least two"):
        compare_auc(first, second, labels, margin=0.1, groups=torch.zeros(50, dtype=torch.int64))
    with pytest.raises(ValueError, match="integer ids"):
        compare_auc(first, second, labels, margin=0.1, groups=torch.zeros(50))
