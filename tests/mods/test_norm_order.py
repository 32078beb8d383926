import pytest
import torch
from torch import Tensor, nn

from loka import mods

from .zoo import Block, PostBlock, run, snapshot, subject


def test_post_norm_becomes_pre_norm():
    torch.manual_seed(0)
    model = nn.Sequential(PostBlock(6)).double()
    block, x = model[0], torch.randn(3, 6, dtype=torch.float64)
    expected = x + block.down(block.activation(block.up(block.norm(x))))
    keys = list(model.state_dict())
    applied = mods.apply(model, mods.NormOrder("pre"), example=x)
    assert applied.summary.changed[0].what == "now stands before the branch (pre-norm)"
    assert torch.equal(model(x), expected)
    assert list(model.state_dict()) == keys
    assert isinstance(model[0], PostBlock)


def test_pre_norm_becomes_post_norm_and_is_put_back():
    torch.manual_seed(0)
    model = nn.Sequential(Block(6)).double()
    block, x = model[0], torch.randn(3, 6, dtype=torch.float64)
    pre = run(model, (x,))
    expected = block.norm(x + block.down(block.activation(block.up(x))))
    mods.apply(model, mods.NormOrder("post"), example=x)
    assert torch.equal(model(x), expected)
    again = mods.apply(model, [mods.NormOrder("pre"), "block_norm"], example=x)
    assert {left.why.partition(";")[0] for left in again.summary.left if left.site == "0.norm"} == {
        "norm_order has moved it"
    }
    assert torch.equal(model(x), expected)
    mods.revert(model)
    assert type(model[0].norm) is nn.RMSNorm
    assert torch.equal(run(model, (x,)), pre)


def test_the_norm_moves_before_the_activation():
    model, inputs = subject("mlp")
    parts = list(model)
    mods.apply(model, "norm_order", example=inputs)
    (x,) = inputs
    h = parts[2](parts[1](parts[0](x)))
    assert torch.equal(model(x), parts[6](parts[4](parts[5](parts[3](h)))))


def test_training_goes_through_the_moved_norm():
    model, inputs = subject("post-residual")
    mods.apply(model, mods.NormOrder("pre"), example=inputs)
    model(*inputs).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


class Twice(nn.Module):
    """One norm for two sums: moving it for one would move it for both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.a(x))
        return self.norm(x + self.b(x))


class Branches(nn.Module):
    """The path depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.a(x)) if x.sum() > 0 else x


def test_what_cannot_be_moved_safely_is_left_with_the_reason():
    torch.manual_seed(0)
    model = nn.Sequential(Twice(), Branches())
    before = snapshot(model)
    applied = mods.apply(model, mods.NormOrder("pre"), example=torch.rand(2, 4))
    reasons = {left.site: left.why for left in applied.summary.left}
    assert reasons["0.norm"] == "it is used 2 times in this forward"
    assert reasons["1.norm"].startswith(
        "1: its forward branches (if x.sum() > 0), and one run shows one way only; hint:"
    )
    assert not applied.summary.changed
    assert list(model.state_dict()) == list(before)


def test_a_decoder_with_a_step_of_its_own_is_left():
    model, inputs = subject("onerec")
    applied = mods.apply(model, mods.NormOrder("post"), example=inputs)
    assert "other entry points (step)" in {left.site: left.why for left in applied.summary.left}["blocks.0.ffn_norm"]


def test_unknown_orders_are_refused():
    with pytest.raises(ValueError, match="expected 'epilogue', 'pre' or 'post'"):
        mods.NormOrder("sideways")  # type: ignore[arg-type]
