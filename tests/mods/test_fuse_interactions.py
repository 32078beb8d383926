"""fuse(precision="fp8") on Wukong: towers and the interactions around them, named where they do not fit, and undone."""

import torch

from loka import mods
from loka.lowp import FusedInteraction, FusedTower
from loka.models import build, configure
from loka.nn import Style

STYLE = Style(norm="block", activation="hard_swish", bias=False, tower_norm="block")


def make(**sizes):
    torch.manual_seed(0)
    return build(
        configure(
            "wukong", "tiny", **{"n": 32, "d": 16, "n_l": 16, "n_f": 16, "k": 8, "hidden": 64} | sizes, style=STYLE
        )
    )


def test_layers_are_fused_and_come_back() -> None:
    model = make()
    x = torch.randn(6, 32, 16)
    with torch.no_grad():
        expected = model(x)
    keys = list(model.state_dict())
    applied = mods.apply(model, mods.Fuse(precision="fp8"), example=x)
    assert all(isinstance(layer, FusedInteraction) for layer in model.layers)
    assert isinstance(model.head, FusedTower)
    assert "two kernels forward" in str(applied)
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        found = model(x)
    assert (found - expected).norm() / expected.norm() < 0.5
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    mods.revert(model)
    assert not any(isinstance(m, (FusedInteraction, FusedTower)) for m in model.modules())
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_an_example_too_large_is_left_with_the_reason() -> None:
    model = make(n=144)
    applied = mods.apply(model, mods.Fuse(precision="fp8"), example=torch.randn(2, 144, 16))
    assert not isinstance(model.layers[0], FusedInteraction)
    assert isinstance(model.layers[0].fmb.mlp, FusedTower)
    assert isinstance(model.layers[1], FusedInteraction)
    assert any("at most 128 vectors" in left.why for left in applied.summary.left)
