"""tune: one call converts, proves, and leaves everything else as it was."""

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import loka
from forked import run_script

from .small import BATCHES, MARGIN, Ranker, loss, make_batches, make_trained, placed, same, state_of, train, tune


def test_converts_and_the_record_says_what_runs() -> None:
    model, _ = make_trained()
    tuned = tune(model)
    record = tuned.record
    assert tuned.model is model
    assert placed(model) == {"first", "second", "third"} == set(tuned.conversion.converted)
    assert {name for unit in record.units if unit.way != "high" for name in unit.linears} == placed(model)
    assert {name for unit in record.units for name in unit.linears} == {"first", "second", "third", "last"}
    assert sum(unit.flops_share for unit in record.units) == pytest.approx(1.0)
    assert record.metric_change.low <= record.metric_change.value <= record.metric_change.high <= MARGIN
    assert record.used_margin == record.margin == MARGIN
    assert record.metric_unit == "examples"
    assert record.speedup is None
    assert "emulated" in record.speed_note
    assert "within 5.00%" in str(tuned)
    assert "prediction layer" in str(tuned)
    assert all(unit.harm is not None and unit.metric_change is not None for unit in record.units if unit.way != "high")


def test_the_change_is_that_of_the_model_it_returns() -> None:
    """On the held-out half, computed here without tune."""
    model, _ = make_trained()

    def mean() -> float:
        model.eval()
        with torch.enable_grad():
            values = torch.cat([loss(model(x), y).detach().double() for x, y in BATCHES[4:]])
        model.train()
        return float(values.mean())

    before = mean()
    tuned = tune(model)
    assert tuned.record.metric == pytest.approx(before, rel=1e-6)
    assert mean() / before - 1 == pytest.approx(tuned.record.metric_change.value, abs=1e-5)


def test_nothing_is_trained() -> None:
    model, optimizer = make_trained()
    model.batch.eval()  # frozen by the user, in a model that trains
    model.second.weight.requires_grad_(False)
    loss(model(BATCHES[0][0]), BATCHES[0][1]).mean().backward()  # gradients that wait for a step
    before, parameters = state_of(model, optimizer), list(model.parameters())
    tuned = tune(model)
    after = state_of(model, optimizer)
    assert placed(model)
    for index, what in enumerate(["values", "gradients", None, None, "optimizer", "random state"]):
        assert what is None or same(after[index], before[index]), what
    assert [(name, mode) for name, mode, _ in after[2]] == [(name, mode) for name, mode, _ in before[2]]
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert tuned.revert() == 3
    assert same(state_of(model, optimizer), before)


def test_a_loader_that_shuffles_leaves_the_random_state() -> None:
    model, _ = make_trained()
    x, target = (torch.cat(parts) for parts in zip(*make_batches(4), strict=True))
    loader = DataLoader(TensorDataset(x, target), batch_size=128, shuffle=True)
    before = torch.get_rng_state()
    loka.tune(model, loader, loss, margin=MARGIN)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_was_converted_trains_on() -> None:
    """As far as the same model in high precision, on what both are trained on."""

    def mean(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            value = torch.cat([loss(model(x), y) for x, y in make_batches(40, seed=3)]).mean()
        model.train()
        return float(value)

    model, _ = make_trained()
    twin, before = copy.deepcopy(model), mean(model)
    tune(model)
    for each in (model, twin):
        torch.manual_seed(4)
        train(each)
    assert mean(model) < 0.95 * before
    assert mean(model) == pytest.approx(mean(twin), rel=0.05)


def test_rewrites_without_low_precision_are_said() -> None:
    """The layout is free and stays; the headline does not pretend that nothing happened."""
    model, _ = make_trained()
    tuned = tune(model, architecture=True, metric=lambda m, b: torch.full((4,), 2.0 if placed(m) else 1.0))
    assert not placed(model)
    assert tuned.record.verdict.startswith("nothing was converted to low precision; rewritten by no_bias")
    assert loka.mods.applied_to(model) == tuple(tuned.plan.mods)
    tuned.revert()
    assert not loka.mods.applied_to(model)


@pytest.mark.parametrize("options", [{}, {"architecture": True}, {"target": "serve"}], ids=str)
def test_a_model_that_was_only_rewritten_is_tuned_again(options: dict[str, Any]) -> None:
    """What the first call has applied or frozen belongs to it: trials of the second do not undo it, and `revert` does."""
    model, _ = make_trained()
    before = state_of(model)
    first = tune(model, **options, metric=lambda m, b: torch.full((4,), 2.0 if placed(m) else 1.0))
    assert first.plan.mods
    assert not placed(model)
    rewritten = state_of(model)
    again = tune(model, target=options.get("target", "train"))
    assert tuple(again.plan.mods) == loka.mods.applied_to(model) == tuple(first.plan.mods)
    assert placed(model) or "target" in options  # nothing is predicted for a model without gradients
    first.revert()
    assert same(state_of(model), before)
    assert not same(before, rewritten)


def test_serving_freezes_and_answers() -> None:
    model, _ = make_trained()
    high = copy.deepcopy(model).eval()
    tuned = tune(model, target="serve")
    assert tuned.conversion.frozen
    assert not model.training
    assert tuned.record.gradients == "none: serving"
    x = BATCHES[-1][0]
    with torch.no_grad():
        found, expected = model(x), high(x)
    assert (found - expected).norm() < 0.1 * expected.norm()
    assert not torch.equal(found, expected)
    # calibrated: an answer does not depend on its neighbours, but for the rounding of the float32 head, whose BLAS kernel may differ with the number of rows
    torch.testing.assert_close(model(x[:5]).detach(), found[:5], rtol=1e-5, atol=1e-5)


def test_a_frozen_model_that_is_reverted_trains_again() -> None:
    model, optimizer = make_trained()
    model.batch.eval()
    model.first.weight.requires_grad_(False)
    before = state_of(model, optimizer)
    tuned = tune(model, target="serve")
    assert not any(p.requires_grad for p in model.parameters())
    assert tuned.revert() == 3
    assert same(state_of(model, optimizer), before)


def test_architecture_mods_are_part_of_the_plan() -> None:
    model, _ = make_trained()
    tuned = tune(model, architecture=True)
    assert {"no_bias", "block_norm"} <= set(tuned.plan.mods)
    assert tuple(tuned.plan.mods) == loka.mods.applied_to(model)
    tuned.revert()
    assert not loka.mods.applied_to(model)
    assert not placed(model)


def test_mods_of_the_user_stay() -> None:
    """A model that was trained with mods is tuned with them, and reverting the conversion does not take them."""
    torch.manual_seed(0)
    model = Ranker()
    loka.mods.apply(model, ["no_bias", "block_norm"], example=BATCHES[0][0])
    train(model)
    before = state_of(model)
    tuned = tune(model)
    assert placed(model)
    assert loka.mods.applied_to(model) == ("no_bias", "block_norm") == tuple(tuned.plan.mods)
    tuned.revert()
    assert loka.mods.applied_to(model) == ("no_bias", "block_norm")
    assert same(state_of(model), before)
    with pytest.raises(ValueError, match="hint: leave architecture out"):
        tune(model, architecture=True)


@pytest.mark.parametrize("options", [{}, {"target": "serve"}, {"architecture": True}], ids=str)
def test_a_saved_plan_gives_the_same_bits_elsewhere(tmp_path: Path, options: dict[str, Any]) -> None:
    model, _ = make_trained()
    twin = copy.deepcopy(model)
    tuned = tune(model, **options)
    tuned.plan.save(tmp_path / "plan.json")
    loka.convert(
        twin, loka.Plan.load(tmp_path / "plan.json"), freeze=options.get("target") == "serve", example=BATCHES[0][0]
    )
    x, y = BATCHES[-1]
    with torch.no_grad():
        assert torch.equal(model.eval()(x), twin.eval()(x))
    if "target" not in options:
        grads = []
        for each in (model.train(), twin.train()):
            torch.manual_seed(5)
            grads.append(torch.autograd.grad(loss(each(x), y).mean(), list(each.parameters())))
        assert same(list(grads[0]), list(grads[1]))


def test_compiled_models() -> None:
    model, _ = make_trained()
    wrapped = torch.compile(model, backend="eager")
    tuned = tune(wrapped)
    assert tuned.model is wrapped
    assert placed(model) == {"first", "second", "third"}
    assert set(tuned.plan.sites[0].site.split(".")) & {"first", "second", "third", "last"}
    assert not any("_orig_mod" in site.site for site in tuned.plan.sites)
    x = BATCHES[0][0]
    with torch.no_grad():
        torch.testing.assert_close(wrapped.eval()(x), model.eval()(x))
    tuned.revert()
    assert not placed(model)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """A process group of one, which outlives the models of the test: where a DDP model is the last to hold it, its end waits for gloo's threads with Python's lock in hand, and they for the lock."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    world = torch.distributed.group.WORLD
    yield world
    gc.collect()
    torch.distributed.destroy_process_group()


def test_ddp_models(group: Any) -> None:
    model, _ = make_trained()
    wrapped = DistributedDataParallel(model)
    tuned = tune(wrapped)
    assert placed(model) == {"first", "second", "third"}
    assert not any(site.site.startswith("module.") for site in tuned.plan.sites)
    x, y = BATCHES[0]
    loss(wrapped(x), y).mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_memory_is_returned(tmp_path: Path) -> None:
    """After tune the process holds what the same conversion from a saved plan holds: within 5 %."""
    import gc

    def live() -> int:
        gc.collect()
        seen = {}
        for thing in gc.get_objects():
            if type(thing) in (Tensor, nn.Parameter):
                storage = thing.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
        return sum(seen.values())

    tune(make_trained()[0])  # what is cached once in a process is nobody's
    before = live()
    model = make_trained()[0]
    tuned = tune(model)
    tuned.plan.save(tmp_path / "plan.json")
    after_tune = live() - before
    del model, tuned
    between = live()
    twin = make_trained()[0]
    loka.convert(twin, loka.Plan.load(tmp_path / "plan.json"), example=BATCHES[0][0])
    after_convert = live() - between
    assert 0 < after_tune <= 1.05 * after_convert


FRESH = """
import sys, torch, loka
sys.path.insert(0, sys.argv[1])
from tuning.small import Ranker
model = Ranker()
model.load_state_dict(torch.load(sys.argv[2]))
done = loka.convert(model, loka.Plan.load(sys.argv[3]), example=torch.load(sys.argv[4]))
kinds = {name: type(module).__mro__[1].__name__ for name, module in model.named_modules()}
torch.save([done.converted, [str(unit.kernels) for unit in done.units], kinds, model.eval()(torch.load(sys.argv[4]))], sys.argv[5])
"""


def test_a_fresh_process_places_the_same_modules_and_kernels(tmp_path: Path) -> None:
    model, _ = make_trained()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.save(BATCHES[0][0], tmp_path / "x.pt")
    tuned = tune(model)
    tuned.plan.save(tmp_path / "plan.json")
    files = [str(tmp_path / name) for name in ("weights.pt", "plan.json", "x.pt", "out.pt")]
    script = tmp_path / "fresh.py"
    script.write_text(FRESH)
    code, said = run_script(script, str(Path(__file__).parents[1]), *files)
    assert code == 0, said
    converted, kernels, kinds, y = torch.load(tmp_path / "out.pt", weights_only=False)
    assert converted == tuned.conversion.converted
    assert kernels == [str(unit.kernels) for unit in tuned.conversion.units]
    assert kinds == {name: type(module).__mro__[1].__name__ for name, module in model.named_modules()}
    assert torch.equal(y, model.eval()(BATCHES[0][0]))
