"""fuse on Wukong: towers and the interactions around them, left where they do not fit, and undone."""

import torch

from loka import mods
from loka.lowp import chain_of, chains_of
from loka.lowp.interaction import interactions_of
from loka.models import build, configure
from loka.nn import Style

STYLE = Style(norm="block", activation="hard_swish", bias=False, tower_norm="block")
SIZES = {"n": 32, "d": 16, "n_l": 16, "n_f": 16, "k": 8, "hidden": 64}


def make(**sizes):
    torch.manual_seed(0)
    return build(configure("wukong", "tiny", **SIZES | sizes, style=STYLE))


def test_layers_are_fused_and_come_back() -> None:
    model, x = make(), torch.randn(6, 32, 16)
    with torch.no_grad():
        expected = model(x)
    keys = list(model.state_dict())
    applied = mods.apply(model, mods.Fuse(), example=x)
    assert [name for name, _ in interactions_of(model)] == ["layers.0", "layers.1"]
    assert chain_of(model.head.layers[0].linear) is not None
    assert "interactions of layers.0 fused around it" in str(applied)
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        found = model(x)
    assert (found - expected).norm() / expected.norm() < 0.5
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    mods.revert(model)
    assert not list(interactions_of(model))
    assert not list(chains_of(model))
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_an_example_too_large_is_a_chain_without_its_interactions() -> None:
    model = make(n=144)
    mods.apply(model, mods.Fuse(), example=torch.randn(2, 144, 16))
    assert [name for name, _ in interactions_of(model)] == ["layers.1"]
    assert chain_of(model.layers[0].fmb.mlp.last) is not None
