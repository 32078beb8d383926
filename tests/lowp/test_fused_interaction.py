"""FusedInteraction: a Wukong layer with a fused tower, and itself without gradients."""

import copy

import pytest
import torch
from torch import nn

from loka.lowp import FusedInteraction, FusedTower, Link
from loka.models import build, configure
from loka.nn import Style

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


@pytest.mark.parametrize("n", [32, 48])
def test_gradients_are_the_layers_up_to_fp8(n: int, device: torch.device) -> None:
    layer = make_layer(n).to(device)
    twin = copy.deepcopy(layer)
    fused = FusedInteraction.replacing(layer)
    x = torch.randn(64, n, 16, device=device)
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    goal = torch.randn(64, 32, 16, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):  # the kernels read 16 bits
        out, expected = fused(mine), twin(theirs)
    assert (out - expected).norm() / expected.norm() < 0.05
    (out * goal).sum().backward()
    (expected * goal).sum().backward()
    assert (mine.grad - theirs.grad).norm() / theirs.grad.norm() < 0.1
    for (name, a), (_, b) in zip(layer.named_parameters(), twin.named_parameters(), strict=True):
        assert a.grad is not None, name
        assert (a.grad - b.grad).norm() / b.grad.norm() < 0.12, name


def test_compiled_under_autocast_is_eager() -> None:
    layer = make_layer()
    fused = FusedInteraction.replacing(layer)
    x = torch.randn(8, 32, 16)

    def step(module: nn.Module) -> list[torch.Tensor]:
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        return [p.grad.clone() for p in layer.parameters()]

    eager = step(fused)
    for mine, theirs in zip(step(torch.compile(fused, fullgraph=True, backend="aot_eager")), eager, strict=True):
        assert theirs.any()  # autocast reaches into a compiled backward: the emulation then multiplies in bf16
        assert (mine - theirs).norm() / theirs.norm() < 0.02


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
