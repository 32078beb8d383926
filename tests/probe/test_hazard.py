"""Raw columns of a year, a price and a timestamp: the alarm names them, and no GEMM that reads them is called safe."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loka
from loka.probe import Report


class Raw(nn.Module):
    """A linear of raw columns without a bias, then a batch norm, beside ordinary columns."""

    def __init__(self) -> None:
        super().__init__()
        self.raw, self.norm = nn.Linear(3, 16, bias=False), nn.BatchNorm1d(16)
        self.top = nn.Sequential(nn.Linear(16 + 8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.top(torch.cat([torch.relu(self.norm(self.raw(x[:, :3]))), x[:, 3:]], 1)).squeeze(1)


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    z = torch.randn(count, 11, generator=random)
    year, age = 1950 + 50 * torch.rand(count, generator=random), torch.rand(count, generator=random)
    raw = torch.stack([year, torch.exp(2 * z[:, 1]), 1.55e9 + 1.6e8 * age], 1)
    logit = torch.sin((year - 1975) / 12) - 0.7 * z[:, 1] + z[:, 3] + 2 * (age - 0.5)
    return torch.cat([raw, z[:, 3:]], 1), torch.bernoulli(torch.sigmoid(logit), generator=random)


@pytest.fixture(scope="module")
def trained() -> tuple[Raw, Report]:
    torch.manual_seed(0)
    model = Raw()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    probe = loka.Probe(model, every=4, stagger=1)
    for step in range(64):
        x, y = draw(256, step)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(x), y).backward()
        optimizer.step()
        probe.step()
    probe.detach()
    return model.eval(), probe.evaluate(samples=3, sources=("rows",), judged_on=("rows",), gate=False)


def test_the_alarm_names_the_columns_and_what_is_too_coarse(trained: tuple[Raw, Report]) -> None:
    alarms = {a.column: a for s in trained[1].record.sites if s.name == "raw" for a in s.alarms}
    assert sorted(alarms) == [0, 2]
    assert "bf16" in alarms[0].text
    assert "keep this site in float32" in alarms[0].help
    assert not [a for s in trained[1].record.sites if s.name != "raw" for a in s.alarms]


def test_neither_its_product_nor_its_gradient_is_called_safe(trained: tuple[Raw, Report]) -> None:
    verdicts = {(s.name, v.gemm): v for s in trained[1].record.sites for v in s.verdicts}
    assert verdicts["raw", "fprop"].safety == "unsafe"
    assert verdicts["raw", "wgrad"].safety == "unsafe", "a year's gradient beside a timestamp's"
    assert verdicts["top.0", "wgrad"].safety == "safe", "an ordinary site is not refused with it"


def test_a_plan_keeps_the_site_by_name_and_its_output_to_the_bit(trained: tuple[Raw, Report]) -> None:
    model, report = copy.deepcopy(trained[0]), trained[1]
    x = draw(512, 1000)[0]
    wanted = model.raw(x[:, :3])
    done = loka.convert(model, report.plan(min_speedup=None))
    assert "raw" in done.kept
    assert torch.equal(model.raw(x[:, :3]), wanted)


@torch.no_grad()
def test_naive_fp8_is_what_it_is_kept_from(trained: tuple[Raw, Report]) -> None:
    """The test can fail: converted without a plan, the columns' output is mostly error."""
    model = copy.deepcopy(trained[0])
    x = draw(512, 1000)[0]
    wanted = model.norm(model.raw(x[:, :3]))
    loka.convert(model, recipe="rowwise", backend="reference")
    assert float((model.norm(model.raw(x[:, :3])) - wanted).norm() / wanted.norm()) > 0.3
