"""feature_layout: a linear between two transposes gives the same values and gradients, whatever calls it, and is taken back."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import loka
from loka import mods

from .zoo import assert_same_state, snapshot


class Compression(nn.Module):
    """How Wukong and DHEN write a mixture of features in plain torch."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.compress, self.norm = nn.Linear(6, 4, bias=bias), nn.LayerNorm(8)
        self.shortcut, self.last = nn.Linear(6, 4, bias=bias), nn.Linear(32, 1)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        small = self.compress(x.transpose(1, 2)).transpose(1, 2)
        side = self.shortcut(x.permute(0, 2, 1)).permute(0, 2, 1)
        return self.last(self.drop(self.norm(small + side)).flatten(1))


class Other(nn.Module):
    """Read otherwise: its output as it is, its input not turned, or turned in two other dimensions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.mix = kind, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:  # [B, 6, 6]
        if self.kind == "output":
            return self.mix(x.transpose(1, 2)).sum(1)
        if self.kind == "both":
            y = self.mix(x.transpose(1, 2))
            return y.transpose(1, 2).sum(1) + y.sum(2)
        if self.kind == "input":
            return self.mix(x + 1).transpose(1, 2).sum(1)
        return self.mix(x.transpose(0, 1).contiguous()).transpose(0, 1).sum(1)


def make(**options: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    return Compression(**options), torch.randn(5, 6, 8)


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(2)  # the same dropout
    x = x.clone().requires_grad_()
    y = model(x)
    grads = torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()])
    return y.detach(), list(grads)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_same_up_to_rounding(bias: bool, training: bool) -> None:
    model, x = make(bias=bias)
    model.train(training)
    expected = step(model, x)
    done = mods.apply(model, "feature_layout", example=x)
    assert {change.site for change in done.summary.changed} == {"compress", "shortcut"}
    assert all(change.effect == "rounding" for change in done.summary.changed)
    model.train(training)
    torch.testing.assert_close(step(model, x), expected, rtol=1e-5, atol=1e-6)


def test_under_autocast() -> None:
    model, x = make()
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model.eval(), x)
        mods.apply(model, "feature_layout", example=x)
        found = step(model, x)
    assert found[0].dtype == expected[0].dtype
    assert [g.dtype for g in found[1]] == [g.dtype for g in expected[1]]
    torch.testing.assert_close(found[0], expected[0], rtol=0.03, atol=0.03)
    for a, b in zip(found[1], expected[1], strict=True):
        assert (a - b).norm() <= 0.03 * b.norm() + 1e-6


def test_compiles_whole() -> None:
    model, x = make()
    mods.apply(model, "feature_layout", example=x)
    model.eval()
    expected = step(model, x)
    torch.testing.assert_close(
        step(torch.compile(model, fullgraph=True, backend="aot_eager"), x), expected, rtol=1e-5, atol=1e-6
    )


def test_reverts_and_keeps_parameters_and_keys() -> None:
    model, x = make()
    before, parameters, kind = snapshot(model), list(model.parameters()), type(model.compress)
    mods.apply(model, "feature_layout", example=x)
    assert_same_state(model, before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    out = model.eval()(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), out)
        mods.revert(twin)
        assert type(twin.compress) is kind
    mods.revert(model)
    assert type(model.compress) is kind
    assert_same_state(model, before)


@pytest.mark.parametrize("kind", ["output", "both", "input", "batch"])
def test_what_is_read_otherwise_is_left(kind: str) -> None:
    model, x = Other(kind), torch.randn(6, 6, 6)
    expected = model(x)
    done = mods.apply(model, "feature_layout", example=x)
    assert not done.summary.changed
    assert torch.equal(model(x), expected)


def test_calls_that_the_example_did_not_show() -> None:
    """Without a batch, with one more dimension, on an empty batch, and from somewhere else."""
    model, x = make()
    mods.apply(model, "feature_layout", example=x)
    linear, plain = model.compress, nn.Linear(6, 4)
    plain.load_state_dict(linear.state_dict())
    for shape in [(6,), (3, 6), (2, 3, 6), (2, 3, 4, 6), (0, 3, 6)]:
        given = torch.randn(shape)
        torch.testing.assert_close(linear(given), plain(given), rtol=1e-5, atol=1e-6)


def test_without_an_example_nothing_is_guessed() -> None:
    model, _ = make()
    done = mods.apply(model, "feature_layout")
    assert not done.summary.changed
    assert "not known" in done.summary.left[0].why


def test_frozen_weights_get_no_gradient() -> None:
    model, x = make()
    model.compress.weight.requires_grad_(False)
    mods.apply(model, "feature_layout", example=x)
    model(x).sum().backward()
    assert model.compress.weight.grad is None
    assert model.shortcut.weight.grad is not None


def test_features_that_are_written_to_afterwards_are_left() -> None:
    """Backward would read what was written: torch itself keeps the transposed copy that this mod avoids."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = x * 1.0
            mixed = self.mix(y.transpose(1, 2)).transpose(1, 2)
            y.mul_(2.0)
            return y * mixed

    torch.manual_seed(0)
    model, x = Written(), torch.randn(5, 6, 4)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    done = mods.apply(model, "feature_layout", example=x)
    assert "written to in place afterwards" in str(done)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x).square().sum(), list(model.parameters())), expected)


def test_what_converts_says_who_rewrote_a_linear() -> None:
    """It is an `nn.Linear` in the user's code: "a forward of its own" would name nothing that they can find there."""
    model, x = make()
    mods.apply(model, [mods.parse("feature_layout")], example=x)
    done = loka.convert(model, recipe="rowwise")
    assert list(done.converted) == ["last"]
    assert {done.kept[name].partition(":")[0] for name in ("compress", "shortcut")} == {
        "rewritten by the mod feature_layout"
    }
