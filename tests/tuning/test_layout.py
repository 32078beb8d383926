"""Rewrites that keep the function, but round differently: what they do to the loss of the model that the user gave."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loka
from loka import Tuned

from .small import MARGIN, loss, make_batches, make_trained, placed


class Attending(nn.Module):
    """An attention whose two computations by torch and by the mod attention_layout round differently in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 4, 16)
        return self.last(self.attention(x, x, x, need_weights=False)[0].mean(1)).squeeze(-1)


def is_rewritten(model: nn.Module) -> bool:
    return bool(loka.mods.applied_to(model))


def tune(model: nn.Module, by: Callable[[bool, bool], float], **options: Any) -> Tuned:
    """Tune with a loss that also depends on whether the model is rewritten and whether it runs in 16 bits."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        return loss(model(batch[0]), batch[1]) * by(is_rewritten(model), torch.is_autocast_enabled("cpu"))

    return loka.tune(model, make_batches(), step=step, margin=MARGIN, progress=False, **options)


def test_a_rewrite_that_moves_the_loss_is_left_out() -> None:
    """Where float32 agrees with the model as it was given, the rewrite is what is wrong."""
    tuned = tune(Attending(), lambda rewritten, low: 1.2 if rewritten and low else 1.0, autocast=torch.bfloat16)
    assert "attention_layout" not in tuned.plan.mods
    (note,) = [note for note in tuned.record.notes if "left out" in note]
    assert "they move the metric by +20." in note


def test_a_rewrite_that_is_nearer_to_float32_stays_and_is_said() -> None:
    """16 bits may move the loss by more than the margin by themselves, either way; what FP8 adds is then measured beside the rewritten model."""
    tuned = tune(Attending(), lambda rewritten, low: 1.2 if rewritten or not low else 1.0, autocast=torch.bfloat16)
    assert "attention_layout" in tuned.plan.mods
    (note,) = [note for note in tuned.record.notes if "rounding to 16 bits" in note]
    assert "by -16." in note
    assert "with tune's layout rewrites" in note
    assert tuned.record.metric_change is None or abs(tuned.record.metric_change.value) < 0.1


def test_the_change_is_measured_from_the_model_that_was_given() -> None:
    """A rewrite's own part counts: of the margin, and in the record."""
    model, _ = make_trained()
    tuned = tune(model, lambda rewritten, low: 1.01 if rewritten else 1.0)
    assert tuned.plan.mods
    assert placed(model)
    assert tuned.record.metric_change is not None
    assert tuned.record.metric_change.value == pytest.approx(0.01, abs=0.008)


def test_a_rewrite_alone_has_its_change_in_the_record() -> None:
    model, _ = make_trained()
    metric = lambda model, batch: torch.full((4,), 2.0 if placed(model) else 1.01 if is_rewritten(model) else 1.0)  # noqa: E731
    tuned = tune(model, lambda rewritten, low: 1.0, metric=metric)
    assert tuned.plan.mods
    assert not placed(model)
    assert tuned.record.metric_change is not None
    assert tuned.record.metric_change.value == pytest.approx(0.01)


def test_what_the_user_asked_for_is_no_part_of_the_change() -> None:
    """Mods of the architecture change the function, and are what the rest is compared with."""
    model, _ = make_trained()
    tuned = tune(model, lambda rewritten, low: 3.0 if rewritten else 1.0, architecture=True)
    assert "no_bias" in tuned.plan.mods
    assert tuned.record.metric_change is None or abs(tuned.record.metric_change.value) < 0.1
