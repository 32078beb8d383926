"""A large mean against a small spread at a raw input is named, with the column and what helps; ordinary inputs raise no alarm."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loka.probe import Probe
from loka.probe.offset import find_offsets


def test_the_worst_columns_are_named_with_their_numbers() -> None:
    torch.manual_seed(0)
    rows = torch.randn(512, 12)
    rows[:, 3] = 40 + torch.randn(512)
    rows[:, 7] = 1.7e9 + 1e6 * torch.randn(512)
    first, second = find_offsets(rows)
    assert (first.column, second.column) == (7, 3)
    assert second.mean == pytest.approx(40, abs=1)
    assert second.spread == pytest.approx(1, rel=0.1)
    assert "standardize" in second.help
    assert "float32" in first.help  # a timestamp: bf16 moves it by months
    assert "float32" not in second.help


@pytest.mark.parametrize("kind", ["normal", "positive", "constant", "small"])
def test_ordinary_columns_raise_none(kind: str) -> None:
    torch.manual_seed(0)
    rows = torch.randn(512, 8)
    if kind == "positive":
        rows = torch.exp(2 * rows)  # a price: skewed, its spread as large as its mean
    elif kind == "constant":
        rows[:, 0] = 1.0
    elif kind == "small":
        rows[:, 0] = 0.1 + 0.001 * rows[:, 0]  # too small to matter beside the others
    assert find_offsets(rows) == []


@pytest.mark.parametrize("bias", [True, False])
def test_a_year_is_unsafe_and_alarming_although_its_error_is_the_smallest(bias: bool) -> None:
    """Before the bias the product is huge, so its relative error is tiny; behind it, or behind a norm, nothing is left of the layer."""
    torch.manual_seed(0)
    first = nn.Linear(16, 64, bias=bias)
    if bias:
        with torch.no_grad():
            first.bias.copy_(-(first.weight[:, 0] * 1975))
    behind: list[nn.Module] = [] if bias else [nn.BatchNorm1d(64)]
    model = nn.Sequential(first, *behind, nn.ReLU(), nn.Linear(64, 1))
    probe = Probe(model, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(3):
        x = torch.cat([1950 + 50 * torch.rand(256, 1), torch.randn(256, 15)], 1)
        loss = F.binary_cross_entropy_with_logits(model(x), (x[:, 1:2] > 0).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.step()
    report = probe.evaluate(samples=5)
    site = report.site("0")
    (verdict,) = [v for v in site.verdicts if v.gemm == "fprop"]
    assert verdict.safety == "unsafe"
    assert [alarm.column for alarm in site.alarms] == [0]
    assert "column 0 of the input has mean 19" in verdict.reason
    assert "standardize" in verdict.reason
    assert any("column 0" in line for line in report.summary())
    assert verdict.suggested_mod is None or "no_bias" not in verdict.suggested_mod
    merits = {s: min(c.mere.value for c in report.site(s).candidates if c.gemm == "fprop" and c.mere) for s in ("0",)}
    assert merits["0"] < 0.05  # what the error of the product alone would have called safe


def test_activations_are_not_raw() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].bias.fill_(1000.0)
    probe = Probe(model, every=1)
    F.binary_cross_entropy_with_logits(model(torch.randn(64, 4)), torch.ones(64, 1)).backward()
    probe.step()
    report = probe.evaluate(samples=2)
    assert report.site("1").alarms == []
