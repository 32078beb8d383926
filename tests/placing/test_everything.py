"""plan_everything: every chain in FP8 as a plan, without evidence, said so; the model is left as it was."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import loka
from loka.lowp import chains_of
from loka.placing import plan_everything
from mods.zoo import assert_same_state, snapshot


def make() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.LayerNorm(128), nn.SiLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(64, 1),
    )  # fmt: skip
    return model, torch.randn(32, 64)


@pytest.mark.parametrize("serving", [False, True])
@pytest.mark.parametrize("mods", [(), ("no_bias", "block_norm", "hard_swish")], ids=["plain", "mods"])
def test_leaves_the_model_as_it_was(serving: bool, mods: tuple[str, ...]) -> None:
    model, x = make()
    before, modes = snapshot(model), [m.training for m in model.modules()]
    parameters, random = list(model.parameters()), torch.get_rng_state()
    plan = plan_everything(model, x, mods=mods, serving=serving)
    assert_same_state(model, before)
    assert [m.training for m in model.modules()] == modes
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert not loka.mods.applied_to(model)
    assert not any(m._forward_hooks for m in model.modules())
    assert plan.mods == list(mods)
    assert "without measurements" in plan.notes[0]
    assert plan.units


def test_everything_is_placed_and_taken_back() -> None:
    model, x = make()
    high = copy.deepcopy(model).eval()
    plan = plan_everything(model, x, linears=1)
    done = loka.convert(model, plan, example=x)
    assert set(done.converted) == {name for unit in plan.units for name in unit.linears}
    assert {"3", "5"} <= set(done.converted)
    assert "8" not in done.converted
    with torch.no_grad():
        found, expected = model.eval()(x), high(x)
    assert 0 < (found - expected).norm() < 0.2 * expected.norm()
    model.train()(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert loka.revert(model) == len(done.converted)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), expected)


def test_linears_that_stand_alone_are_taken_where_asked() -> None:
    model, x = make()
    few = {name for unit in plan_everything(model, x).units for name in unit.linears}
    more = {name for unit in plan_everything(model, x, linears=1).units for name in unit.linears}
    assert few < more or few == more
    alone = nn.Sequential(nn.Linear(64, 128), nn.Softmax(-1), nn.Linear(128, 1))
    assert not plan_everything(alone, x).units
    assert [unit.linears for unit in plan_everything(alone, x, linears=1).units] == [["0"]]
    assert not plan_everything(alone, x, linears=512).units


@pytest.mark.parametrize("least", [32, 33])
def test_a_linear_too_narrow_for_a_chain_is_taken_where_asked(least: int) -> None:
    model, x = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 1)), torch.randn(16, 64)  # fmt: skip
    done = loka.convert(model, plan_everything(model, x, linears=least), example=x)
    assert list(done.converted) == (["0", "2"] if least == 32 else [])


def test_serving_has_scales_and_freezes(tmp_path: Path) -> None:
    model, x = make()
    plan = plan_everything(model, x, serving=True)
    assert all(unit.magnitudes for unit in plan.units)
    assert all(m.output > 0 and m.gradient == 0 for unit in plan.units for m in unit.magnitudes.values())
    plan.save(tmp_path / "plan.json")
    twin = copy.deepcopy(model)
    done = loka.convert(model, plan, freeze=True, example=x)
    loka.convert(twin, loka.Plan.load(tmp_path / "plan.json"), freeze=True, example=x)
    assert done.frozen
    assert not model.training
    assert list(chains_of(model))
    with torch.no_grad():
        assert torch.equal(model(x), twin(x))


def test_mods_are_applied_by_the_plan() -> None:
    model, x = make()
    plan = plan_everything(model, x, mods=["no_bias", "block_norm"])
    done = loka.convert(model, plan, example=x)
    assert loka.mods.applied_to(model) == ("no_bias", "block_norm")
    assert done.mods == ["no_bias", "block_norm"]
    loka.revert(model, discard=["no_bias", "block_norm"])
    assert not loka.mods.applied_to(model)


def test_wrapped_models_have_plain_names() -> None:
    model, x = make()
    plan = plan_everything(torch.compile(model, backend="eager"), x)
    assert plan.units
    assert not any("_orig_mod" in name for unit in plan.units for name in unit.linears)


def test_a_mod_that_does_not_exist_changes_nothing() -> None:
    model, x = make()
    before = snapshot(model)
    with pytest.raises(ValueError, match="faster_please"):
        plan_everything(model, x, mods=["no_bias", "faster_please"])
    assert_same_state(model, before)
    assert not loka.mods.applied_to(model)
