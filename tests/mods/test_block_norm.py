import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from loka import mods
from loka.nn import BlockNorm

from .zoo import assert_same_state, run, snapshot


def affine_norm(kind: type[nn.Module], width: int) -> nn.Module:
    norm = kind(width).double()
    for p in norm.parameters():
        nn.init.normal_(p, mean=1.0)
    return norm


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 256), st.integers(1, 9), st.integers(1, 4), st.sampled_from([0.0, 0.5]), st.integers(0, 2**31))
def test_an_rms_norm_in_one_block_keeps_its_function(d, outputs, n, dropout, seed):
    """The gain moves into the next linear, also through a flatten and through dropout."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        affine_norm(nn.RMSNorm, d), nn.Dropout(dropout), nn.Flatten(), nn.Linear(n * d, outputs).double()
    )
    x = torch.randn(3, n, d, dtype=torch.float64)
    before, state = run(model, (x,)), snapshot(model)
    applied = mods.apply(model, "block_norm", example=(x,))
    assert isinstance(model[0], BlockNorm)
    assert applied.effect == "rounding"
    torch.testing.assert_close(run(model, (x,)), before, rtol=1e-9, atol=1e-9)
    mods.revert(model)
    assert_same_state(model, state)


@pytest.mark.parametrize(("width", "blocks"), [(100, [100]), (256, [256]), (512, [256, 256]), (600, [256, 256, 88])])
def test_wide_norms_become_blocks_and_a_ragged_tail(width, blocks):
    model = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4))
    applied = mods.apply(model, "block_norm", example=torch.randn(2, width))
    assert applied.effect == "architecture"
    x = torch.randn(5, width)
    parts = [part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() for part in x.split(blocks, -1)]
    torch.testing.assert_close(model[0](x), torch.cat(parts, -1))


def test_a_norm_over_d_of_b_n_d_stays_one_over_d():
    model = nn.Sequential(nn.LayerNorm(8), nn.Flatten(), nn.Linear(24, 1))
    mods.apply(model, "block_norm", example=torch.randn(2, 3, 8))
    assert model[0].width == 8


def test_gain_and_shift_move_so_that_only_the_normalisation_changes():
    torch.manual_seed(0)
    model = nn.Sequential(affine_norm(nn.LayerNorm, 12), nn.Linear(12, 5).double())
    x = torch.randn(7, 12, dtype=torch.float64)
    norm, linear = model[0], model[1]
    expected = (BlockNorm(12)(x) * norm.weight + norm.bias) @ linear.weight.T + linear.bias
    applied = mods.apply(model, "block_norm", example=(x,))
    torch.testing.assert_close(model(x), expected)
    assert "its affine moved into 1" in applied.summary.changed[0].what


class TwoReaders(nn.Module):
    """The norm's output is also added: its gain cannot move."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = affine_norm(nn.RMSNorm, 6), nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return y + self.linear(y)


class Split(nn.Module):
    """Two linears read one norm: the gain moves into both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = affine_norm(nn.RMSNorm, 6), nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return torch.tanh(self.a(y)) + self.b(y)


def test_what_else_reads_a_norm_decides_whether_its_gain_can_move():
    x = torch.randn(3, 6, dtype=torch.float64)
    model = TwoReaders()
    applied = mods.apply(model, "block_norm", example=(x,))
    assert applied.effect == "architecture"
    assert "its gain is dropped (it is also read by add)" in applied.summary.changed[0].what
    model = Split()
    before = run(model, (x,))
    assert mods.apply(model, "block_norm", example=(x,)).effect == "rounding"
    torch.testing.assert_close(run(model, (x,)), before, rtol=1e-9, atol=1e-9)


def test_a_trained_model_reverts_with_a_neutral_gain():
    """After training the linear keeps what it absorbed; the norm comes back as gain 1: the same function."""
    torch.manual_seed(0)
    model = nn.Sequential(affine_norm(nn.RMSNorm, 6), nn.Linear(6, 1).double())
    x = torch.randn(3, 6, dtype=torch.float64)
    mods.apply(model, "block_norm", example=(x,))
    with torch.no_grad():
        model[1].weight.add_(0.1)
    trained = run(model, (x,))
    mods.revert(model)
    assert isinstance(model[0], nn.RMSNorm)
    assert torch.equal(model[0].weight, torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(run(model, (x,)), trained, rtol=1e-9, atol=1e-9)


class OwnRMSNorm(nn.Module):
    """A user's norm: no width anywhere."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_norms_that_cannot_be_replaced_are_refused_with_the_reason():
    model = nn.Sequential(
        nn.BatchNorm1d(6), OwnRMSNorm(), nn.Linear(6, 6), nn.Unflatten(1, (2, 3)), nn.LayerNorm((2, 3))
    )
    applied = mods.apply(model, "block_norm")
    reasons = {left.site: left.why for left in applied.summary.left}
    assert "statistics over the batch" in reasons["0"]
    assert "width of its input is not known" in reasons["1"]
    assert "2 dimensions (2, 3) together" in reasons["4"]
    assert not applied.summary.changed
    applied = mods.apply(model, "block_norm", example=torch.randn(4, 6))
    assert [c.site for c in applied.summary.changed] == ["1"]
    assert model[1].width == 6


def test_a_block_of_one_feature_is_refused():
    with pytest.raises(ValueError, match="keeps only its sign"):
        mods.UseBlockNorm(block=1)


class GemmaRMSNorm(nn.Module):
    """A gain of 1 + weight, so that weights begin at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6) * (1 + self.weight)


class RenamedLayerNorm(nn.Module):
    """Its gain has a name that block_norm does not know, and would be lost."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:]) * self.gamma


class LouderLayerNorm(nn.LayerNorm):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class FailingRMSNorm(nn.RMSNorm):
    """A norm that needs more than rows of features."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[:, :, :1]


@pytest.mark.parametrize("kind", [GemmaRMSNorm, RenamedLayerNorm, LouderLayerNorm, FailingRMSNorm])
def test_a_norm_of_another_formula_is_left(kind):
    """With Gemma's norm the next linear was multiplied by a gain of zeros, and the model was dead."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), kind(512), nn.Linear(512, 4))
    x = torch.randn(8, 3, 64)
    before, state = run(model, (x,)), snapshot(model)
    applied = mods.apply(model, "block_norm", example=(x,))
    assert not applied.summary.changed
    assert kind.__name__ in str(applied)
    assert torch.equal(run(model, (x,)), before)
    assert_same_state(model, state)
