"""fuse: every chain in FP8, chosen without evidence; what it leaves it says; undone by revert."""

import copy

import pytest
import torch
from torch import nn

from loka import mods
from loka.lowp import chain_of, chains_of
from loka.nn import MLP, BlockNorm, Style

from .zoo import build_family, run, snapshot

MODDED = Style(tower_norm="block", activation="hard_swish", bias=False)


class Holder(nn.Module):
    """A tower behind a norm, and a prediction layer."""

    def __init__(self, tower: nn.Module, width: int, out: int) -> None:
        super().__init__()
        self.norm, self.tower, self.last = BlockNorm(width), tower, nn.Linear(out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.tower(self.norm(x)))


@pytest.mark.parametrize("norm", ["none", "layer", "rms", "block"])
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "hard_swish"])
def test_a_tower_shares_the_parameters_stays_close_and_comes_back(norm: str, activation: str) -> None:
    torch.manual_seed(0)
    model = Holder(MLP(64, (256, 128), 64, style=Style(tower_norm=norm, activation=activation)), 64, 64)
    x, before = torch.randn(32, 64), snapshot(model)
    exact = run(model, (x,))
    parameters, kinds = dict(model.named_parameters()), [type(m) for m in model.modules()]
    applied = mods.apply(model, mods.Fuse(), example=x)
    assert applied.sites == {"fuse": ["tower.layers.0.linear"]}
    assert applied.effect == "rounding"
    chain = chain_of(model.tower.last)
    assert chain.bounded_input, "the tower follows a BlockNorm"
    assert [link.norm for link in chain.links] == [norm, norm, "none"]
    assert all(parameters[name] is p for name, p in model.named_parameters())
    fused = run(model, (x,))
    assert not torch.equal(fused, exact)
    torch.testing.assert_close(fused, exact, rtol=0.2, atol=0.1)
    mods.revert(model)
    assert torch.equal(run(model, (x,)), exact)
    assert list(model.state_dict()) == list(before)
    assert [type(m) for m in model.modules()] == kinds


def test_all_core_mods_and_fuse_on_wukong() -> None:
    """The line the method is used with; the prediction layer stays as it is."""
    model, inputs = build_family("wukong", norm="layer", tower_norm="layer", activation="silu")
    model.float()
    mods.apply(model, [*mods.CORE, mods.Fuse()], example=(inputs[0].float(),))
    assert [chain.links[-1].linear for _, chain in chains_of(model)][-1] != "head.last"
    assert all(chain.bounded_input for name, chain in chains_of(model) if name.startswith("layers."))
    assert all(link.norm == "block" for _, chain in chains_of(model) for link in chain.links[:-1])
    assert list(chains_of(model))
    assert torch.isfinite(run(model, (inputs[0].float(),))).all()


def test_what_a_chain_cannot_have_is_left_with_the_reason() -> None:
    x = torch.randn(4, 64)
    narrow = Holder(MLP(64, (16, 16), 64, style=MODDED), 64, 64)
    applied = mods.apply(narrow, mods.Fuse(), example=x)
    assert not applied.summary.changed
    assert {left.site: left.why for left in applied.summary.left} == {
        "tower.layers.0.linear": "64 x 16: narrower than 64",
        "tower.layers.1.linear": "16 x 16: narrower than 64",
        "tower.last": "16 x 64: narrower than 64",
        "last": "it is a prediction layer",
    }


def test_a_chain_draws_its_own_dropout_and_is_compared_without() -> None:
    """With it the two models would differ by what they draw, by far more than FP8 does."""
    x = torch.randn(16, 64)
    model = Holder(MLP(64, (64, 64), 64, style=Style(tower_norm="block", dropout=0.8)), 64, 64).train()
    summary = mods.apply(model, mods.Fuse(), example=x).summary
    assert len(summary.changed) == 1, summary
    assert not summary.notes
    ((_, chain),) = chains_of(model)
    assert [link.dropout for link in chain.links] == [0.8, 0.8, None]
    assert not torch.equal(model(x), model(x))  # and draws anew in every call


def test_fuse_comes_last() -> None:
    model, x = Holder(MLP(64, (64,), 64, style=MODDED), 64, 64), torch.randn(8, 64)
    with pytest.raises(ValueError, match="fuse comes last"):
        mods.apply(model, ["fuse", "hard_swish"])
    mods.apply(model, "fuse", example=x)
    with pytest.raises(ValueError, match=r"already fused: tower.layers.0.linear; mods\.revert"):
        mods.apply(model, "hard_swish")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int4"}, "expected 'fp8'"),
        ({"precision": "high"}, "expected 'fp8'"),
        ({"gradient": "row"}, "expected tensor, block, delayed"),
        ({"linears": -1}, "expected a width"),
        ({"narrow": 0}, "expected a width of at least 1"),
    ],
)
def test_unknown_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mods.Fuse(**options)


class Gated(nn.Module):
    """A gated unit behind a norm, a bottleneck beside it, and a prediction layer: linears in no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.gate = BlockNorm(64), nn.Linear(64, 96), nn.SiLU(), nn.Linear(64, 96)
        self.down, self.narrow, self.back, self.last = (
            nn.Linear(*size) for size in ((96, 64), (64, 8), (8, 64), (64, 1))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return self.last(x + self.down(self.act(self.up(h)) * self.gate(h)) + self.back(self.narrow(x)))


def test_wide_linears_outside_of_chains_take_their_activation_along() -> None:
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(16, 64)
    before, state = model(x).detach(), snapshot(model)
    applied = mods.apply(model, mods.Fuse(linears=64), example=x)
    assert applied.sites == {"fuse": ["up", "gate", "down"]}
    chains = dict(chains_of(model))
    assert chains["up"].links[0].activation == "silu"
    assert (chains["up"].bounded_input, chains["down"].bounded_input) == (True, False)
    left = {left.site: left.why for left in applied.summary.left}
    assert left["narrow"] == "64 x 8: narrower than 64"
    assert left["back"] == "8 x 64: narrower than 64"
    after = model(x)
    assert (after - before).norm() < 0.1 * before.norm()
    after.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    assert snapshot(model).keys() == state.keys()
    mods.revert(model)
    assert torch.equal(model(x), before)


def test_gradients_as_asked_for() -> None:
    model, x = Holder(MLP(64, (64,), 64, style=MODDED), 64, 64), torch.randn(8, 64)
    twin = copy.deepcopy(model)
    mods.apply(model, mods.Fuse(gradient="block"), example=x)
    mods.apply(twin, mods.Fuse(), example=x)
    assert next(chains_of(model))[1].precision.gradient == "block"
    assert next(chains_of(twin))[1].precision.gradient == "tensor", "what block norms allow"
