"""What happens to bad input: it raises, or it is counted; the rest of the batch is untouched by it."""

import math

import pytest
import torch

from loka.metrics import AUC, GAUC, LogLoss, NormalizedEntropy, log_losses

LOGITS = torch.tensor([0.5, -1.0, 2.0, 0.1, -0.3, 1.5])
LABELS = torch.tensor([1, 0, 1, 1, 0, 0])
WITH_BAD = torch.tensor([0.5, math.nan, -1.0, 2.0, math.inf, 0.1, -0.3, -math.inf, 1.5])
WITH_BAD_LABELS = torch.tensor([1, 1, 0, 1, 0, 1, 0, 1, 0])
KINDS = [LogLoss, NormalizedEntropy, AUC]


@pytest.mark.parametrize("kind", KINDS)
def test_nonfinite_predictions_raise_and_leave_no_trace(kind: type[LogLoss]) -> None:
    metric = kind()
    with pytest.raises(ValueError, match="3 of 9 predictions are NaN or infinite"):
        metric.update(WITH_BAD, WITH_BAD_LABELS)
    metric.update(LOGITS, LABELS)
    clean = kind()
    clean.update(LOGITS, LABELS)
    assert metric.compute() == clean.compute()


@pytest.mark.parametrize("kind", KINDS)
def test_nonfinite_predictions_are_counted(kind: type[LogLoss]) -> None:
    metric, clean = kind(nonfinite="count"), kind()
    metric.update(WITH_BAD, WITH_BAD_LABELS)
    clean.update(LOGITS, LABELS)
    got, expected = metric.compute(), clean.compute()
    if isinstance(expected, float):
        assert got == pytest.approx(expected, rel=1e-14)  # sums of padded batches may round differently
    else:
        assert got == expected
    assert metric.nonfinite_count == 3


def test_gauc_counts_too() -> None:
    metric, clean = GAUC(nonfinite="count"), GAUC()
    metric.update(WITH_BAD, WITH_BAD_LABELS, torch.tensor([1, 1, 1, 2, 2, 1, 2, 2, 2]))
    clean.update(LOGITS, LABELS, torch.tensor([1, 1, 2, 1, 2, 2]))
    assert metric.compute() == clean.compute()
    assert metric.nonfinite_count == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [2.0, -1.0, 0.5, math.nan])
def test_labels_must_be_binary(kind: type[LogLoss], bad: float) -> None:
    labels = LABELS.float()
    labels[2] = bad
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        kind().update(LOGITS, labels)
    late = kind(nonfinite="count")
    late.update(LOGITS, labels)
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        late.compute()


@pytest.mark.parametrize("kind", [LogLoss, NormalizedEntropy])
def test_probabilities_must_be_probabilities(kind: type[LogLoss]) -> None:
    with pytest.raises(ValueError, match="outside"):
        kind(inputs="probabilities").update(LOGITS, LABELS)
    late = kind(inputs="probabilities", nonfinite="count")
    late.update(LOGITS, LABELS)
    with pytest.raises(ValueError, match="outside"):
        late.compute()


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="same shape"):
        LogLoss().update(LOGITS, LABELS[:, None])
    with pytest.raises(ValueError, match="same shape"):
        log_losses(LOGITS, LABELS[:3])


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="inputs"):
        LogLoss(inputs="odds")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nonfinite"):
        LogLoss(nonfinite="ignore")  # type: ignore[arg-type]


def test_log_losses_are_stable_for_large_logits() -> None:
    losses = log_losses(torch.tensor([800.0, -800.0, 800.0]), torch.tensor([1, 0, 0]))
    assert losses.tolist() == [0.0, 0.0, 800.0]
