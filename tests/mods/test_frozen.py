"""A forward that decides, draws or is told something keeps doing so after any mod: nothing of the run on the example is frozen into it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka import mods


class Habits(nn.Module):
    """x + f(norm(x)) and norm(act(Wx)) with every habit that a traced forward would lose."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(d), nn.Linear(d, d), nn.Linear(d, d)
        self.first, self.act, self.behind = nn.Linear(d, d), nn.SiLU(), nn.LayerNorm(d)
        self.double = False
        self.depth = 1


class Dropping(Habits):
    def forward(self, x: Tensor) -> Tensor:
        x = self.behind(self.act(self.first(x)))
        return x + F.dropout(self.down(self.up(self.norm(x))), 0.5, self.training)


class Optional(Habits):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.behind(self.act(self.first(x)))
        out = x + self.down(self.up(self.norm(x)))
        return out if scale is None else out * scale


class Flagged(Habits):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.first(x))
        if not self.double:
            h = self.behind(h)
        y = self.norm(h)
        out = h + self.down(self.up(y))
        return out + y if self.double else out


class Counted(Habits):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = x + self.down(self.up(self.norm(x)))
        return x


class Drawing(Habits):
    def forward(self, x: Tensor) -> Tensor:
        x = self.behind(self.act(self.first(x)))
        return x + float(torch.rand(())) * self.down(self.up(self.norm(x)))


class Nested(nn.Module):
    def __init__(self, kind: type[Habits]) -> None:
        super().__init__()
        self.block, self.last = kind(), nn.Linear(8, 16)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.last(self.block(x, *more))


KINDS = [Dropping, Optional, Flagged, Counted, Drawing]
KEEPING = ["protect_residual", "protect_intermediates", "align_shapes", "fuse"]


def outputs(model: Nested, x: Tensor) -> list[Tensor]:
    """Both modes, flags changed, arguments given, with one random state."""
    found = []
    for training in (False, True):
        for double, depth in ((False, 1), (True, 3)):
            model.train(training)
            model.block.double, model.block.depth = double, depth
            torch.manual_seed(3)
            found.append(model(x))
            if isinstance(model.block, Optional):
                found.append(model(x, torch.tensor(3.0)))
    model.block.double, model.block.depth = False, 1
    return [t.detach() for t in found]


def build(kind: type[Habits]) -> tuple[Nested, Tensor]:
    torch.manual_seed(0)
    model = Nested(kind)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    return model, torch.randn(4, 8)


@pytest.mark.parametrize("mod", KEEPING)
@pytest.mark.parametrize("kind", KINDS)
def test_mods_that_keep_the_function_keep_it_on_every_way(kind, mod):
    model, x = build(kind)
    before = outputs(model, x)
    applied = mods.apply(model, mod, example=x)
    assert applied.effect != "architecture"
    for was, now in zip(before, outputs(model, x), strict=True):
        torch.testing.assert_close(now, was, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_residuals_are_protected_whatever_else_the_forward_does(kind):
    model, x = build(kind)
    assert mods.apply(model, "protect_residual", example=x).sites == {"protect_residual": ["block"]}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.block(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("kind", [Dropping, Drawing])
@pytest.mark.parametrize("training", [False, True])
def test_a_moved_norm_stands_beside_a_live_forward(kind, training):
    model, x = build(kind)
    block = model.block
    mods.apply(model, "norm_order", example=x)
    model.train(not training)
    model.train(training)
    torch.manual_seed(5)
    out = block(x)
    torch.manual_seed(5)
    linear = F.linear(x, block.first.weight, block.first.bias)
    h = F.silu(F.layer_norm(linear, (8,), block.behind.weight, block.behind.bias))
    branch = block.down(block.up(block.norm(h)))
    expected = h + (F.dropout(branch, 0.5, training) if kind is Dropping else float(torch.rand(())) * branch)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("order", ["epilogue", "pre", "post"])
@pytest.mark.parametrize("kind", [Optional, Flagged])
def test_a_norm_in_a_forward_with_other_ways_is_left_by_name(kind, order):
    model, x = build(kind)
    before = outputs(model, x)
    applied = mods.apply(model, mods.NormOrder(order), example=x)
    assert not applied.summary.changed
    assert all("branches (if " in left.why for left in applied.summary.left)
    assert applied.summary.left or order == "pre"
    assert all(map(torch.equal, outputs(model, x), before))


def test_a_fold_that_another_way_would_notice_claims_no_exactness():
    """With `double` the norm's output is read beside the linear that its gain moved into."""
    model, x = build(Flagged)
    applied = mods.apply(model, "block_norm", example=x)
    effects = {change.site: change for change in applied.summary.changed}
    assert effects["block.norm"].effect == "architecture"
    assert "branches (if not self.double)" in effects["block.norm"].what
    model, x = build(Drawing)
    applied = mods.apply(model, "block_norm", example=x)
    assert {change.site: change.effect for change in applied.summary.changed}["block.norm"] == "rounding"


class Straight(nn.Module):
    """A straight line to a tracer, cut short by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.depth = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), 3

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.depth]:
            x = layer(x)
        return x


def test_a_chain_is_none_where_an_attribute_decides_its_length():
    model, x = nn.Sequential(Straight()), torch.randn(4, 8)
    applied = mods.apply(model, "fuse", example=x)
    model[0].depth = 1
    assert torch.equal(model(x), model[0].layers[0](x))
    assert not applied.summary.changed
    assert applied.summary.left
