"""Batch norms folded into the linears before them, for serving."""

import copy
import io
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import loka
from loka.lowp.chain import chains_of
from loka.lowp.folding import fold
from loka.lowp.witness import StaleWeightWarning


def tower(*, affine: bool = True, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise((64, 96, 80)):
        layers += [nn.Linear(a, b, bias=bias), nn.BatchNorm1d(b, affine=affine), nn.ReLU(), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(80, 64), nn.LayerNorm(64), nn.Linear(64, 1))
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():  # statistics and gains as after training: far from zero and one
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.get_buffer("running_mean"), generator=generator)
            nn.init.uniform_(module.get_buffer("running_var"), 0.2, 4, generator=generator)
            if affine:
                nn.init.uniform_(module.weight, 0.3, 3, generator=generator)
                nn.init.normal_(module.bias, generator=generator)
    return model.eval()


def served(model: nn.Sequential, x: Tensor) -> nn.Sequential:
    plan = loka.placing.plan_everything(model, x, serving=True)
    loka.convert(model, plan, freeze=True)
    return model


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(48, 64)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_fold_is_the_same_function(x: Tensor, affine: bool, bias: bool) -> None:
    model = tower(affine=affine, bias=bias)
    torch.testing.assert_close(nn.functional.linear(x, *fold(model[0], model[1])), model[1](model[0](x)))


def test_a_tower_of_batch_norms_is_one_chain_in_serving_and_none_in_training(x: Tensor) -> None:
    model = tower()
    found = loka.units.discover(model, x, serving=True)
    assert [unit.linears for unit in found.units] == [["0", "4", "8"]]
    assert [link.norm for link in found.units[0].links] == ["batch", "batch", "none"]
    training = loka.units.discover(model.train(), x, linears=64)
    assert [unit.linears for unit in training.units] == [["0"], ["4"], ["8"]]
    assert "normalizes by the batch in training" in training.ends["0"]


def test_a_batch_norm_over_another_dimension_stays_outside() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Flatten(), nn.Linear(4096, 1)).eval()  # fmt: skip
    found = loka.units.discover(model, torch.randn(3, 64, 64), serving=True, linears=64)
    assert found.ends["0"] == "1 (BatchNorm1d) normalizes along another dimension"


def test_served_reverted_and_copied(x: Tensor) -> None:
    model = tower()
    with torch.no_grad():
        before, keys = model(x), list(model.state_dict())
        served(model, x)
        after = model(x)
        [(_, chain)] = chains_of(model)
        torch.testing.assert_close(chain.run_exactly(x), tower()[:9](x))
        assert 0 < distance(after, before) < 0.1
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=False)(x), after)
        assert torch.equal(copy.deepcopy(model)(x), after)
        assert model(x[:0]).shape == (0, 1)
        assert list(model.state_dict()) == keys
        loka.revert(model)
        assert torch.equal(model(x), before)


def test_training_mode_is_refused(x: Tensor) -> None:
    model = served(tower(), x).train()
    with pytest.raises(ValueError, match=r"batch norm after it is folded .* hint: model.eval"):
        model(x)


def test_changes_of_the_statistics_are_noticed(x: Tensor) -> None:
    model, state = served(tower(), x), tower().state_dict()
    with torch.no_grad():
        first = model(x)
        state["1.running_var"] = state["1.running_var"] * 4
        model.load_state_dict(state)
        loaded = model(x)
        assert distance(loaded, first) > 0.05
        plain = tower()
        plain.load_state_dict(state)
        assert distance(loaded, plain(x)) < 0.1
        model[1].running_var.data.mul_(0.25)
        with pytest.warns(StaleWeightWarning, match="0: the weight was changed"):
            again = model(x)
        assert distance(again, first) < 1e-6


def test_a_gradient_passes_where_it_is_not_frozen(x: Tensor) -> None:
    model = tower()
    loka.convert(model, loka.placing.plan_everything(model, x, serving=True))
    model(x).square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    loka.revert(model)
    model.zero_grad()
    model(x).square().mean().backward()
    for name, p in model.named_parameters():
        assert found[name] is not None
        assert p.grad is not None
        if p.grad.norm() > 1e-4:
            assert distance(found[name], p.grad) < 0.35, name


def test_a_file_of_fp8_weights_serves_the_same(x: Tensor, tmp_path: Path) -> None:
    model = tower()
    plan = loka.placing.plan_everything(model, x, serving=True)
    summary = loka.quantize(model, plan)
    with torch.no_grad():
        expected = model(x)
        loka.ptq.save(model, summary, tmp_path / "q.safetensors", dtype=torch.float32)
        again, _ = loka.ptq.load_quantized(tmp_path / "q.safetensors", build=lambda: tower().train())
        assert torch.equal(again(x), expected)


@pytest.mark.parametrize("freeze", [True, False])
def test_a_norm_that_leaves_evaluation_behind_the_back_of_train_is_refused(x: Tensor, freeze: bool) -> None:
    model = tower()
    loka.convert(model, loka.placing.plan_everything(model, x, serving=True), freeze=freeze)
    model[1].training = True
    with torch.no_grad(), pytest.raises(ValueError, match="in training mode"):
        model(x)


def test_another_eps_of_a_folded_norm_is_seen(x: Tensor) -> None:
    model, plain = served(tower(), x), tower()
    model[1].eps = plain[1].eps = 10.0
    with torch.no_grad(), pytest.warns(StaleWeightWarning):
        assert distance(model(x), plain(x)) < 0.1


def test_more_dimensions_than_the_example_are_refused_where_a_batch_norm_would_take_another(x: Tensor) -> None:
    model = served(tower(), x)
    with torch.no_grad(), pytest.raises(ValueError, match="it takes only"):
        model(torch.randn(3, 96, 64))  # the norm itself would normalise the 96 in the middle


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("error::loka.lowp.witness.StaleWeightWarning")
def test_a_frozen_chain_that_is_cast_stays_frozen(x: Tensor, dtype: torch.dtype) -> None:
    model, plain = served(tower(), x).to(dtype), tower().to(dtype)
    with torch.no_grad():
        assert distance(model(x.to(dtype)).float(), plain(x.to(dtype)).float()) < 0.1
    model[1].get_buffer("running_mean").add_(1)
    with torch.no_grad(), pytest.raises(StaleWeightWarning):
        model(x.to(dtype))
