"""narrow_outputs: the same values and gradients compiled, nn.Linear's own bits in eager mode, wide linears left."""

import pytest
import torch
from torch import nn

from loka import mods

from .zoo import assert_same_state, snapshot


@pytest.fixture(autouse=True)
def _compile_anew() -> None:
    torch._dynamo.reset()  # one forward is compiled in many ways here


def make(outputs: int, *, bias: bool = True, width: int = 24) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, width), nn.LayerNorm(width), nn.SiLU(), nn.Linear(width, outputs, bias=bias))


def step(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = x.clone().requires_grad_()
    y = model(x)
    return y.detach(), list(torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()]))


@pytest.mark.parametrize("shape", [(7, 8), (3, 2, 8)])
@pytest.mark.parametrize(("outputs", "bias"), [(1, True), (3, True), (4, False)])
def test_compiled_as_sums_and_eager_as_it_was(outputs: int, bias: bool, shape: tuple[int, ...]) -> None:
    model, x = make(outputs, bias=bias), torch.randn(shape)
    expected, before = step(model, x), snapshot(model)
    done = mods.apply(model, "narrow_outputs", example=x)
    assert [change.site for change in done.summary.changed] == ["3"]
    for found, wanted in zip(step(model, x)[1], expected[1], strict=True):
        assert torch.equal(found, wanted)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(step(compiled, x), expected, rtol=1e-5, atol=1e-6)
    mods.revert(model)
    assert_same_state(model, before)


def test_under_autocast_it_computes_in_that_type() -> None:
    model, x = make(2), torch.randn(6, 8)
    mods.apply(model, "narrow_outputs", example=x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = model(x), compiled(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("outputs", [6, 21])
def test_a_gate_is_padded_to_what_a_gemm_wants(outputs: int) -> None:
    model, x, padded = make(outputs, width=256), torch.randn(7, 8), -(-outputs // 8) * 8
    expected, before = step(model, x), snapshot(model)
    done = mods.apply(model, "narrow_outputs", example=x)
    assert [change.site for change in done.summary.changed] == ["3"]
    assert f"computed as 256 x {padded}" in repr(model[3])
    for found, wanted in zip(step(model, x)[1], expected[1], strict=True):
        assert torch.equal(found, wanted)  # in eager mode it is the linear that it was
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(step(compiled, x), expected, rtol=1e-5, atol=1e-5)
    assert compiled(x).is_contiguous()
    mods.revert(model)
    assert_same_state(model, before)


def test_wide_and_parametrised_linears_are_left() -> None:
    model = nn.Sequential(
        nn.Linear(8, 260),  # no multiple of eight, and what follows neither
        nn.Linear(260, 13),
        nn.Linear(13, 256),
        nn.Linear(256, 64),
        nn.Linear(64, 5),
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 1)),
    )
    done = mods.apply(model, "narrow_outputs", example=torch.randn(2, 8))
    assert not done.summary.changed
    assert "parametrised" in done.summary.left[0].why or "more than" in done.summary.left[0].why


def test_a_head_over_a_concatenation_is_left() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.last = nn.Linear(8, 6), nn.Linear(8, 5), nn.Linear(11, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.cat([self.a(x), self.b(x)], 1))

    done = mods.apply(Joined(), "narrow_outputs", example=torch.randn(2, 8))
    assert not done.summary.changed
    assert "reads a concatenation" in done.summary.left[0].why


def test_float64_stays_float64() -> None:
    """Sums are in float32, which is not enough for it."""
    torch.manual_seed(0)
    model, x = make(2).double(), torch.randn(32, 8, dtype=torch.float64)
    expected = step(model, x)
    mods.apply(model, "narrow_outputs", example=x)
    found = step(torch.compile(model, backend="aot_eager"), x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
