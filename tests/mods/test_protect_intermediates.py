import pytest
import torch
from torch import nn

import loka
from loka import mods
from loka.nn import MixtureOfExperts

from .zoo import build_family, subject


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_a_prediction_layer_is_computed_in_float32_under_autocast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
    x = torch.randn(16, 32)
    with autocast():
        hidden = model[:2](x)
        assert model(x).dtype == torch.bfloat16
        mods.apply(model, "protect_intermediates", example=x)
        out = model(x)
    assert out.dtype == torch.float32
    assert torch.equal(out, nn.functional.linear(hidden.float(), model[2].weight, model[2].bias))


def test_a_gate_is_computed_in_float32_and_handed_on_as_it_came():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 1))
    x = torch.randn(64, 8)
    mods.apply(model, mods.ProtectIntermediates(kinds=("gate",)), example=x)
    with autocast():
        h = model[0](x)
        gate = model[1](h)
    assert gate.dtype == torch.bfloat16
    assert torch.equal(gate, torch.sigmoid(h.float()).bfloat16())


def test_protected_modules_stay_out_of_conversion_and_probing():
    model, _ = build_family("wukong")
    model.float()
    applied = mods.apply(model, "protect_intermediates")
    assert mods.is_protected(model.head.last)
    assert {c.site for c in applied.summary.changed} == {"layers.0.fmb.product", "layers.1.fmb.product", "head.last"}
    summary = loka.convert(model, recipe="rowwise", module_filter_fn=mods.unprotected)
    assert "head.last" in summary.kept
    assert "head.layers.0.linear" in summary.converted
    loka.revert(model)
    mods.revert(model)
    assert not mods.is_protected(model.head.last)


def test_the_router_of_experts_is_a_gate():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.last = MixtureOfExperts(8, 8, routed=4, top=2), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.experts(x))

    model = Mixed()
    applied = mods.apply(model, "protect_intermediates", example=torch.randn(4, 8))
    kinds = {c.site: c.what.split(":")[0] for c in applied.summary.changed}
    assert kinds == {"experts.router": "gate", "last": "prediction"}


def test_attention_and_products_are_found_by_what_they_do():
    model, inputs = subject("interformer")
    applied = mods.apply(model, "protect_intermediates", example=inputs)
    kinds = {c.site: c.what.split(":")[0] for c in applied.summary.changed}
    assert kinds["layers.0.mha.attention"] == "attention"
    assert kinds["layers.0.backbone.interaction"] == "product"
    assert kinds["summaries.0.x_gate.gate"] == "gate"


def test_a_second_time_changes_nothing():
    model, inputs = subject("gated")
    mods.apply(model, "protect_intermediates", example=inputs)
    again = mods.apply(model, "protect_intermediates", example=inputs)
    assert not again.summary.changed
    assert all(left.why == "it is protected already" for left in again.summary.left)


def test_sixteen_bit_parameters_are_raised_too():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).bfloat16()
    x = torch.randn(4, 8).bfloat16()
    mods.apply(model, "protect_intermediates", example=x)
    assert model(x).dtype == torch.float32


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="choose from prediction, gate, product, attention"):
        mods.ProtectIntermediates(kinds=("everything",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected needed, float32 or bfloat16"):
        mods.ProtectIntermediates(precision="fp8")  # type: ignore[arg-type]
