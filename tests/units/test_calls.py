"""Activations that a forward calls as functions, or that are one module in many places: chains go through them, and notice another path."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loka
from loka.lowp.chain import chains_of
from loka.placing import plan_everything
from loka.units import discover

W = 64
CALLS = {
    "F.relu": lambda x: F.relu(x),
    "in place": lambda x: F.relu(x, inplace=True),
    "method": lambda x: x.relu(),
    "torch.tanh": lambda x: torch.tanh(x),
    "torch.sigmoid": lambda x: torch.sigmoid(x),
    "sigmoid as a method": lambda x: x.sigmoid(),
    "silu": lambda x: F.silu(x),
    "gelu": lambda x: F.gelu(x),
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "leaky by name": lambda x: F.leaky_relu(input=x, negative_slope=0.3),
    "dropout without effect": lambda x: F.dropout(F.relu(x), 0.0),
}


class Called(nn.Module):
    """The way most models are written."""

    def __init__(self, call: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.call, self.skip, self.other = call, False, False
        self.a, self.b, self.c = (nn.Linear(W, W) for _ in range(3))
        self.out = nn.Linear(W, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = CALLS[self.call](self.a(x))
        h = self.b(h)
        if self.other:
            h = torch.cos(h)
        elif not self.skip:
            h = CALLS[self.call](h)
        return self.out(CALLS[self.call](self.c(h)))


class Shared(nn.Module):
    """One activation module for all layers, and one dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.act, self.drop = nn.ReLU(), nn.Dropout(0.5)
        self.layers = nn.ModuleList(nn.Linear(W, W) for _ in range(3))
        self.out = nn.Linear(W, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(self.act(layer(x)))
        return self.out(x) + self.act(x).mean()


def reference(model: nn.Module, x: Tensor) -> Tensor:
    """The same chain by hand: linears and activations of an nn.Sequential, placed by the same plan."""
    acts = {
        "torch.tanh": nn.Tanh, "torch.sigmoid": nn.Sigmoid, "sigmoid as a method": nn.Sigmoid, "silu": nn.SiLU, "gelu": nn.GELU,
        "gelu tanh": lambda: nn.GELU(approximate="tanh"), "leaky": lambda: nn.LeakyReLU(0.2), "leaky by name": lambda: nn.LeakyReLU(0.3),
    }  # fmt: skip
    act = acts.get(model.call, nn.ReLU)
    twin = nn.Sequential(model.a, act(), model.b, act(), model.c, act(), model.out)
    twin = copy.deepcopy(twin)
    loka.convert(twin, plan_everything(twin, x))
    return twin


@pytest.mark.parametrize("call", CALLS)
def test_a_function_is_as_good_as_a_module(call: str) -> None:
    model, x = Called(call), torch.randn(32, W)
    twin = reference(model, x)
    (unit,) = discover(model, x).units
    assert [link.linear for link in unit.links] == ["a", "b", "c"]
    loka.convert(model, plan_everything(model, x))
    for _ in range(2):  # the second time with the scales of the first
        grads = []
        for m in (model, twin):
            m.zero_grad()
            y = m(x)
            y.sum().backward()
            grads.append([y, *(p.grad for p in m.parameters())])
        for ours, theirs in zip(*grads, strict=True):
            assert torch.equal(ours, theirs)
    before = [p.detach().clone() for p in model.parameters()]
    loka.revert(model)
    assert type(model) is Called
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("serving", [False, True])
def test_one_module_in_many_places(serving: bool) -> None:
    model, x = Shared(), torch.randn(32, W)
    model.drop.p = 0.5 if serving else 0.0
    model.train(not serving)
    exact = model(x)
    (unit,) = discover(model, x, serving=serving).units
    assert [link.linear for link in unit.links] == [f"layers.{i}" for i in range(3)]
    plan = plan_everything(model, x, serving=serving)
    loka.convert(model, plan, freeze=serving, example=x)
    with torch.set_grad_enabled(not serving):
        found = model(x)
    assert 0 < float((found - exact).norm() / exact.norm()) < 0.1
    loka.revert(model)
    assert torch.equal(model(x), exact)


@pytest.mark.parametrize(("change", "why"), [("skip", "another path"), ("other", "another path")])
def test_another_path_is_an_error_and_the_next_call_is_right(change: str, why: str) -> None:
    model, x = Called("F.relu"), torch.randn(32, W)
    loka.convert(model, plan_everything(model, x))
    right = model(x).detach()
    setattr(model, change, True)
    with pytest.raises(RuntimeError, match=why):
        model(x)
    setattr(model, change, False)
    assert torch.equal(model(x), right)


def test_a_batch_that_fails_is_no_path() -> None:
    """A loop that skips bad batches goes on with the next one."""

    class Failing(Called):
        bad = False

        def forward(self, x: Tensor) -> Tensor:
            if self.bad:
                self.a(x)
                raise KeyError("bad")
            return super().forward(x)

    model, x = Failing("F.relu"), torch.randn(32, W)
    loka.convert(model, plan_everything(model, x))
    right = model(x).detach()
    model.bad = True
    with pytest.raises(KeyError):
        model(x)
    model.bad = False
    assert torch.equal(model(x), right)


def test_another_activation_is_an_error() -> None:
    model, x = Called("F.relu"), torch.randn(32, W)
    loka.convert(model, plan_everything(model, x))
    model.call = "silu"
    with pytest.raises(RuntimeError, match="silu was called after a, where the chain a has relu"):
        model(x)


def test_it_pickles_copies_and_holds_nothing_after_a_call() -> None:
    model, x = Called("gelu"), torch.randn(32, W)
    loka.convert(model, plan_everything(model, x))
    right = model(x).detach()
    ((_, chain),) = chains_of(model)
    assert chain.pending is None
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for twin in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        assert torch.equal(twin(x), right)
        loka.revert(twin)
        assert type(twin) is Called


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: Called("gelu"), lambda: Called("leaky by name"), Shared])
def test_the_compiler_sees_one_graph_without_the_calls(make) -> None:
    torch._dynamo.reset()
    model, x = make(), torch.randn(32, W)
    if isinstance(model, Shared):
        model.drop.p = 0.0
    loka.convert(model, plan_everything(model, x))
    model(x).sum().backward()
    eager = model(x)
    seen: list[str] = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert torch.equal(compiled(x), eager)
    assert not any("gelu" in name or "leaky" in name for name in seen)
    assert torch.equal(compiled(2 * x), model(2 * x))


class Tail(nn.Module):
    """What stands behind the last linear of its chain is called or not."""

    def __init__(self, tail: nn.Module | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.out, self.tail, self.skip = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, 1), tail, False

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(torch.relu(self.a(x)))
        if not self.skip:
            h = torch.relu(h) if self.tail is None else self.tail(h)
        return self.out(h.view(-1, W))


@pytest.mark.parametrize("tail", [None, nn.ReLU()])
def test_what_is_left_out_behind_the_last_linear_is_an_error(tail: nn.Module | None) -> None:
    """The chain has computed it already. The forward that all of it lies in is asked when it ends."""
    model, x = Tail(tail), torch.randn(32, W)
    loka.convert(model, plan_everything(model, x))
    right = model(x).detach()
    model.skip = True
    with pytest.raises(RuntimeError, match="another path"):
        model(x)
    model.skip = False
    assert torch.equal(model(x), right)


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class _Outer(nn.Module):
    """What stands behind the last linear is called where the block is, not in it."""

    def __init__(self, tail: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.tail, self.out = _Inner(), tail, nn.Linear(W, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.tail(self.block(x)))


@pytest.mark.parametrize("tail", [torch.relu, nn.ReLU()])
def test_a_chain_may_end_outside_of_the_block_that_calls_its_functions(tail: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = _Outer(tail), torch.randn(32, W)
    exact = model(x).detach()
    done = loka.convert(model, plan_everything(model, x))
    assert done.units[0].links[-1].activation == "relu"
    for _ in range(2):
        assert 0 < float((model(x).detach() - exact).norm() / exact.norm()) < 0.2


class _OwnBackward(torch.autograd.Function):
    """A sigmoid with a straight-through gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.sigmoid(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


@torch.jit.script
def _scripted(x: Tensor) -> Tensor:
    return torch.relu(x)


UNSEEN = {
    "an autograd function": _OwnBackward.apply,
    "TorchScript": _scripted,
    "torch.ops": torch.ops.aten.relu,
    "another name": torch.special.expit,
    "hidden by torch.compile": lambda x: torch.relu_(x),
    "F.hardswish": lambda x: F.hardswish(x),
    "F.sigmoid": lambda x: F.sigmoid(x),
    "F.tanh": lambda x: F.tanh(x),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("call", UNSEEN)
def test_an_activation_that_a_chain_would_not_see_ends_it(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that took it in would raise, or compute another gradient than the function's own."""
    monkeypatch.setitem(CALLS, call, UNSEEN[call])
    model, x = Called(call), torch.randn(64, W)
    exact = copy.deepcopy(model)
    found = discover(model, x, linears=W)
    assert [len(unit.links) for unit in found.units] == [1, 1, 1]
    assert {link.activation for unit in found.units for link in unit.links} == {"none"}
    loka.convert(model, plan_everything(model, x, linears=W))
    for one in (model, exact):
        one(x).sum().backward()
    grads = [(a.grad, b.grad) for a, b in zip(exact.parameters(), model.parameters(), strict=True)]
    assert all((a - b).norm() < 0.35 * a.norm() for a, b in grads)


@pytest.mark.parametrize("call", CALLS)
def test_compiled_code_shows_a_chain_every_call_that_it_contains(call: str) -> None:
    """torch.compile hides some functions from function modes. A chain with one of them would raise when compiled."""
    model, x = Called(call), torch.randn(32, W)
    loka.convert(model, plan_everything(model, x))
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="eager")(x), model(x))


def test_a_shared_hardswish_ends_a_chain() -> None:
    """Its forward calls F.hardswish, which compiled code hides."""
    model, x = Shared(), torch.randn(32, W)
    model.act = nn.Hardswish()
    found = discover(model, x, linears=W)
    assert {link.activation for unit in found.units for link in unit.links} == {"none"}
    loka.convert(model, plan_everything(model, x, linears=W))
    torch._dynamo.reset()
    model.eval()
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="eager")(x), model(x))
