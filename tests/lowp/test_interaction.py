"""A Wukong layer with its interactions fused around its chain: the layer up to FP8, forward and backward; undone; copied; looked at."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from loka.lowp import Guard, GuardConfig
from loka.lowp.interaction import interactions_of, place_interaction, release_interaction
from loka.models import build, configure
from loka.nn import Style
from loka.records import LinkPlan, UnitPlan
from loka.units import place

STYLE = Style(norm="block", activation="hard_swish", bias=False, tower_norm="block")


def make_layer(n: int = 32, dropout: float = 0.0) -> nn.Module:
    """A layer whose tower is a chain."""
    torch.manual_seed(0)
    style = replace(STYLE, dropout=dropout)
    layer = build(configure("wukong", "tiny", n=n, d=16, n_l=16, n_f=16, k=8, hidden=64, style=style)).layers[0]
    links = []
    for i, part in enumerate(layer.fmb.mlp.layers):
        at = f"fmb.mlp.layers.{i}"
        passed = [f"{at}.norm", f"{at}.activation", f"{at}.dropout"]
        links.append(LinkPlan(linear=f"{at}.linear", k=part.linear.in_features, n=part.linear.out_features, norm="block", norm_site=passed[0],
                              activation="hard_swish", passed=passed, eps=1e-6, **({"dropout": dropout, "dropout_site": passed[2]} if dropout else {})))  # fmt: skip
    last = layer.fmb.mlp.last
    links.append(LinkPlan(linear="fmb.mlp.last", k=last.in_features, n=last.out_features))
    place(layer, UnitPlan(name="tower", links=links, scales="bounded", gradient="tensor", bounded_input=True))
    return layer


def make_input(rows: int, n: int, device: torch.device | str = "cpu") -> torch.Tensor:
    x = torch.randn(rows, n, 16, device=device)
    return x / x.square().mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("n", [32, 48])
def test_serving_is_the_layer_up_to_rounding(n: int) -> None:
    layer = make_layer(n)
    x, names, kind = make_input(5, n), list(layer.state_dict()), type(layer)
    with torch.no_grad():
        expected = layer(x)
        place_interaction(layer)
        found = layer(x)
    assert (found - expected).norm() / expected.norm() < 0.05
    assert list(layer.state_dict()) == names
    assert [found for _, found in interactions_of(layer)] == [layer]
    assert "interactions fused" in repr(layer)
    release_interaction(layer)
    assert type(layer) is kind
    with torch.no_grad():
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize(("n", "dropout"), [(32, 0.0), (48, 0.0), (32, 0.4)])
def test_gradients_are_the_layers_up_to_fp8(n: int, dropout: float, device: torch.device) -> None:
    layer = make_layer(n, dropout).to(device)
    twin = copy.deepcopy(layer)
    place_interaction(layer)
    x = make_input(64, n, device)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    goal = torch.randn(64, 32, 16, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):  # the kernels read 16 bits
        torch.manual_seed(1)
        out = layer(mine)
        torch.manual_seed(1)  # the same dropout
        expected = twin(theirs)
    assert (out - expected).norm() / expected.norm() < 0.05
    (out * goal).sum().backward()
    (expected * goal).sum().backward()
    assert (mine.grad - theirs.grad).norm() / theirs.grad.norm() < 0.1
    for (name, a), (_, b) in zip(layer.named_parameters(), twin.named_parameters(), strict=True):
        assert a.grad is not None, name
        assert (a.grad - b.grad).norm() / b.grad.norm() < 0.12, name


def test_compiled_under_autocast_is_eager() -> None:
    torch._dynamo.reset()
    layer = make_layer()
    place_interaction(layer)
    x = torch.randn(8, 32, 16)

    def step(module: nn.Module) -> list[torch.Tensor]:
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        return [p.grad.clone() for p in layer.parameters()]

    eager = step(layer)
    for mine, theirs in zip(step(torch.compile(layer, fullgraph=True, backend="aot_eager")), eager, strict=True):
        assert theirs.any()  # autocast reaches into a compiled backward: the emulation then multiplies in bf16
        assert (mine - theirs).norm() / theirs.norm() < 0.02


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_a_copy(how: str) -> None:
    layer = make_layer()
    place_interaction(layer)
    twin = copy.deepcopy(layer) if how == "deepcopy" else pickle.loads(pickle.dumps(layer))
    x = make_input(5, 32)
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(twin(x), expected)
        twin.fmb.mlp.last.weight.zero_()
        assert not torch.equal(twin(x), expected)
        assert torch.equal(layer(x), expected)


def test_what_it_is_not_for() -> None:
    with pytest.raises(ValueError, match="no children mix"):
        place_interaction(nn.Linear(2, 2))
    plain = build(configure("wukong", "tiny", style=STYLE)).layers[0]
    with pytest.raises(ValueError, match="is not one FP8 chain"):
        place_interaction(plain)
    layer = make_layer()
    layer.norm = nn.LayerNorm(16)
    with pytest.raises(ValueError, match="block_norm mod"):
        place_interaction(layer)
    assert not list(interactions_of(layer))


def test_a_guard_sees_into_it() -> None:
    """The chain runs inside the layer's own node, and is looked at all the same."""
    layer = make_layer()
    place_interaction(layer)
    guard = Guard(layer, GuardConfig(max_error=1e-4, every=1))
    guard.begin_step()
    layer(make_input(16, 32)).sum().backward()
    events = guard.check()
    assert {event.site for event in events} == {"fmb.mlp.layers.0.linear", "fmb.mlp.layers.1.linear", "fmb.mlp.last"}
    assert all("error" in event.reason for event in events)
    assert not list(interactions_of(layer)), "a node around a chain needs all of it"
    layer(make_input(16, 32)).sum().backward()


def test_an_empty_batch_has_a_result_and_gradients_while_somebody_looks() -> None:
    layer = make_layer()
    place_interaction(layer)
    guard = Guard(layer, GuardConfig(every=1))
    guard.begin_step()
    x = make_input(0, 32).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.shape == (0, 32, 16)
    assert x.grad.shape == x.shape
    assert all(p.grad is not None for p in layer.parameters())
    assert guard.check() == []
