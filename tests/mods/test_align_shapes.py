import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import loka
from loka import mods
from loka.mods.align_shapes import Aligned

from .zoo import run, subject

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
        inner = model[0].inner if isinstance(model[0], Aligned) else model[0]
        grads = [inner.weight.grad[:n, :k]] + ([inner.bias.grad[:n]] if bias else [])
        if inner is not model[0]:
            assert not inner.weight.grad[n:].any()
            assert not inner.weight.grad[:, k:].any()
        return [out.detach(), x.grad.clone(), *(g.clone() for g in grads)]

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


def test_what_is_trained_survives_reverting():
    model, inputs = subject("mlp")
    mods.apply(model, "align_shapes", example=inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        model(*inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    inner = model[0].inner
    assert not inner.weight[24:].any(), "padding must stay zero"
    assert not inner.weight[:, 10:].any()
    trained = run(model, inputs)
    mods.revert(model)
    assert type(model[0]) is nn.Linear
    torch.testing.assert_close(run(model, inputs), trained, rtol=1e-12, atol=1e-12)


def test_conversion_finds_the_aligned_linear():
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 1))
    x = torch.randn(8, 20)
    before = model(x)
    mods.apply(model, "align_shapes", example=x)
    summary = loka.convert(model, recipe="rowwise", module_filter_fn=lambda m, name: name != "2")
    assert list(summary.converted) == ["0.inner"]
    assert (model[0].inner.in_features, model[0].inner.out_features) == (32, 64)
    torch.testing.assert_close(model(x), before, rtol=0.2, atol=0.1)
    loka.revert(model)
    mods.revert(model)
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)


def test_odd_multiples_are_refused():
    with pytest.raises(ValueError, match="multiple of 8"):
        mods.AlignShapes(12)
