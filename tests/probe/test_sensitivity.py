"""The effect of a site alone: found where it is, absent where it is not, and the model is left as it was."""

import pytest
import torch
from torch import Tensor, nn

from loka.probe import Probe, add_sensitivity, measure_sensitivity


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
