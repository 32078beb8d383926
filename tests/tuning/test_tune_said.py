"""What tune says beside its numbers: alarms, models that learned nothing yet, data that resolve too little, modules it does not see."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loka

from .small import BATCHES, MARGIN, WIDTH, Ranker, loss, make_trained, placed, tune


def with_an_offset() -> tuple[nn.Module, Callable[[Any], Any]]:
    """A trained ranker whose first column is raw: 1975 +- 14, with the normalisation folded into the first linear. The function is the same."""
    model, _ = make_trained(60)
    with torch.no_grad():
        model.first.weight[:, 0] /= 14.4
        model.first.bias -= 1975 * model.first.weight[:, 0]

    def raw(batch: Any) -> Any:
        x = batch[0].clone()
        x[:, 0] = 1975 + 14.4 * x[:, 0]
        return x, batch[1]

    return model, raw


def test_a_column_with_a_large_offset_is_kept_with_an_alarm() -> None:
    model, raw = with_an_offset()
    tuned = tune(model, [raw(batch) for batch in BATCHES], margin=0.01)
    assert "first" not in placed(model)
    assert placed(model), "the others are none the worse for it"
    (unit,) = [unit for unit in tuned.record.units if "first" in unit.linears]
    assert unit.way == "high"
    assert unit.alarms
    assert "alarm" in str(tuned)
    assert tuned.record.metric_change.high <= tuned.record.used_margin


def test_an_offset_that_the_model_made_itself_is_no_alarm() -> None:
    """A hidden unit that gives every example nearly the same number is nobody's raw year."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 1), nn.Flatten(0))
    with torch.no_grad():
        model[0].weight[0] *= 1e-3
        model[0].bias[0] = 30.0
    tuned = tune(model)
    assert "high" in [unit.way for unit in tuned.record.units if "2" in unit.linears], "it is looked at, and kept"
    assert not any(unit.alarms for unit in tuned.record.units)


def test_too_early_is_said() -> None:
    torch.manual_seed(0)
    tuned = tune(Ranker())
    assert any(note.startswith("too early") for note in tuned.record.notes)
    assert not any(note.startswith("too early") for note in tune(make_trained()[0]).record.notes)


def test_a_margin_that_the_data_do_not_resolve_is_said() -> None:
    tuned = tune(make_trained()[0], margin=2e-4)
    assert any("more batches resolve more" in note for note in tuned.record.notes)
    assert tuned.record.margin == 2e-4
    change = tuned.record.metric_change
    assert change is None or change.high <= tuned.record.used_margin


def test_what_is_no_linear_is_named() -> None:
    """A share of FLOPs that leaves out half of a model without a word is a wrong share."""

    class Conv1D(nn.Module):  # as transformers has it
        def __init__(self) -> None:
            super().__init__()
            self.nf, self.weight, self.bias = (
                64,
                nn.Parameter(0.1 * torch.randn(WIDTH, 64)),
                nn.Parameter(torch.zeros(64)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.gru, self.last = Conv1D(), nn.GRU(64, 32, batch_first=True), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.gru(self.conv(x).unsqueeze(1))[0][:, 0]).squeeze(-1)

    torch.manual_seed(0)
    notes = "\n".join(tune(Mixed()).record.notes)
    assert "gru: a recurrent layer" in notes
    assert "conv: a Conv1D is not converted here; hint: replace it by an nn.Linear" in notes
    assert not any("not observed" in note for note in tune(make_trained()[0]).record.notes)


@pytest.mark.parametrize("kind", ["loss", "step", "metric", "regression"])
def test_too_early_whatever_the_loss(kind: str) -> None:
    """A model that has learned nothing is no better than its mean prediction, whatever is computed from it."""
    options: dict[str, Any] = {"margin": 0.5}
    if kind == "loss":
        options["given"] = loss
    elif kind == "regression":
        options["given"] = lambda output, target: F.mse_loss(output, target, reduction="none")
    else:
        options |= {"given": None, "step": lambda model, batch: loss(model(batch[0]), batch[1])}
        if kind == "metric":
            options["metric"] = lambda model, batch: loss(model(batch[0]), batch[1])
    torch.manual_seed(0)
    early = [note for note in tune(Ranker(), **options).record.notes if note.startswith("too early")]
    assert len(early) == 1
    assert "train until it is below" in early[0]
    if kind != "regression":  # logits that were trained are no regression of the labels
        assert not any("too early" in note for note in tune(make_trained(120)[0], **options).record.notes)


def test_a_loss_inside_the_model_is_not_called_too_early() -> None:
    class WithLoss(Ranker):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            logits = super().forward(x)
            return loss(logits, y).mean(), logits

    torch.manual_seed(0)
    notes = loka.tune(WithLoss(), BATCHES, step=lambda m, b: m(*b)[0], margin=MARGIN, progress=False).record.notes
    assert not any("too early" in note for note in notes)


def test_a_part_without_gradients_says_why_it_is_not_judged() -> None:
    """In words of this call: there is no probe here that could be told a loss."""

    class Encoded(Ranker):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = F.silu(self.norm(self.first(x)))
            return self.last(F.relu(self.third(F.relu(self.second(x))))).squeeze(-1)

    tuned = tune(Encoded())
    (why,) = [unit.reason for unit in tuned.record.units if unit.name == "first"]
    assert "under torch.no_grad" in why
    assert "probe" not in why
