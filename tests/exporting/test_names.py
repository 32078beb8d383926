"""The names of a file's inputs are those that somebody wrote, whatever classes stand in front of the model's own."""

import torch
from torch import nn

import loka
from loka.exporting.signature import name_parameters
from loka.lowp.shared_inputs import SHARED
from loka.placing import plan_everything


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))
        self.gate = nn.Linear(8, 3)

    def forward(self, dense: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        made = torch.stack([expert(wide) for expert in self.experts], 1)
        return torch.einsum("be,bed->bd", self.gate(dense).softmax(-1), made)


def test_names_behind_mods_and_a_frozen_conversion() -> None:
    model, example = Gated().eval(), (torch.randn(40, 8), torch.randn(40, 256))
    plan = plan_everything(model, example, mods=list(loka.mods.FREE), serving=True, linears=256)
    loka.convert(model, plan, example=example, freeze=True)
    assert SHARED in model.__dict__
    assert type(model) is not Gated
    assert name_parameters(model) == ["dense", "wide"]
