"""The copula keeps the tails, zeros and skew that a Gaussian loses, and the dependence that independent draws would lose."""

import pytest
import torch
from torch import Tensor, nn

from loka.probe import Probe
from loka.probe.marginals import Marginals, match_ranks


def kurtosis(x: Tensor) -> float:
    centred = (x - x.mean()).double()
    return float(centred.pow(4).mean() / centred.square().mean() ** 2 - 3)


@pytest.fixture(scope="module")
def probe() -> Probe:
    """x with heavy tails, exact zeros, one loud channel, and two channels that move together."""
    g = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8, bias=False))
    probe = Probe(model, every=1, rows=1024)
    for _ in range(8):
        x = torch.randn(2000, 16, generator=g).sinh()  # tails far beyond a Gaussian's
        x[:, 1] = x[:, 0] + 0.1 * torch.randn(2000, generator=g)
        x = torch.where(torch.rand(x.shape, generator=g) < 0.3, torch.zeros(()), x)
        x[:, 1] = torch.where(x[:, 0] == 0, torch.zeros(()), x[:, 1])
        x[:, 5] *= 50
        model(x).sum().backward()
        probe.step()
    return probe


def test_tails_survive_in_the_copula_only(probe: Probe) -> None:
    watch = probe.watch("0")
    drawn = {s: watch.draw("x", s, 4000, torch.Generator().manual_seed(1)) for s in ("rows", "gaussian", "copula")}
    quiet = [c for c in range(16) if c != 5]
    real, gaussian, copula = (kurtosis(drawn[s][:, quiet]) for s in ("rows", "gaussian", "copula"))
    assert real > 10
    assert gaussian < 1
    assert copula == pytest.approx(real, rel=0.3)
    tails = {s: float(x[:, quiet].abs().flatten().quantile(0.999)) for s, x in drawn.items()}
    assert tails["copula"] == pytest.approx(tails["rows"], rel=0.15)
    assert tails["gaussian"] < 0.6 * tails["rows"]


def test_zeros_and_loud_channels_survive(probe: Probe) -> None:
    watch = probe.watch("0")
    rows, copula = (watch.draw("x", s, 4000, torch.Generator().manual_seed(2)) for s in ("rows", "copula"))
    zeros = [float((x == 0).float().mean()) for x in (rows, copula)]
    assert zeros[1] == pytest.approx(zeros[0], abs=0.02)
    torch.testing.assert_close(copula.abs().amax(0), rows.abs().amax(0), rtol=0.7, atol=0)
    assert int(copula.abs().amax(0).argmax()) == 5


def test_dependence_survives(probe: Probe) -> None:
    draws = [
        probe.watch("0").draw("x", source, 1000, torch.Generator().manual_seed(3)) for source in ("rows", "copula")
    ]
    real, copula = (torch.corrcoef(drawn[:, :4].T) for drawn in draws)
    assert float(real[0, 1]) > 0.7
    assert float(copula[0, 1]) == pytest.approx(float(real[0, 1]), abs=0.15)
    assert abs(float(copula[2, 3])) < 0.1


def test_quantiles_are_those_of_the_rows() -> None:
    rows = torch.tensor([[0.0], [1.0], [2.0], [10.0]])
    found = Marginals(rows).apply(torch.tensor([[-9.0], [0.0], [9.0]]))
    assert found.flatten().tolist() == pytest.approx([0.0, 1.5, 10.0])
    with pytest.raises(ValueError, match="two finite rows"):
        Marginals(torch.tensor([[torch.nan], [1.0]]))


def test_a_weight_keeps_its_entries_in_the_order_of_the_sample() -> None:
    sample, actual = torch.tensor([[3.0, 1.0], [2.0, 0.0]]), torch.tensor([[100.0, -5.0], [0.0, 1.0]])
    assert match_ranks(sample, actual).tolist() == [[100.0, 0.0], [1.0, -5.0]]
