"""Models that take more than one path: what is found holds on all of them, and runs on all of them."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loka
from loka.lowp.chain_handing import AnotherPathError
from loka.units import Steps, discover, place


class Chosen(nn.Module):
    """A shared linear, and a tower that the caller names; both towers use one activation."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.act = nn.Linear(64, 96), nn.ReLU()
        self.towers = nn.ModuleDict({key: nn.ModuleList([nn.Linear(96, 64), nn.Linear(64, 64)]) for key in "ab"})
        self.last = nn.Linear(64, 1)

    def forward(self, x: Tensor, key: str) -> Tensor:
        first, second = self.towers[key]
        return self.last(F.relu(second(self.act(first(F.silu(self.shared(x)))))))


class Skipping(nn.Module):
    """The first linear is left out on one path."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)  # fmt: skip

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        x = x if skip else F.relu(self.first(x))
        return self.last(F.relu(self.third(F.relu(self.second(x)))))


class ByChance(nn.Module):
    """Each of three layers is skipped by chance in training."""

    def __init__(self, draw: Callable[[], float] = lambda: float(torch.rand(()))) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(64, 64), nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.last, self.draw = nn.Linear(64, 1), draw

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        for layer in self.layers:
            if not self.training or self.draw() < 0.5:
                x = F.relu(layer(x))
        return self.last(x)


class Towers(nn.Module):
    """Never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 64))
        self.a, self.b, self.c, self.act = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 64), nn.ReLU()

    def encode(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.b(self.act(self.a(x)))))


X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
CASES: dict[str, tuple[Callable[[], nn.Module], list[Callable[[Any], Tensor]], list[list[str]]]] = {
    "chosen": (
        Chosen, [lambda m: m(X, "a"), lambda m: m(X, "b")],
        [["shared"], ["towers.a.0", "towers.a.1"], ["towers.b.0", "towers.b.1"]],
    ),
    "skipping": (Skipping, [lambda m: m(X, False), lambda m: m(X, True)], [["first"], ["second", "third"]]),
    "called twice in a step": (
        Chosen, [lambda m: m(X, "a") + m(X, "a")], [["shared", "towers.a.0", "towers.a.1"]],
    ),
    "parts": (
        Towers, [lambda m: (m.query(X) * m.encode(X)).sum(1)],
        [["query.0", "query.2"], ["a", "b"]],  # the relu behind b is called by no module
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_found_runs_on_every_path(name: str) -> None:
    torch.manual_seed(0)
    make, runs, expected = CASES[name]
    model = make()
    twin = copy.deepcopy(model)
    found = discover(model, Steps(tuple(lambda run=run: run(model) for run in runs)))
    assert [unit.linears for unit in found.units] == expected
    for unit in found.units:
        place(model, unit)
    for run in [*runs, *runs]:
        got, wanted = run(model), run(twin)
        assert 0 < float((got - wanted).detach().norm() / wanted.detach().norm()) < 0.15
        got.sum().backward()


def test_why_a_chain_ends_is_said() -> None:
    make, runs, _ = CASES["skipping"]
    model = make()
    found = discover(model, Steps(tuple(lambda run=run: run(model) for run in runs)))
    assert found.ends["first"] == "second is called without it on another path"
    make, runs, _ = CASES["parts"]
    model = make()
    found = discover(model, Steps(tuple(lambda run=run: run(model) for run in runs)))
    assert found.ends["b"] == "relu in the step follows it"
    assert found.alone["c"] == found.alone["query.4"] == "it is a prediction layer"


def test_a_probe_keeps_examples_of_several_paths() -> None:
    """A plan with chains from the first sampled call alone would end the run at the second."""
    torch.manual_seed(0)
    model = Chosen()
    probe, optimizer = loka.Probe(model, every=1), torch.optim.SGD(model.parameters(), 0.01)
    for key in "abab":
        model(X, key).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.step()
    found = probe.evaluate(samples=4).record.chains
    assert [unit.linears for unit in found] == CASES["chosen"][2]
    for unit in found:
        place(model, unit)
    for key in "abab":
        model(X, key).square().mean().backward()


def test_layers_skipped_by_chance_are_seen_in_training() -> None:
    """And a chain that was found in eval mode alone says so at once, before anything is differentiated."""
    torch.manual_seed(0)
    model = ByChance()
    state = torch.get_rng_state()
    found = discover(model, Steps(tuple(lambda: model(X) for _ in range(32))))
    assert torch.equal(torch.get_rng_state(), state)
    assert [unit.linears for unit in found.units] == [["first"], ["layers.0"], ["layers.1"], ["layers.2"]]
    (unit,) = discover(model, X, serving=True).units
    assert unit.linears == ["first", "layers.0", "layers.1", "layers.2"]
    place(model, unit)
    torch.manual_seed(1)  # skips the second layer
    with pytest.raises(RuntimeError, match="another path"):
        model(X)


@pytest.mark.parametrize("draw", [random.random, numpy.random.random], ids=["Python", "numpy"])
def test_chance_may_come_from_elsewhere_than_torch(draw: Callable[[], float]) -> None:
    """Recorded with other numbers than it was found with, a path would be another one."""
    numpy.random.seed(0)
    model = ByChance(draw)
    states = random.getstate(), numpy.random.get_state()[1].tolist()
    found = discover(model, Steps(tuple(lambda: model(X) for _ in range(32))))
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states
    assert [unit.linears for unit in found.units] == [["first"], ["layers.0"], ["layers.1"], ["layers.2"]]


def test_nothing_is_compiled_to_look_at_a_model() -> None:
    asked: list[Any] = []
    model = Skipping()
    model.compile(backend=lambda graph, inputs: asked.append(graph) or graph.forward)
    found = discover(model, Steps((lambda: model(X, False),)))
    assert [unit.linears for unit in found.units] == [["first", "second", "third"]]
    assert not asked
    model(X, False)
    assert asked


class Topped(nn.Module):
    """A tower with a head of its own, which are one chain."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower, self.head = tower, nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tower(x))


def test_a_tower_that_another_model_has_too_is_a_chain_of_its_own() -> None:
    """The other model would run this model's head inside of the tower, and not say so."""
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    ranker, x = Topped(tower), torch.randn(32, 64)
    traced = torch.fx.symbolic_trace(ranker)  # holds all of it, and calls all of it
    (alone,) = discover(ranker, x).units
    assert alone.linears == ["tower.0", "tower.2", "head.0"]
    retriever = Topped(tower)
    found = discover(ranker, x)
    assert [unit.linears for unit in found.units] == [["tower.0", "tower.2"], ["head.0"]]
    assert found.ends["tower.2"] == "tower is a part of another model too, a Topped, which calls it without this"
    exact = retriever(x).detach()
    for unit in found.units:
        place(ranker, unit)
    for _ in range(2):
        assert float((retriever(x) - exact).norm() / exact.norm()) < 0.1
        ranker(x)
    loka.revert(ranker)
    assert torch.equal(retriever(x), exact)
    assert torch.equal(traced(x), ranker(x))


class Asked(nn.Module):
    """Returns what is inside of its chain where it is asked for it, or reads it in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor, ask: str = "") -> Any:
        h = self.first(x)
        scale = h.shape[-1] ** -0.5  # of what the linear gives, and not of what the chain does
        assert (h.device, h.dtype, len(h), h.dim()) == (x.device, x.dtype, len(x), x.dim())
        h = F.relu(h.contiguous().to(x.device))
        joined = torch.cat([x, h], 1) if ask == "joined" else None
        y = self.last(torch.tanh(self.second(h) * scale)).squeeze(-1)
        return {"": y, "hidden": (y, h), "joined": (y, joined), "mean": (y, h.mean() if ask == "mean" else None)}[ask]


@pytest.mark.parametrize("ask", ["hidden", "joined", "mean"])
def test_what_is_inside_of_a_chain_is_never_taken_for_its_result(ask: str) -> None:
    """A hidden state that is returned on demand, in a model that was tuned without: its result would have stood in its place."""
    torch.manual_seed(0)
    model, x = Asked(), torch.randn(32, 64)
    exact = model(x).detach()
    (unit,) = [unit for unit in discover(model, x).units if len(unit.links) > 1]
    assert unit.linears == ["first", "second"]
    place(model, unit)
    with pytest.raises(AnotherPathError, match="inside the chain first"):
        model(x, ask)[1].sum()
    found = model(x).detach()  # and the path that was found runs as before
    assert float((found - exact).norm() / exact.norm()) < 0.1
    # a compiled one reads the shape that the linear gives, too, and no result where it asks for what is inside
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), found, rtol=1e-4, atol=1e-6)
    assert bool(compiled(x, ask)[1].isnan().any())
