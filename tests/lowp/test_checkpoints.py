"""Activation checkpoints inside a forward: a chain is run again in backward, outside the forward that was converted, and gives the same gradients."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loka
from loka.lowp.chain_handing import AnotherPathError
from loka.placing import plan_everything
from loka.units import discover

W = 64


class Checkpointed(nn.Module):
    """One chain, whose activations are called in one of several spellings, and which is checkpointed or not."""

    def __init__(self, spelling: str, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.out = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, 1)
        self.act, self.drop, self.sequence = nn.GELU(), nn.Dropout(0.1), nn.Sequential(nn.Linear(W, W), nn.ReLU(), nn.Linear(W, W))  # fmt: skip
        self.spelling, self.reentrant = spelling, reentrant

    def part(self, x: Tensor) -> Tensor:
        match self.spelling:
            case "functions":
                return self.c(F.relu(self.b(F.relu(self.a(x)))))
            case "one module":
                return self.c(self.act(self.b(self.act(self.a(x)))))
            case "sequence":  # the activation behind it is called outside of the checkpoint
                return self.sequence(x)
            case "dropout":
                return self.c(self.drop(F.relu(self.b(F.dropout(F.relu(self.a(x)), 0.1, self.training)))))
            case "more behind":  # backward needs tensors that were saved after the chain: all of it is run again
                return self.c(F.gelu(self.b(F.relu(self.a(x))))) * torch.tanh(x * self.c.bias)
            case "last activation":  # called twice it would be another function
                return F.gelu(self.c(F.relu(self.a(x)))) * torch.sigmoid(x * self.out.weight)
            case "in place":
                h = self.a(x)
                h.relu_()
                h = self.c(h)
                h.tanh_()
                return h * torch.sigmoid(x * self.out.weight)
        raise AssertionError(self.spelling)

    def forward(self, x: Tensor) -> Tensor:
        y: Any = self.part(x) if self.reentrant is None else checkpoint(self.part, x, use_reentrant=self.reentrant)
        return self.out(F.relu(y))


def gradients(
    spelling: str, reentrant: bool | None, *, converted: bool = True, elsewhere: bool = False
) -> list[Tensor]:
    """Of two steps on the same batch: the second one starts from what the first has left behind.

    With `elsewhere` backward, which runs the checkpoint again, is in another thread, as it is on a GPU.
    """
    model, x = Checkpointed(spelling, reentrant), torch.randn(128, W, generator=torch.Generator().manual_seed(1))
    if converted:
        loka.convert(model, plan_everything(model, x))
        assert list(loka.lowp.chain.chains_of(model))
    torch.manual_seed(2)
    for _ in range(2):
        model.zero_grad()
        y = model(x.requires_grad_()).sum()
        if elsewhere:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(y.backward).result()
        else:
            y.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


SPELLINGS = ["functions", "one module", "sequence", "dropout", "more behind", "last activation", "in place"]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_checkpoint_inside_a_forward_changes_no_gradient(spelling: str, reentrant: bool) -> None:
    expected, found = gradients(spelling, None), gradients(spelling, reentrant)
    assert len(expected) == len(found)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_checkpoint_may_run_again_in_another_thread(spelling: str) -> None:
    for a, b in zip(gradients(spelling, None), gradients(spelling, False, elsewhere=True), strict=True):
        assert (a - b).norm() < 1e-2 * a.norm()  # another thread may add up in another order


@pytest.mark.parametrize("spelling", [s for s in SPELLINGS if s != "dropout"])  # which draws other numbers in FP8
def test_the_spellings_compute_what_the_model_does(spelling: str) -> None:
    exact, found = gradients(spelling, None, converted=False), gradients(spelling, None)
    for a, b in zip(exact, found, strict=True):
        assert (a - b).norm() < 0.35 * a.norm()


class Begun(nn.Module):
    """The head is called in front of a checkpoint, which begins inside the chain and saves tensors behind it."""

    def __init__(self, begin: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(W, W) for _ in range(3))
        self.norm, self.act, self.begin, self.saves = nn.LayerNorm(W), nn.ReLU(), begin, False

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.begin == "norm":
            return self.run(lambda h: self.rest(F.gelu(self.b(self.act(self.norm(h))))), h)
        h = self.act(self.norm(h))
        if self.begin == "linear":
            return self.run(lambda h: self.rest(F.gelu(self.b(h))), h)
        return self.run(lambda h: self.rest(F.gelu(h)), self.b(h))

    def run(self, part: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
        made: Any = checkpoint(part, h, use_reentrant=False) if self.saves else part(h)
        return made

    def rest(self, h: Tensor) -> Tensor:
        h = torch.sin(self.c(h))
        return h * torch.sigmoid(h)


@pytest.mark.parametrize("put_back", ["", "b", "c"])
@pytest.mark.parametrize("begin", ["norm", "linear", "function"])
def test_a_checkpoint_may_begin_inside_a_chain(begin: str, put_back: str) -> None:
    """What is behind the chain is run again in backward, from what the forward passed on."""
    model, x = Begun(begin), torch.randn(32, W, generator=torch.Generator().manual_seed(1))
    loka.convert(model, plan_everything(model, x))
    assert len(loka.lowp.chain.chain_of(model.a).links) == 3
    model(x).sum().backward()  # scales are known from here on
    if put_back:
        loka.Guard(model).put_back(put_back)
    states, found = copy.deepcopy(loka.scale_state(model)), []
    for model.saves in (False, True):
        loka.load_scale_state(model, states)
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == 8
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Peeking(nn.Module):
    """Returns what stands in front of the activation behind the last linear, where asked."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out, self.peek = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, 1), False

    def forward(self, x: Tensor) -> Any:
        h = self.b(F.relu(self.a(x)))
        seen = 2 * h if self.peek else None
        y = self.out(torch.tanh(h))
        return (y, seen) if self.peek else y


def test_a_value_in_front_of_the_last_activation_cannot_be_read() -> None:
    """The chain has the value behind it alone, and never hands that out as the other one."""
    model, x = Peeking(), torch.randn(32, W)
    loka.convert(model, plan_everything(model, x))
    expected = model(x)
    model.peek = True
    with pytest.raises(AnotherPathError, match="reads a value inside the chain a"):
        model(x)
    with torch.no_grad():
        seen = torch.compile(model, backend="aot_eager")(x)[1]
    assert seen.isnan().all()
    model.peek = False
    assert torch.equal(model(x), expected)


class Cut(nn.Module):
    """Runs the first part of a chain in a block of its own: a checkpoint, or without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out, self.how = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, 1), ""

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "reentrant":
            h: Any = checkpoint(lambda x: F.relu(self.a(x)), x, use_reentrant=True)
        elif self.how == "no_grad":
            with torch.no_grad():
                h = F.relu(self.a(x))
        else:
            h = F.relu(self.a(x))
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.how != "last"):
            h = self.b(h)
        return self.out(torch.tanh(h))


@pytest.mark.parametrize("how", ["reentrant", "no_grad", "last"])
def test_gradients_are_not_lost_where_only_a_part_of_a_chain_has_none(how: str) -> None:
    model, x = Cut(), torch.randn(32, W, requires_grad=True)
    loka.convert(model, plan_everything(model, x.detach()))
    expected = model(x)
    model.how = how
    with pytest.raises(AnotherPathError, match="contains only a part of the chain"):
        model(x)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    model.how = ""
    assert torch.equal(model(x), expected)
    model.requires_grad_(False)  # nothing to lose
    model.how = how
    assert torch.equal(model(x.detach()), expected)


@pytest.mark.parametrize("how", ["no_grad", "last"])
def test_a_chain_ends_where_no_grad_begins_or_ends(how: str) -> None:
    """A frozen tower in front of a trained one is a chain of its own; in serving, without gradients, it need not be."""
    model, x = Cut(), torch.randn(32, W)
    model.how = how
    exact = copy.deepcopy(model)
    assert len(discover(model, x, serving=True).units) == 1
    plan = plan_everything(model, x)
    assert all(p.requires_grad for p in model.parameters())
    assert plan.units[0].linears == ["a"], "b is a chain with the activation behind it, or stands alone without it"
    loka.convert(model, plan)
    for one in (exact, model):
        one(x).sum().backward()
    for a, b in zip(exact.parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or (a.grad - b.grad).norm() < 0.1 * a.grad.norm()


def test_a_last_activation_in_place_leaves_an_ordinary_tensor() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(W, W), nn.Linear(W, W)

        def forward(self, x: Tensor) -> Tensor:
            h = self.b(F.relu(self.a(x)))
            h.relu_()
            return h

    model, x = InPlace(), torch.randn(32, W)
    loka.convert(model, plan_everything(model, x))
    found = model(x)
    assert type(found) is Tensor
    assert len(loka.lowp.chain.chain_of(model.b).links) == 2
    assert found.requires_grad


class Gated(nn.Module):
    """Its gate passes no gradient on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(F.relu(self.a(x)))
        with torch.no_grad():
            gate = torch.sigmoid(h)
        return self.out(x * gate)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_last_activation_without_gradients_has_none(compiled: bool) -> None:
    model, x = Gated(), torch.randn(32, W)
    loka.convert(model, plan_everything(model, x))
    run = torch.compile(model, backend="aot_eager") if compiled else model
    run(x).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["out.weight", "out.bias"]


def test_a_checkpointed_result_may_be_written_to_in_place() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, 1)

        def forward(self, x: Tensor) -> Tensor:
            h: Any = checkpoint(lambda x: self.b(F.relu(self.a(x))), x, use_reentrant=True)
            return self.out(h.tanh_())

    model, x = Written(), torch.randn(32, W, requires_grad=True)
    loka.convert(model, plan_everything(model, x.detach()))
    assert list(loka.lowp.chain.chains_of(model))
    model(x).sum().backward()
    assert model.a.weight.grad is not None
