"""FusedProjection: the linear and activation it replaces, up to FP8 rounding; its gradients, eager and compiled; its names."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.formats import Spec, fake_quantize
from loka.lowp import TowerPrecision, freeze
from loka.lowp.fused_projection import FusedProjection
from loka.nn import BlockNorm

TENSOR, ROW, STATIC = (Spec.parse(f"e4m3:{text}") for text in ("tensor", "row", "tensor:static"))
ACTIVATIONS = {"none": lambda z: z, "silu": F.silu, "hard_swish": F.hardswish, "relu": F.relu}


def make(width: int = 70, out: int = 48, *, bias: bool = False, **options) -> tuple[nn.Linear, FusedProjection]:
    torch.manual_seed(0)
    linear = nn.Linear(width, out, bias=bias)
    return linear, FusedProjection.of(linear, **options)


def emulate(linear: nn.Linear, x: Tensor, activation: str, spec: Spec) -> Tensor:
    scale = torch.tensor(1 / 16) if spec is STATIC else None
    z = fake_quantize(x, spec, scale=scale) @ fake_quantize(linear.weight.detach(), TENSOR).T
    return ACTIVATIONS[activation](z if linear.bias is None else z + linear.bias)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm().detach() / b.norm().detach())


@pytest.mark.parametrize("epilogue", [True, False])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("bias", [False, True])
def test_forward_is_the_linear_with_fp8_rounding(activation: str, bias: bool, epilogue: bool) -> None:
    linear, fused = make(bias=bias, activation=activation, epilogue=epilogue)
    x = torch.randn(5, 7, 70)
    expected = emulate(linear, x.flatten(0, 1), activation, TENSOR).view(5, 7, 48)
    torch.testing.assert_close(fused(x), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():  # in inference every row has its scale
        torch.testing.assert_close(
            fused(x), emulate(linear, x.flatten(0, 1), activation, ROW).view(5, 7, 48), rtol=1e-4, atol=1e-4
        )


def test_a_bounded_input_has_the_static_scale() -> None:
    linear, fused = make(activation="silu", bounded_input=True)
    x = BlockNorm(70)(torch.randn(9, 70))
    expected = emulate(linear, x, "silu", STATIC)
    torch.testing.assert_close(fused(x), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(make(activation="silu")[1](x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gradient", ["tensor", "block"])
@pytest.mark.parametrize("activation", ["none", "hard_swish"])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_autograds_up_to_fp8(gradient: str, activation: str, bias: bool, device: torch.device) -> None:
    linear, _ = make(128, 256, bias=bias)
    linear = linear.to(device)
    twin = copy.deepcopy(linear)
    fused = FusedProjection.of(linear, activation=activation, precision=TowerPrecision(gradient=gradient))
    x = torch.randn(256, 128, device=device, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    weight = torch.randn(256, 256, device=device)
    (fused(x) * weight).sum().backward()
    (ACTIVATIONS[activation](twin(y)) * weight).sum().backward()
    assert 1e-3 < relative(x.grad, y.grad) < 0.12  # FP8 did run
    for mine, theirs in zip(fused.parameters(), twin.parameters(), strict=True):
        assert mine.grad.dtype == mine.dtype
        assert relative(mine.grad, theirs.grad) < 0.12


@pytest.mark.parametrize("epilogue", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_compiled_is_eager(epilogue: bool, autocast: bool, device: torch.device) -> None:
    """Compiled, scales are found by the compiler's reductions: the same scales, so the same numbers."""
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        linear, _ = make(64, 96)
        model = nn.Sequential(
            BlockNorm(64),
            FusedProjection.of(linear.to(device), activation="silu", bounded_input=True, epilogue=epilogue),
        )
        second, _ = make(96, 64)
        model.append(FusedProjection.of(second.to(device)))
        run = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager") if compiled else model
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            out = run(x)
        out.float().square().sum().backward()
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            inferred = run(x)
        results.append([out, inferred, x.grad, *(p.grad for p in model.parameters())])
    for mine, theirs in zip(*results, strict=True):
        assert theirs.abs().max() > 0
        mine, theirs = mine.detach(), theirs.detach()
        torch.testing.assert_close(theirs, mine, rtol=2e-2, atol=2e-2 * float(mine.abs().max()))
        assert relative(theirs.float(), mine.float()) < 0.01


def test_special_values_reach_their_own_row_only() -> None:
    _, fused = make(64, 32)
    x = torch.randn(8, 64)
    x[3, 5], x[4, 6] = torch.inf, torch.nan
    torch._dynamo.reset()
    compiled = torch.compile(fused, backend="aot_eager")
    for run in (fused, compiled):
        bad = run(x).isnan().any(1)
        assert bad.tolist() == [row in (3, 4) for row in range(8)]


def test_names_stay_and_come_back() -> None:
    linear, fused = make(bias=True)
    assert list(fused.state_dict()) == list(linear.state_dict())
    assert fused.weight is linear.weight
    assert fused.restored() is linear
    assert "70 -> 48" in repr(fused)


def test_frozen_weights_are_made_once_and_leave_with_the_device() -> None:
    linear, fused = make(activation="silu")
    model = nn.Sequential(fused).eval()
    x = torch.randn(4, 70)
    with torch.no_grad():
        before = fused(x)
        assert freeze(model) == 1
        linear.weight.zero_()
        assert torch.equal(fused(x), before)
        fused.thaw()
        assert fused(x).abs().max() == 0
    assert list(fused.state_dict()) == list(linear.state_dict())


def test_a_copy_is_a_copy() -> None:
    _, fused = make()
    twin = copy.deepcopy(fused)
    with torch.no_grad():
        twin.weight.zero_()
        assert twin(torch.randn(3, 70)).abs().max() == 0
        assert fused(torch.randn(3, 70)).abs().max() > 0


def test_no_rows_and_wrong_widths() -> None:
    _, fused = make(activation="silu")
    x = torch.zeros(0, 70, requires_grad=True)
    fused(x).sum().backward()
    assert fused.weight.grad.abs().max() == 0
    with pytest.raises(ValueError, match=r"takes \[\.\.\., 70\]"):
        fused(torch.zeros(3, 71))
