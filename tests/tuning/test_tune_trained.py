"""tune with train=: two copies are trained a little, and what ends apart is not converted."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loka
from loka.records import Interval
from loka.tuning import metric
from loka.tuning.comparing import copy_model

from .small import BATCHES, MARGIN, Ranker, loss, make_trained, placed, same, state_of, train, tune


def test_a_paired_run_of_training_where_it_is_allowed() -> None:
    model, optimizer = make_trained()
    before = state_of(model, optimizer)
    tuned = tune(model, train=6)
    record = tuned.record
    assert record.training_change is not None
    assert record.training_change.high <= record.used_margin
    assert "a paired run of 6 steps" in record.gradients
    tuned.revert()
    assert same(before[0], state_of(model)[0]), "copies are trained, not the model"


def test_an_optimizer_that_runs_the_step_itself_trains_too() -> None:
    model, _ = make_trained()
    tuned = tune(model, train=2, optimizer=lambda parameters: torch.optim.LBFGS(parameters, lr=1e-3, max_iter=2))
    assert tuned.record.training_change is not None or not placed(model)


def test_a_model_whose_forward_leaves_something_behind_is_copied() -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.utils.weight_norm(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            self.kept = {"hidden": self.linear(x)}
            return self.kept["hidden"].sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # weight_norm is old, and in many models
        model = Leaves()
    model(torch.ones(2, 4)).backward()
    copied = copy_model(model)
    with torch.no_grad():
        copied.linear.weight_g.mul_(2.0)
    assert not torch.equal(copied(torch.ones(2, 4)), model(torch.ones(2, 4)))
    copied(torch.ones(2, 4)).backward()
    assert copied.linear.weight_g.grad is not model.linear.weight_g.grad


APART = Interval(value=0.2, low=0.1, high=0.3)
ALIKE = Interval(value=0.0, low=-0.001, high=0.001)


def end_runs(monkeypatch: pytest.MonkeyPatch, *changes: Interval) -> list[set[str]]:
    """Paired runs that end as given, the last one again and again; returns the linears that each was to run low."""
    seen: list[set[str]] = []

    def train_paired(task: Any, plan: loka.Plan, *rest: Any) -> Interval:
        seen.append({link.linear for unit in plan.units for link in unit.links})
        return changes[min(len(seen), len(changes)) - 1]

    monkeypatch.setattr("loka.tuning.rehearsal.train_paired", train_paired)
    return seen


class Parted(Ranker):
    """Two units: no chain reaches over a sine."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(F.silu(self.norm(self.first(x))))
        x = F.relu(self.third(F.relu(self.second(x))))
        return self.last(self.drop(self.batch(x))).squeeze(-1)


def make_parted() -> tuple[Parted, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Parted()
    return model, train(model)


def test_a_run_that_ends_apart_drops_the_unit_of_the_largest_predicted_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = end_runs(monkeypatch, APART, ALIKE)
    model, _ = make_parted()
    units = tune(copy.deepcopy(model)).record.units
    low = [unit for unit in units if unit.way != "high"]
    assert len(low) > 1, "with a single unit nothing shows which one leaves"
    worst = max(low, key=lambda unit: unit.harm.value)
    tuned = tune(model, train=6)
    assert len(seen) == 2
    assert seen[0] == {name for unit in low for name in unit.linears}
    assert seen[0] - seen[1] == set(worst.linears)
    assert placed(model) == seen[1]
    (left,) = [unit for unit in tuned.record.units if unit.linears == worst.linears]
    assert left.way == "high"
    assert left.reason.startswith(
        "after 6 training steps with it, the metric moved by +20.0000% [+10.0000%, +30.0000%]"
    )
    assert tuned.record.training_change == ALIKE
    (rest,) = [unit for unit in tuned.record.units if unit.way != "high"]
    assert tuned.record.metric_change == rest.metric_change, "of what runs, not of what was measured before a unit left"


def test_what_is_left_is_held_to_the_margin_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two units may cancel: without one of them the other is another change."""
    seen = end_runs(monkeypatch, APART, ALIKE)
    swap = metric.swap_all
    monkeypatch.setattr(metric, "swap_all", lambda *given: APART if len(seen) == 2 else swap(*given))
    model, _ = make_parted()
    tuned = tune(model, train=6)
    assert not placed(model)
    assert tuned.record.metric_change is None
    assert any("all units together moved the metric by more than" in unit.reason for unit in tuned.record.units)


def test_runs_that_always_end_apart_convert_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = end_runs(monkeypatch, APART)
    model, optimizer = make_parted()
    before = state_of(model, optimizer)
    tuned = tune(model, train=6)
    assert [len(linears) > 0 for linears in seen] == [True, True]
    assert not placed(model)
    assert tuned.conversion is None or not tuned.conversion.converted, "a layout that is free may stay, and it alone"
    assert tuned.record.training_change is None
    assert tuned.record.gradients == "by the score, and by paired runs of 6 steps, which no unit passed"
    assert {unit.way for unit in tuned.record.units} == {"high"}
    assert all("after 6 training steps with it" in unit.reason for unit in tuned.record.units if unit.harm is not None)
    tuned.revert()
    assert same(state_of(model, optimizer), before)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"train": 5, "target": "serve"}, "with target='train'"),
        ({"optimizer": torch.optim.SGD}, "optimizer= needs train="),
        ({"train": -1}, "number of steps"),
        ({"train": 2, "optimizer": lambda parameters: None}, "optimizer= returned NoneType, expected an optimizer"),
    ],
)
def test_paired_runs_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tune(make_trained()[0], **options)


def test_a_step_that_trains_another_model_is_named() -> None:
    model, _ = make_trained()
    with pytest.raises(ValueError, match="does not train the model it is given"):
        loka.tune(model, BATCHES, step=lambda _, batch: loss(model(batch[0]), batch[1]), margin=MARGIN, progress=False, train=2)  # fmt: skip
