import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from loka import mods
from loka.lowp import FusedProjection, FusedTower
from loka.nn import MLP, BlockNorm, HardSwish, Style

from .zoo import build_family, run, snapshot

MODDED = Style(tower_norm="block", activation="hard_swish", bias=False)


class Holder(nn.Module):
    """A tower behind a norm, and a prediction layer."""

    def __init__(self, tower: nn.Module, width: int, out: int) -> None:
        super().__init__()
        self.norm, self.tower, self.last = BlockNorm(width), tower, nn.Linear(out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.tower(self.norm(x)))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.sampled_from(["none", "layer", "rms", "block"]),
    st.sampled_from(["relu", "silu", "gelu", "hard_swish"]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_fusing_alone_is_exact_forward_and_backward(hidden, norm, activation, bias, seed):
    torch.manual_seed(seed)
    model = Holder(MLP(9, hidden, 7, style=Style(tower_norm=norm, activation=activation, bias=bias)), 9, 7)
    twin, x = copy.deepcopy(model), torch.randn(5, 9)
    applied = mods.apply(model, "fuse", example=x)
    assert [(c.site, c.effect) for c in applied.summary.changed] == [("tower", "exact")]
    assert torch.equal(model(x), twin(x))
    model(x).sum().backward()
    twin(x).sum().backward()
    for (name, a), (other, b) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a.grad, b.grad)


def test_an_fp8_tower_shares_the_parameters_and_stays_close():
    torch.manual_seed(0)
    model = Holder(MLP(64, (256, 256), 32, style=MODDED), 64, 32)
    x, before = torch.randn(32, 64), snapshot(model)
    exact = run(model, (x,))
    parameters = dict(model.named_parameters())
    applied = mods.apply(model, mods.Fuse(precision="fp8"), example=x)
    assert isinstance(model.tower, FusedTower)
    assert model.tower.bounded_input, "the tower follows a BlockNorm"
    assert applied.effect == "rounding"
    assert all(parameters[name] is p for name, p in model.named_parameters())
    fused = run(model, (x,))
    assert not torch.equal(fused, exact)
    torch.testing.assert_close(fused, exact, rtol=0.2, atol=0.1)
    assert mods.is_protected(model.tower.layers[0].linear)
    mods.revert(model)
    assert torch.equal(run(model, (x,)), exact)
    assert list(model.state_dict()) == list(before)


def test_all_core_mods_and_fuse_on_wukong():
    """The line the method is used with; the prediction layer stays as it is."""
    model, inputs = build_family("wukong", norm="layer", tower_norm="layer", activation="silu")
    model.float()
    applied = mods.apply(model, [*mods.CORE, mods.Fuse(precision="fp8")])
    towers = {name for name, m in model.named_modules() if isinstance(m, FusedTower)}
    assert towers == {"layers.0.fmb.mlp", "layers.1.fmb.mlp", "head"}
    assert model.layers[0].fmb.mlp.bounded_input
    assert model.head.links[-1].linear == "layers.1.linear"
    assert torch.isfinite(run(model, (inputs[0].float(),))).all()
    assert sum("FP8 tower" in c.what for c in applied.summary.changed) == 3


def test_what_the_kernels_do_not_know_is_left():
    x = torch.randn(4, 8)
    for tower, why in (
        (MLP(8, (8, 8), 8, style=Style(tower_norm="layer", activation="silu")), "the kernels know BlockNorm"),
        (
            MLP(8, (8, 8), 8, style=Style(tower_norm="block", activation="gelu")),
            "the kernels know relu, silu, hard_swish",
        ),
        (MLP(8, (8, 8), 8, style=Style(activation="relu")), "has no norm behind it"),
        (MLP(8, (8, 8), 8, style=Style(tower_norm="block", dropout=0.1)), "the chain is broken there"),
    ):
        model = Holder(tower, 8, 8)
        applied = mods.apply(model, mods.Fuse(precision="fp8"), example=x)
        assert not applied.summary.changed
        assert why in " ".join(left.why for left in applied.summary.left)


def test_fuse_comes_last():
    model = Holder(MLP(8, (8,), 8, style=MODDED), 8, 8)
    with pytest.raises(ValueError, match="fuse comes last"):
        mods.apply(model, ["fuse", "hard_swish"])
    mods.apply(model, "fuse", example=torch.randn(2, 8))
    with pytest.raises(ValueError, match=r"already fused: tower; mods\.revert"):
        mods.apply(model, "hard_swish")


def test_a_sequential_is_a_chain_too_and_the_model_itself_only_in_high_precision():
    model = nn.Sequential(nn.Linear(8, 8), BlockNorm(8), HardSwish(), nn.Linear(8, 8), nn.Softmax(-1))
    x = torch.randn(3, 8)
    before = model(x)
    assert (
        mods.apply(model, mods.Fuse(precision="fp8"), example=x).summary.left[0].why.startswith("the model is itself")
    )
    applied = mods.apply(model, "fuse", example=x)
    assert applied.summary.changed[0].site == ""
    assert torch.equal(model(x), before)


def test_unknown_precisions_are_refused():
    with pytest.raises(ValueError, match="expected 'high' or 'fp8'"):
        mods.Fuse(precision="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected 'tensor' or 'block'"):
        mods.Fuse(gradient="row")  # type: ignore[arg-type]


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


def test_wide_linears_outside_of_chains_take_their_activation_along():
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(16, 64)
    before, state = model(x).detach(), snapshot(model)
    applied = mods.apply(model, mods.Fuse(precision="fp8", linears=64), example=x)
    assert applied.sites == {"fuse": ["up", "act", "gate", "down"]}
    assert isinstance(model.up, FusedProjection)
    assert model.up.links[0].activation == "silu"
    assert isinstance(model.act, nn.Identity)
    assert (model.up.bounded_input, model.down.bounded_input) == (True, False)
    assert {left.site: left.why for left in applied.summary.left} == {
        "narrow": "64 x 8: narrower than 64",
        "back": "8 x 64: narrower than 64",
    }
    after = model(x)
    assert float((after - before).norm() / before.norm()) < 0.1
    after.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    assert snapshot(model).keys() == state.keys()
    mods.revert(model)
    assert torch.equal(model(x), before)


def test_linears_are_a_matter_of_fp8():
    with pytest.raises(ValueError, match="precision='fp8'"):
        mods.Fuse(linears=256)
    with pytest.raises(ValueError, match="expected a width"):
        mods.Fuse(precision="fp8", linears=-1)


class Pair(nn.Module):
    """Two towers with a norm between them, as `shared` has it read by a residual too."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.norm, self.first = BlockNorm(64), MLP(64, (256,), 256, style=MODDED)
        self.between, self.second = BlockNorm(256), MLP(256, (256,), 512, style=MODDED)
        self.last, self.shared = nn.Linear(512, 1), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(self.norm(x))
        z = self.second(self.between(y))
        return self.last(z + y.repeat(1, 2) if self.shared else z)


def test_a_norm_that_alone_reads_a_tower_runs_inside_it():
    torch.manual_seed(0)
    model, x = Pair(shared=False), torch.randn(32, 64)
    exact, twin = run(model, (x,)), copy.deepcopy(model)
    mods.apply(model, mods.Fuse(precision="fp8", norms=True), example=x)
    assert isinstance(model.between, nn.Identity)
    assert (model.first.links[-1].norm_block, model.first.links[-1].activation) == (256, "none")
    assert model.second.bounded_input, "what reads the norm is still bounded, though the norm runs elsewhere"
    torch.testing.assert_close(run(model, (x,)), exact, rtol=0.2, atol=0.1)
    model.train()(x).sum().backward()
    twin.train()(x).sum().backward()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (a.grad - b.grad).norm() < 0.3 * b.grad.norm(), name
    mods.revert(model)
    assert isinstance(model.between, BlockNorm)
    assert torch.equal(run(model, (x,)), exact)


def test_a_norm_whose_input_others_read_stays_where_it_is():
    model, x = Pair(shared=True), torch.randn(32, 64)
    mods.apply(model, mods.Fuse(precision="fp8", norms=True), example=x)
    assert isinstance(model.between, BlockNorm)
    assert model.first.links[-1].norm_block == 0
    assert model.second.bounded_input


def test_a_norm_moves_only_when_asked_for_and_allowed():
    model, x = Pair(shared=False), torch.randn(32, 64)
    mods.apply(model, mods.Fuse(precision="fp8"), example=x)
    assert isinstance(model.between, BlockNorm)
    model = Pair(shared=False)
    asked = mods.Fuse(precision="fp8", norms=True)
    mods.apply(model, asked, example=x, module_filter_fn=lambda module, name: name != "between")
    assert isinstance(model.between, BlockNorm)
    model = Pair(shared=False)
    model.between.register_forward_hook(lambda module, inputs, output: None)
    mods.apply(model, asked, example=x)
    assert isinstance(model.between, BlockNorm), "somebody watches it"
    with pytest.raises(ValueError, match=r"norms=True, precision='high'"):
        mods.Fuse(norms=True)
