import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import loka
from loka import mods
from loka.mods.align_shapes import Aligned
from loka.nn import BlockNorm

from .zoo import Shared, run, snapshot, subject

size = st.integers(1, 70)


@settings(max_examples=20, deadline=None)
@given(size, st.integers(9, 70), size, st.booleans(), st.sampled_from([8, 16, 128]), st.integers(0, 2**31))
def test_values_and_gradients_are_exact_over_all_shapes(k, n, rows, bias, multiple, seed):
    """Whole numbers: no rounding can hide a difference, so equality is by bits."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(k, n, bias=bias), nn.ReLU(), nn.Linear(n, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-8, 9, p.shape, generator=generator))
    x = torch.randint(-8, 9, (rows, k), generator=generator).float().requires_grad_()

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        x.grad = None
        out = model(x)
        out.sum().backward()
        return [out.detach(), x.grad.clone(), *(p.grad.clone() for p in model.parameters())]

    before, state = step(), {key: value.clone() for key, value in model.state_dict().items()}
    mods.apply(model, mods.AlignShapes(multiple), example=x.detach())
    assert all(torch.equal(a, b) for a, b in zip(step(), before, strict=True))
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())


def test_a_plain_checkpoint_loads_and_a_wrong_one_is_reported():
    model, inputs = subject("mlp")
    other, _ = subject("mlp")
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.3)
    mods.apply(model, "align_shapes", example=inputs)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(run(model, inputs), run(other, inputs), rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**other.state_dict(), "0.weight": torch.zeros(3, 3)})


def test_an_optimizer_made_before_goes_on_moving_every_layer():
    aligned, inputs = subject("mlp")
    plain, _ = subject("mlp")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.1) for m in (aligned, plain)]
    parameters, start = list(aligned.parameters()), snapshot(aligned)
    mods.apply(aligned, "align_shapes", example=inputs)
    assert all(a is b for a, b in zip(aligned.parameters(), parameters, strict=True))
    for model, optimizer in zip((aligned, plain), optimizers, strict=True):
        for _ in range(3):
            model(*inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in aligned.state_dict().items():
        assert not torch.equal(value, start[name]), name
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-9, atol=1e-9)
    trained = run(aligned, inputs)
    mods.revert(aligned)
    assert type(aligned[0]) is nn.Linear
    torch.testing.assert_close(run(aligned, inputs), trained, rtol=1e-12, atol=1e-12)


def test_aligned_linears_are_probed_converted_and_pickled_under_their_names():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 1))
    x = torch.randn(8, 20)
    before = model(x)
    mods.apply(model, "align_shapes", example=x)
    assert isinstance(model[0], Aligned)
    assert "computed as 32 x 64" in repr(model[0])
    probe = loka.Probe(model, every=1)
    model(x).sum().backward()
    probe.step()
    probe.detach()
    assert {site.name for site in probe.evaluate(["rowwise"], samples=5).record.sites} == {"0", "2"}
    summary = loka.convert(model, recipe="rowwise", module_filter_fn=lambda m, name: name != "2")
    assert list(summary.converted) == ["0"]
    low = model(x)
    torch.testing.assert_close(low, before, rtol=0.2, atol=0.1)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), low)
    loka.revert(model)
    assert isinstance(model[0], Aligned)
    mods.revert(model)
    assert torch.equal(model(x), before)


def test_under_autocast_it_computes_what_autocast_computes():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 9)), torch.randn(8, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = model(x)
        mods.apply(model, "align_shapes", example=x)
        after = model(x)
    assert after.dtype == torch.bfloat16
    torch.testing.assert_close(after, before, rtol=2e-2, atol=2e-2)


def test_tied_weights_are_padded_twice_from_one_parameter():
    model, inputs = Shared(12).double(), (torch.randn(5, 12, dtype=torch.float64),)
    before = run(model, inputs)
    applied = mods.apply(model, "align_shapes", example=inputs)
    assert set(applied.sites["align_shapes"]) == {"twice", "tied"}
    assert model.tied.weight is model.twice.weight
    torch.testing.assert_close(run(model, inputs), before, rtol=1e-12, atol=1e-12)


def test_aligned_chains_are_fused():
    """The kernels of a chain pad by themselves."""
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(100, 150), BlockNorm(150), nn.ReLU(), nn.Linear(150, 96), BlockNorm(96), nn.ReLU())
    model, x = nn.Sequential(tower, nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 1)), torch.randn(8, 100)
    before = model(x).detach()
    applied = mods.apply(model, ["align_shapes", mods.Fuse()], example=x)
    assert applied.sites["align_shapes"] == ["0.0", "0.3"]
    assert applied.sites["fuse"] == ["0.0"]
    assert (model(x).detach() - before).norm() < 0.2 * before.norm()
    mods.revert(model)
    assert torch.equal(model(x), before)


def test_odd_multiples_are_refused():
    with pytest.raises(ValueError, match="multiple of 8"):
        mods.AlignShapes(12)
