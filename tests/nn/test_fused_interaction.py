"""FusedInteraction: a Wukong layer with a fused tower, and itself without gradients."""

import copy

import pytest
import torch
from torch import nn

from loka.models import build, configure
from loka.nn import FusedInteraction, FusedTower, Link, Style

STYLE = Style(norm="block", activation="hard_swish", bias=False, tower_norm="block")


def make_layer(n: int = 32):
    torch.manual_seed(0)
    model = build(configure("wukong", "tiny", n=n, d=16, n_l=16, n_f=16, k=8, hidden=64, style=STYLE))
    layer = model.layers[0]
    links = [Link(f"layers.{i}.linear") for i in range(len(layer.fmb.mlp.layers))] + [Link("last", 0, "none")]
    layer.fmb.mlp = FusedTower.replacing(layer.fmb.mlp, links, bounded_input=True)
    return layer


@pytest.mark.parametrize("n", [32, 48])
def test_serving_is_the_layer_up_to_rounding(n: int) -> None:
    layer = make_layer(n)
    fused = FusedInteraction.replacing(layer)
    x = torch.randn(5, n, 16)
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    with torch.no_grad():
        expected, found = layer(x), fused(x)
    assert (found - expected).norm() / expected.norm() < 0.05
    assert list(fused.state_dict()) == list(layer.state_dict())
    assert fused.restored() is layer


def test_with_gradients_it_is_the_layer_itself() -> None:
    layer = make_layer()
    x = torch.randn(4, 32, 16)
    twin = copy.deepcopy(layer)
    fused = FusedInteraction.replacing(layer)
    fused(x).square().sum().backward()
    twin(x).square().sum().backward()
    for mine, theirs in zip(layer.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_what_it_is_not_for() -> None:
    with pytest.raises(ValueError, match="no children mix"):
        FusedInteraction.replacing(nn.Linear(2, 2))
    plain = build(configure("wukong", "tiny", style=STYLE)).layers[0]
    with pytest.raises(ValueError, match="fuse towers first"):
        FusedInteraction.replacing(plain)
    layer = make_layer()
    layer.norm = nn.LayerNorm(16)
    with pytest.raises(ValueError, match="block_norm mod"):
        FusedInteraction.replacing(layer)
