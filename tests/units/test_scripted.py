"""A model of which TorchScript runs a part: the rest is looked at and converted, and the part is named."""

from pathlib import Path

import pytest
import torch
from torch import nn

import loka
from loka.tuning.looking import describe_unseen_products
from loka.units import discover
from loka.units.undisturbed import undisturbed


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom = torch.jit.script(nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU()))
        self.top = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.bottom(x)).squeeze(-1)


def test_running_it_leaves_no_trace() -> None:
    model = Mixed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with undisturbed(model):
        model(torch.randn(8, 16))
        model.eval()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_the_rest_is_found_and_the_part_is_named() -> None:
    model = Mixed()
    found = discover(model, (torch.randn(8, 16),), linears=1)
    assert "top.0" in {name for unit in found.units for name in unit.linears}
    (note,) = describe_unseen_products(model)
    assert "bottom: TorchScript runs it" in note


def test_the_rest_is_probed_and_converted() -> None:
    model = Mixed()
    x, y = torch.randn(64, 16), torch.randn(64)
    probe = loka.Probe(model, every=1)
    for _ in range(2):
        (model(x) - y).square().mean().backward()
        probe.step()
    assert [part.name for part in probe.evaluate().record.unseen] == ["bottom"]
    probe.detach()
    loka.convert(model, recipe="rowwise", module_filter_fn=lambda module, name: name == "top.2")
    (model(x) - y).square().mean().backward()
    loka.revert(model)
    assert type(model.top[2]) is nn.Linear


def test_an_export_names_what_cannot_be_traced(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bottom is run by TorchScript"):
        loka.export(Mixed().eval(), torch.randn(8, 16), tmp_path / "model.pt2")
