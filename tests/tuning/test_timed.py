"""What tune does where steps can be timed, on a clock in the place of a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loka
from loka.lowp.chain_handing import AnotherPathError
from loka.lowp.chain_modules import chains_of
from loka.records import Interval
from loka.tuning import comparing, metric
from loka.tuning.fragment import Fragment

from .clock import Clock
from .small import BATCHES, loss, make_trained, placed, same, state_of, tune

CHAIN = "first"  # the one of the small ranker: first, second, third


class TwoTowers(nn.Module):
    """Two chains that meet in a product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.item = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.query(x)) * torch.tanh(self.item(x))).mean(-1)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square()


def taken_apart(tuned: loka.tuning.Tuned) -> set[str]:
    """Linears that run by themselves because their chain met another path."""
    return {unit.name for unit in tuned.record.units if unit.way == "rowwise" and "another path" in unit.reason}


@pytest.mark.parametrize("target", ["train", "serve"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_the_model_is_timed_and_left_as_it_was(target: Any, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batch norm, its counter of calls and the random numbers included: every replay moves them on."""
    clock = Clock(monkeypatch)
    model, optimizer = make_trained()
    model.train(training)
    before = state_of(model, optimizer)
    tuned = tune(model, target=target)
    assert tuned.speedup == Interval(value=100 / 60, low=100 / 60, high=100 / 60)
    assert placed(model) == {"first", "second", "third"}
    tuned.revert()
    assert same(state_of(model, optimizer), before)
    # 16 bits too are timed as they are served, or trained
    assert model in clock.captured
    assert all(modes == {target == "train"} for modes in clock.modes)


def test_an_interrupt_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, (model, optimizer) = Clock(monkeypatch), make_trained()
    before = state_of(model, optimizer)

    def interrupt(captured: nn.Module, given: Any) -> None:
        if len(clock.captured) > 4:  # the whole step with the chain in it
            assert chains_of(captured)
            raise KeyboardInterrupt

    clock.fail = interrupt
    with pytest.raises(KeyboardInterrupt):
        tune(model, out=tmp_path)
    assert same(state_of(model, optimizer), before)
    fragments = sum(isinstance(found, Fragment) for found in clock.captured)
    clock.fail = lambda captured, given: None
    tuned = tune(model, out=tmp_path)  # and goes on: the unit is not timed again
    assert sum(isinstance(found, Fragment) for found in clock.captured) == fragments
    assert tuned.speedup is not None
    assert "resumed from the evidence of an earlier call" in tuned.record.notes


def test_evidence_of_another_computing_type_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, (model, _) = Clock(monkeypatch), make_trained()
    for autocast in (None, torch.bfloat16):
        clock.captured.clear()
        tune(model, out=tmp_path, autocast=autocast).revert()
        assert any(isinstance(found, Fragment) for found in clock.captured)


def test_a_step_that_fails_with_units_in_converts_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, (model, _) = Clock(monkeypatch), make_trained()

    def fail(captured: nn.Module, given: Any) -> None:
        if not isinstance(captured, Fragment) and list(chains_of(captured)):
            raise SyntaxError("ptxas failed")  # of no kind that torch's errors share

    clock.fail = fail
    tuned = tune(model)
    assert not placed(model)
    kept = {unit.name: unit.reason for unit in tuned.record.units}
    assert kept[CHAIN].endswith("the whole step fails when it is timed: SyntaxError: ptxas failed")
    clock.fail = lambda captured, given: (_ for _ in ()).throw(torch.OutOfMemoryError("full"))  # says nothing of FP8
    with pytest.raises(torch.OutOfMemoryError):
        tune(model)


def test_a_model_that_does_not_compile_is_tuned_untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, (model, _) = Clock(monkeypatch), make_trained()

    def fail(captured: nn.Module, given: Any) -> None:
        if not isinstance(captured, Fragment):
            raise SyntaxError("unexpected indent")

    clock.fail = fail
    tuned = tune(model)
    assert tuned.speedup is None
    assert tuned.record.speed_note == "the step cannot be compiled: SyntaxError: unexpected indent"
    with pytest.raises(RuntimeError, match="mat1 and mat2"):  # the model's own error is raised as it is
        tune(make_trained()[0], [(x[:, :60], y) for x, y in BATCHES])


def test_a_way_to_compile_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, (model, _) = Clock(monkeypatch, **{"loka coordinate descent": 50.0}), make_trained()

    def fail(captured: nn.Module, given: Any) -> None:
        if "mode" in given and given["mode"] is not None:
            raise SyntaxError("no configuration fits")

    clock.fail = fail
    tuned = tune(model, thorough=True)
    assert set(tuned.record.step_microseconds) == {"bf16", "bf16 coordinate descent", "bf16 layout", "bf16 layout coordinate descent", "loka", "loka coordinate descent"}  # fmt: skip
    assert tuned.speedup is not None
    assert tuned.speedup.value == 2.0
    said = [note for note in tuned.record.notes if "no configuration fits" in note]
    assert [note.partition(" was not timed")[0] for note in said] == ["bf16 max-autotune", "bf16 layout max-autotune", "loka max-autotune"]  # fmt: skip


def test_a_chain_that_meets_another_path_where_it_is_timed_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, (model, _) = Clock(monkeypatch), make_trained()

    def meet(captured: nn.Module, given: Any) -> None:
        if not isinstance(captured, Fragment) and list(chains_of(captured)):
            raise AnotherPathError("elsewhere", CHAIN)

    clock.fail = meet
    tuned = tune(model)
    assert taken_apart(tuned) == placed(model) == {"first", "second", "third"}
    assert tuned.speedup is not None  # of what runs in the end
    assert all(unit.metric_change is not None for unit in tuned.record.units if unit.way == "rowwise")


def test_a_chain_that_meets_another_path_in_training_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    model, _ = make_trained()
    train = comparing._train

    def meet(task: Any, *given: Any) -> None:
        if list(chains_of(task.model)):
            raise AnotherPathError("elsewhere", CHAIN)
        train(task, *given)

    monkeypatch.setattr(comparing, "_train", meet)
    tuned = tune(model, train=2)
    assert taken_apart(tuned) == placed(model) == {"first", "second", "third"}
    assert tuned.record.training_change is not None


def test_a_chain_that_meets_another_path_beside_others_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    model, swap = TwoTowers(), metric.swap_all

    def meet(call: Any, selection: Any, offers: list[Any]) -> Interval:
        if len(offers) > 1 and any(offer.name == "item.0" and offer.way == "chain" for offer in offers):
            raise AnotherPathError("elsewhere", "item.0")
        return swap(call, selection, offers)

    monkeypatch.setattr(metric, "swap_all", meet)
    tuned = tune(model, BATCHES, squares, margin=0.5)
    assert taken_apart(tuned) == {"item.0", "item.2"}
    assert {name for name, _ in chains_of(model)} == {"query.0"}


def test_a_unit_is_timed_in_its_own_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's first parameter is a table of another one."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Parameter(torch.ones(4, 64, dtype=torch.float16))
            self.first, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.second(F.relu(self.first(x * self.table[0].float()))))).squeeze(-1)

    Clock(monkeypatch)
    tuned = tune(Mixed(), BATCHES, loss, margin=0.5)
    assert not [unit.reason for unit in tuned.record.units if "fails when it is timed" in unit.reason]
    assert tuned.plan.units


def test_a_unit_that_is_frozen_is_timed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight of it has a gradient, and one of the same shape that trains takes another time."""
    clock, model = Clock(monkeypatch), TwoTowers()
    model.item.requires_grad_(False)
    tuned = tune(model, BATCHES, squares, margin=0.5)
    assert {unit.name for unit in tuned.plan.units} == {"query.0", "item.0"}
    fragments = [found for found in clock.captured if isinstance(found, Fragment)]
    assert len(fragments) == 4  # each in 16 bits and in FP8


def test_rewrites_that_make_the_step_slower_leave_with_the_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is never slower than the model that was given."""
    Clock(monkeypatch, **{"bf16 layout": 120.0, "loka": 110.0})
    model, optimizer = make_trained()
    before = state_of(model, optimizer)
    tuned = tune(model)
    assert (tuned.plan.mods, tuned.conversion) == ([], None)
    assert "makes the step 0.83x as fast: nothing is converted" in str(tuned.record.speed_note)
    assert same(state_of(model, optimizer), before)


@pytest.mark.parametrize("asked", ["architecture", "before"])
def test_rewrites_that_were_asked_for_stay(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, **{"bf16 layout": 120.0, "loka": 110.0})
    model, _ = make_trained()
    if asked == "before":
        loka.mods.apply(model, [loka.mods.parse("narrow_outputs")], example=BATCHES[0][0])
    tuned = tune(model, architecture=asked == "architecture")
    assert "narrow_outputs" in tuned.plan.mods
    assert tuned.speedup is not None  # and it is said what they cost
    assert tuned.speedup.value == pytest.approx(100 / 120)


def test_rewrites_are_compiled_in_every_way_that_the_original_is(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"bf16 max-autotune": 50.0, "bf16 layout max-autotune": 40.0, "loka": 60.0}
    Clock(monkeypatch, **times)
    tuned = tune(make_trained()[0], thorough=True)
    assert not tuned.plan.units
    assert tuned.plan.mods
    assert tuned.speedup is not None
    assert tuned.speedup.value == 1.25
    assert any('mode="max-autotune-no-cudagraphs"' in note for note in tuned.record.notes)


def test_rewrites_that_do_not_compile_leave_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, (model, _) = Clock(monkeypatch), make_trained()

    def fail(captured: nn.Module, given: Any) -> None:
        if loka.mods.applied_to(captured):
            raise SyntaxError("unexpected indent")

    clock.fail = fail
    tuned = tune(model)
    assert tuned.conversion is None
    assert tuned.record.speed_note == "rewritten by narrow_outputs, the whole step fails when it is timed: SyntaxError: unexpected indent: nothing is converted"  # fmt: skip


def test_a_step_that_is_in_no_graph_takes_as_long_as_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is faster in FP8, and the host slower: in a graph that is converted, with a note; launched kernel by kernel it is not, unless the launch is faster too."""
    clock = Clock(monkeypatch)
    clock.host = lambda model: 150.0 if placed(model) else 50.0
    captured = tune(make_trained()[0])
    assert captured.speedup is not None
    assert captured.speedup.value == pytest.approx(100 / 60)
    assert any("cuda_graph=False" in note for note in captured.record.notes)
    model = make_trained()[0]
    launched = tune(model, cuda_graph=False)
    assert not placed(model)
    assert any("launched kernel by kernel; hint: cuda_graph=True" in unit.reason for unit in launched.record.units)
    clock.host = lambda model: 80.0 if placed(model) else 50.0
    launched = tune(make_trained()[0], cuda_graph=False)
    assert launched.speedup is not None
    assert launched.speedup.value == pytest.approx(100 / 80)
    assert any("since cuda_graph=False" in note for note in launched.record.notes)
    assert not any("this speed-up is for steps in CUDA graphs" in note for note in launched.record.notes)
