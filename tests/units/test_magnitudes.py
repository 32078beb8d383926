"""Magnitudes: the largest values that scales come from, seen while a model runs, and nothing left behind."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.nn import BlockNorm
from loka.units import discover, measuring


class Net(nn.Module):
    """A chain of two with a layer norm between, and a prediction layer."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 1)
        self.norm, self.act = (nn.LayerNorm(96) if norm else nn.Identity()), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.b(self.act(self.norm(self.a(x))))))


def look(model: nn.Module, batches: list[Tensor], *, gradients: bool = True) -> dict[str, tuple[float, float, float]]:
    found = discover(model, batches[0], linears=1)
    with measuring(model, found.units) as seen, torch.set_grad_enabled(gradients):
        for x in batches:
            y = model(x)
            if gradients:
                y.square().sum().backward()
    units = seen.units()
    assert [unit.linears for unit in units] == [unit.linears for unit in found.units]
    return {n: (m.output, m.gradient, m.input) for unit in units for n, m in unit.magnitudes.items()}


def largest(x: Tensor) -> float:
    return float(x.detach().abs().max())


def test_are_the_largest_over_all_batches() -> None:
    model, batches = Net(), [torch.randn(8, 64), 3 * torch.randn(8, 64), torch.randn(8, 64)]
    found = look(model, batches)
    z = [model.a(x) for x in batches]
    second = [model.b(F.relu(each)).detach().requires_grad_() for each in z]
    gradients = [torch.autograd.grad(model.last(F.relu(t)).square().sum(), t)[0] for t in second]
    assert found["a"][0] == pytest.approx(max(map(largest, z)))
    assert found["a"][2] == pytest.approx(max(map(largest, batches)))
    assert found["b"][0] == pytest.approx(max(map(largest, second)))
    assert found["b"][1] == pytest.approx(max(map(largest, gradients)))
    assert found["b"][2] == pytest.approx(max(largest(F.relu(each)) for each in z))
    assert "last" not in found


def test_behind_a_layer_norm_what_is_handed_on_counts() -> None:
    """Its scale is that of the next linear's input, not that of the sums before the norm."""
    model, x = Net(norm=True), torch.randn(16, 64)
    with torch.no_grad():
        model.a.weight.mul_(100)
    found = look(model, [x])
    handed = largest(F.relu(model.norm(model.a(x))))
    units = discover(model, x, linears=1).units
    (link,) = [link for unit in units for link in unit.links if link.linear == "a"]
    if link.norm == "layer":
        assert found["a"][0] == pytest.approx(handed)
        assert found["a"][0] < 0.1 * largest(model.a(x))
    else:  # a norm that ends a chain is outside of it
        assert found["a"][0] == pytest.approx(largest(model.a(x)))


def test_without_gradients_there_are_none() -> None:
    found = look(Net(), [torch.randn(8, 64)], gradients=False)
    assert found["a"][0] > 0
    assert found["a"][1] == 0


def test_what_is_not_finite_leaves_no_trace() -> None:
    model, good = Net(), torch.randn(8, 64)
    bad = good.clone()
    bad[0, 0], bad[1, 1] = float("nan"), float("-inf")
    assert look(model, [good], gradients=False) == look(model, [good, bad], gradients=False)


def test_empty_batches_and_linears_that_are_not_called() -> None:
    model = Net()
    assert look(model, [torch.randn(8, 64), torch.randn(0, 64)])["a"][0] > 0
    found = discover(model, torch.randn(8, 64), linears=1)
    with measuring(model, found.units) as seen:
        pass
    assert all(unit.magnitudes == {} for unit in seen.units())


def test_headroom_is_a_factor_and_hooks_are_gone() -> None:
    model, x = Net(), torch.randn(8, 64)
    found = discover(model, x, linears=1)
    with measuring(model, found.units) as seen:
        model(x).sum().backward()
    once, twice = (seen.units(headroom=h)[0].magnitudes["a"] for h in (1.0, 2.0))
    assert (twice.output, twice.gradient, twice.input) == pytest.approx(
        (2 * once.output, 2 * once.gradient, 2 * once.input)
    )
    assert not any(m._forward_hooks for m in model.modules())
    with pytest.raises(RuntimeError, match="stop"), measuring(model, found.units):
        raise RuntimeError("stop")
    assert not any(m._forward_hooks for m in model.modules())


def test_linears_called_with_a_keyword() -> None:
    """As some libraries write it: there is no positional input to read."""

    class Spoken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.last = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.relu(self.b(input=F.relu(self.a(input=x)))))

    model, x = Spoken(), torch.randn(8, 64)
    units = [u for u in discover(Net(), x, linears=1).units if set(u.linears) <= {"a", "b"}]
    with measuring(model, units) as seen:
        model(x).sum().backward()
    made = {n: m for unit in seen.units() for n, m in unit.magnitudes.items()}
    assert made["a"].input == pytest.approx(largest(x))


def test_with_block_norms_the_sums_before_them_count() -> None:
    """What a block norm hands on is bounded by its width and needs no magnitude; its linear's output is what was seen."""
    model = nn.Sequential(
        nn.Linear(64, 256), BlockNorm(256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    x = torch.randn(16, 64)
    found = discover(model, x)
    with measuring(model, found.units) as seen:
        model(x).sum().backward()
    (unit,) = seen.units()
    assert unit.linears == ["0", "3"]
    assert unit.magnitudes["0"].output == pytest.approx(largest(model[0](x)))
