"""The effect of a site alone: found where it is, absent where it is not, and the model is left as it was."""

import pytest
import torch
from torch import Tensor, nn

from loka.formats import Spec, fake_quantize
from loka.probe import Probe, add_sensitivity, measure_sensitivity
from loka.probe.sensitivity import fake_quantized, measure_together, recipes_of


@pytest.fixture
def problem() -> tuple[nn.Module, Tensor]:
    """Two branches: `hard` reads features whose outlier hides what matters, `easy` reads plain ones."""
    torch.manual_seed(0)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hard, self.easy = nn.Linear(8, 1, bias=False), nn.Linear(8, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.hard(x[:, :8]) + self.easy(x[:, 8:])
            return out

    model = Branches()
    x = torch.randn(400, 16)
    x[:, 0] = 3e5  # one channel of `hard`
    model.hard.weight.data[:, 0] = 0.0
    return model, x


def score(model: nn.Module, x: Tensor) -> tuple[Tensor, None]:
    target = x[:, 1:8].sum(1) * 0.5
    return (model(x).reshape(-1) - target).square(), None


def test_the_site_that_hurts_is_found(problem: tuple[nn.Module, Tensor]) -> None:
    model, x = problem
    model.hard.weight.data[:, 1:] = 0.5  # type: ignore[union-attr]
    model.easy.weight.data.fill_(0.3)  # type: ignore[union-attr]
    found = measure_sensitivity(model, ["hard", "easy"], lambda m: score(m, x), recipe="tensorwise")
    assert found["hard"].low > 0.1  # what it says is rounded to multiples of 1.3
    assert abs(found["easy"].value) < 0.05
    assert all(type(module) is nn.Linear for module in (model.hard, model.easy))
    assert model.training


def test_the_model_comes_back_even_when_scoring_fails(problem: tuple[nn.Module, Tensor]) -> None:
    model, x = problem
    calls = []

    def fail_second(m: nn.Module) -> tuple[Tensor, None]:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no luck")
        return score(m, x)

    with pytest.raises(RuntimeError, match="no luck"):
        measure_sensitivity(model, ["hard"], fail_second)
    assert type(model.hard) is nn.Linear
    assert not model.hard._forward_hooks  # type: ignore[union-attr]


def test_it_travels_in_the_report(problem: tuple[nn.Module, Tensor]) -> None:
    model, x = problem
    probe = Probe(model, every=1)
    score(model, x)[0].sum().backward()
    probe.step()
    report = probe.evaluate(["tensorwise"], samples=1)
    found = measure_sensitivity(model, probe.sites, lambda m: score(m, x))
    extended = add_sensitivity(report, found, described="squared error")
    assert extended.record.sensitivity == "squared error"
    assert extended.site("hard").metric_change == found["hard"]


def test_the_hook_is_the_product_of_quantised_operands() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 8), nn.Linear(8, 4, bias=False))
    x = torch.randn(3, 5, 24)
    plain = model[0](x)
    with fake_quantized(model, {"0": "rowwise"}):
        seen = model[0](x)
    spec = Spec.parse("e4m3:row")
    expected = fake_quantize(x.reshape(-1, 24), spec) @ fake_quantize(model[0].weight.detach(), spec).T + model[0].bias
    assert torch.allclose(seen.reshape(-1, 8), expected, atol=1e-5)
    assert torch.equal(model[0](x), plain)


def test_sites_that_are_no_linears_are_refused(problem: tuple[nn.Module, Tensor]) -> None:
    model, _ = problem
    with pytest.raises(ValueError, match="no such module"), fake_quantized(model, {"nowhere": "rowwise"}):
        pass
    with pytest.raises(ValueError, match="it is a Branches"), fake_quantized(model, {"": "rowwise"}):
        pass
    with pytest.raises(ValueError, match="no site"):
        measure_together(model, {}, lambda m: (torch.ones(2), None))


def test_together_is_more_than_one_site_and_no_site_is_nothing(problem: tuple[nn.Module, Tensor]) -> None:
    model, x = problem
    model.hard.weight.data[:, 1:] = 0.5  # type: ignore[union-attr]
    alone = measure_sensitivity(model, ["hard"], lambda m: score(m, x))["hard"]
    both = measure_together(model, dict.fromkeys(("hard", "easy"), "tensorwise"), lambda m: score(m, x))
    assert both.value != alone.value
    assert both.low > 0.1
    kept = measure_together(model, {"hard": "blockwise"}, lambda m: score(m, x))
    assert kept != both


def test_a_metric_of_ones_own_may_grow_or_shrink(problem: tuple[nn.Module, Tensor]) -> None:
    """Recall, say: the share of examples on the right side of a threshold."""
    model, x = problem
    model.hard.weight.data[:, 1:] = 0.5  # type: ignore[union-attr]

    def recall(m: nn.Module) -> tuple[Tensor, Tensor]:
        right = (m(x).reshape(-1) > 0) == (x[:, 1:8].sum(1) > 0)
        return right.float(), torch.arange(len(x)) // 4

    assert measure_together(model, {"hard": "tensorwise"}, recall).value < 0


def test_the_safe_sites_and_their_recipes_come_from_the_report(problem: tuple[nn.Module, Tensor]) -> None:
    model, x = problem
    probe = Probe(model, every=1)
    score(model, x)[0].sum().backward()
    probe.step()
    report = probe.evaluate(["tensorwise", "rowwise"], samples=2)
    best, safe = recipes_of(report, model)
    assert best.keys() == {"hard", "easy"}
    assert "hard" not in safe
    together = measure_together(model, safe or best, lambda m: score(m, x))
    extended = add_sensitivity(
        report, {}, described="squared error", recipes=best, together=together, together_sites=list(safe or best)
    )
    assert extended.record.combined_change == together
    assert extended.site("easy").metric_recipe == best["easy"]
