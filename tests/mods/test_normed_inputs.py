"""normed_inputs: a frozen chain behind a wide norm normalizes and quantizes in one kernel where it is compiled, and nowhere else."""

import copy

import pytest
import torch
from torch import Tensor, nn

import loka

from .test_narrow_outputs import calls_of
from .zoo import assert_same_state, snapshot

WIDTH = 96


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr("loka.mods.normed_inputs.WIDE", 64)


class Block(nn.Module):
    """A norm in front of a tower; `reads` makes something else read the norm too."""

    def __init__(self, norm: nn.Module, activation: nn.Module, reads: str = "") -> None:
        super().__init__()
        self.enter = nn.Linear(16, WIDTH)
        self.norm, self.activation, self.reads = norm, activation, reads
        self.tower = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.other = nn.Linear(WIDTH, 64) if reads == "linear" else None
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.activation(self.norm(torch.tanh(self.enter(x))))
        y = self.tower(normed)
        if self.other is not None:
            y = y + torch.relu(self.other(normed))
        if self.reads == "sum":
            y = y + normed[..., :64]
        return self.head(y)


def make(norm: nn.Module, activation: nn.Module | None = None, reads: str = "") -> Block:
    torch.manual_seed(0)
    model = Block(norm, nn.Identity() if activation is None else activation, reads)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.eval().requires_grad_(False)


def convert(model: nn.Module, x: Tensor) -> loka.records.Conversion:
    plan = loka.placing.plan_everything(model, x, mods=["normed_inputs"], serving=True)
    return loka.convert(model, plan, example=x, freeze=True)


@pytest.mark.parametrize("shape", [(12, 16), (3, 4, 16)])
@pytest.mark.parametrize("norm", [nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, bias=False)], ids=str)  # fmt: skip
@pytest.mark.parametrize("activation", [nn.Identity(), nn.GELU()], ids=str)
def test_a_compiled_chain_runs_the_norm_before_it(
    norm: nn.Module, activation: nn.Module, shape: tuple[int, ...]
) -> None:
    model, x = make(copy.deepcopy(norm), activation), torch.randn(shape)
    with torch.no_grad():
        expected, before = model(x), snapshot(model)
        convert(model, x)
        eager, (found, calls) = model(x), calls_of(model, x)
        assert not any("norm" in call for call in calls)
        torch.testing.assert_close(found, eager, rtol=0.02, atol=0.02 * float(eager.abs().max()))
        loka.revert(model)
        assert torch.equal(model(x), expected)
    assert_same_state(model, before)


def test_linears_that_read_one_norm_all_run_it() -> None:
    model, x = make(nn.LayerNorm(WIDTH), reads="linear"), torch.randn(12, 16)
    with torch.no_grad():
        convert(model, x)
        assert not any("norm" in call for call in calls_of(model, x)[1])


def test_a_norm_that_something_else_reads_is_left_to_the_compiler() -> None:
    model, x = make(nn.LayerNorm(WIDTH), reads="sum"), torch.randn(12, 16)
    applied = loka.mods.apply(model, "normed_inputs", example=x)
    assert not applied.summary.changed
    loka.mods.revert(model)
    with torch.no_grad():
        convert(model, x)
        assert any("norm" in call for call in calls_of(model, x)[1])


def test_without_a_chain_nothing_changes() -> None:
    model, x = make(nn.LayerNorm(WIDTH)), torch.randn(12, 16)
    with torch.no_grad():
        expected = model(x)
        loka.mods.apply(model, "normed_inputs", example=x)
        assert torch.equal(model(x), expected)
        found, calls = calls_of(model, x)
    torch.testing.assert_close(found, expected)
    assert any("norm" in call for call in calls)


def test_training_is_as_it_was() -> None:
    """With gradients the chain reads what the norm returns, and the norm has its own gradient."""
    x, grads = torch.randn(12, 16), []
    for mods in ([], ["normed_inputs"]):
        model = make(nn.LayerNorm(WIDTH)).train().requires_grad_()
        loka.convert(model, loka.placing.plan_everything(model, x, mods=mods), example=x)
        torch._dynamo.reset()
        torch.compile(model, backend="aot_eager")(x).sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)
