"""Calibration ratio, ECE and reliability curve."""

import math

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve

from loka.metrics import Calibration


def test_curve_and_ece_match_sklearn() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3000, generator=generator, dtype=torch.float64)
    labels = (torch.rand(3000, generator=generator) < torch.sigmoid(2 * logits)).long()
    metric = Calibration(bins=10)
    metric.update(logits[:1000], labels[:1000])
    metric.update(logits[1000:], labels[1000:])
    result = metric.compute()
    observed, predicted = calibration_curve(labels, torch.sigmoid(logits), n_bins=10)
    assert [row[1] for row in result.curve] == pytest.approx(predicted, rel=1e-12)
    assert [row[2] for row in result.curve] == pytest.approx(observed, rel=1e-12)
    counts = np.array([row[0] for row in result.curve])
    assert result.ece == pytest.approx(float((counts * abs(observed - predicted)).sum() / 3000), rel=1e-12)
    assert result.ratio == pytest.approx(float(torch.sigmoid(logits).sum() / labels.sum()), rel=1e-12)
    assert result.examples == counts.sum() == 3000


def test_over_prediction_has_a_ratio_above_one() -> None:
    metric = Calibration(inputs="probabilities")
    metric.update(torch.full((100,), 0.2), (torch.arange(100) < 10).long())
    result = metric.compute()
    assert result.ratio == pytest.approx(2.0)
    assert result.ece == pytest.approx(0.1)


def test_logit_spacing_resolves_small_rates() -> None:
    """Two wrong groups of rare events that cancel inside one uniform bin, and do not in logit bins."""
    p = torch.tensor([0.001] * 1000 + [0.02] * 1000, dtype=torch.float64)
    labels = torch.cat([torch.arange(1000) < 20, torch.arange(1000) < 1]).long()
    uniform = Calibration(bins=20, inputs="probabilities")
    logit = Calibration(bins=20, spacing="logit", inputs="probabilities")
    uniform.update(p, labels)
    logit.update(p, labels)
    assert uniform.compute().ece == pytest.approx(0.0, abs=1e-12)
    assert logit.compute().ece == pytest.approx(0.019, rel=1e-9)


def test_edges_are_included() -> None:
    metric = Calibration(bins=4, inputs="probabilities")
    metric.update(torch.tensor([0.0, 0.25, 1.0]), torch.tensor([0, 0, 1]))
    assert [row[0] for row in metric.compute().curve] == [1, 1, 1]
    logit = Calibration(bins=4, spacing="logit", inputs="probabilities")
    logit.update(torch.tensor([0.0, 1.0]), torch.tensor([0, 1]))
    assert [row[0] for row in logit.compute().curve] == [1, 1]


def test_no_positive_has_no_ratio() -> None:
    metric = Calibration()
    metric.update(torch.zeros(4), torch.zeros(4))
    result = metric.compute()
    assert math.isnan(result.ratio)
    assert result.ece == pytest.approx(0.5)


def test_options() -> None:
    with pytest.raises(ValueError, match="bins"):
        Calibration(bins=0)
    with pytest.raises(ValueError, match="spacing"):
        Calibration(spacing="log")  # type: ignore[arg-type]
