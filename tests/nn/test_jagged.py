"""Models over jagged nested tensors: observed, tuned, converted and reverted like any other."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loka
from loka.nn.jagged import dense, on_values
from loka.placing import plan_everything


class History(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(100, 96)
        self.mix = nn.Sequential(nn.Linear(96, 128), nn.SiLU(), nn.Linear(128, 96))
        self.top = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.items(ids)
        return self.top((x + self.mix(x)).to_padded_tensor(0.0).sum(1))


def make_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randint(100, (int(n),), generator=g) for n in torch.randint(1, 9, (32,), generator=g)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged), torch.randint(2, (32, 1), generator=g).float()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output, target, reduction="none").mean(1)


@pytest.fixture
def model() -> History:
    torch.manual_seed(0)
    return History()


def test_a_converted_model_is_near_and_trains(model: History) -> None:
    ids, target = make_batch(0)
    expected = model(ids).detach()
    loss(model(ids), target).mean().backward()
    exact = model.mix[0].weight.grad
    model.zero_grad()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loka.convert(model, recipe="rowwise")
    low = model(ids)
    assert 0 < (low - expected).norm() / expected.norm() < 0.15  # sums of few outputs that nearly cancel
    loss(low, target).mean().backward()
    assert F.cosine_similarity(model.mix[0].weight.grad.flatten(), exact.flatten(), 0) > 0.97
    loka.revert(model)
    assert torch.equal(model(ids), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_tune_converts_what_runs_on_values(model: History) -> None:
    tuned = loka.tune(model, [make_batch(seed) for seed in range(6)], loss)
    ways = {unit.name: unit.way for unit in tuned.record.units}
    assert ways["mix.0"] == "rowwise"
    assert type(model.mix[0]) is not nn.Linear


def test_chains_are_made_of_dense_values_alone(model: History) -> None:
    ids, _ = make_batch(0)
    done = loka.convert(model, plan_everything(model, ids), example=ids)
    assert "mix.0" in str(done)
    assert "it runs on nested tensors" in str(done)
    rows = len(ids.values())
    inside, outside = 2 * rows * 96 * 128, 32 * 96 * 128  # multiplications of one direction
    assert done.low_precision_share == pytest.approx(outside / (inside + outside + 32 * 128), rel=0.01)


def test_probe_sees_the_values(model: History) -> None:
    probe = loka.Probe(model, every=1)
    for seed in range(3):
        ids, target = make_batch(seed)
        loss(model(ids), target).mean().backward()
        probe.step()
    assert "mix.0" in {site.name for site in probe.evaluate().record.sites}


def test_a_quantised_model_takes_them(model: History) -> None:
    ids, _ = make_batch(0)
    model.eval()
    expected = model(ids).detach()
    loka.quantize(model, "rowwise")
    assert 0 < (model(ids) - expected).norm() / expected.norm() < 0.15


def test_lengths_stay_and_other_layouts_are_refused() -> None:
    rows = [torch.ones(2, 8), torch.ones(3, 8)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert (on_values(torch.relu, jagged) + jagged).shape == jagged.shape
    assert dense(rows[0]) is rows[0]
    with pytest.raises(ValueError, match=r"layout torch.strided, expected torch.jagged"):
        dense(torch.nested.nested_tensor(rows, layout=torch.strided))
