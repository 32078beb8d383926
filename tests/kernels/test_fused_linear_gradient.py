"""fused_linear, backward: every backend against autograd in float64 and against the reference.

The gradient sees z as it was kept, rounded. So it is compared with autograd where rounding changes nothing (z on the E4M3 grid with unit mean
square), to float32 precision through the bias gradient of a single row, which is g itself before quantisation; and elsewhere with the formula in
float64 on the kept z.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fp8_bounds import excess, scale_error
from kernels.fused_cases import (
    ACTIVATIONS,
    BLOCK,
    FLOAT32,
    GRADIENTS,
    GROUPED,
    INTERPRETED,
    STATIC,
    Case,
    assert_codes_close,
    differentiate,
    every_backend,
    kept_from,
    normalize,
    operands,
    run,
    supported,
)
from kernels.interpreter import run_interpreted
from loka.formats import QTensor, Spec
from loka.kernels import registry
from loka.kernels.fused_linear import FusedResult, GradientCall, fused_linear_gradient

every_gradient = pytest.mark.parametrize("specs", GRADIENTS, ids="+T".join)


def on_grid(rows: int, blocks: int) -> Tensor:
    """Normalised values that E4M3 holds exactly and whose mean square is 1 in every block: 4 f(0.5) + ... solved by counting."""
    column = torch.tensor([0.5] * 100 + [1.5] * 60 + [1.0] * 96)  # 100/4 + 60 * 9/4 + 96 = 256
    z = torch.stack([column[torch.randperm(BLOCK)] for _ in range(rows * blocks)]).reshape(rows, blocks * BLOCK)
    return z * torch.where(torch.rand_like(z) < 0.5, -1.0, 1.0)


@every_backend
@pytest.mark.parametrize(
    ("activation", "specs"),
    [
        *zip(ACTIVATIONS, GRADIENTS, strict=False),
        ("relu", GRADIENTS[4]),
        ("hard_swish", GRADIENTS[0]),
        ("silu", GRADIENTS[2]),
    ],
)
def test_gradient_is_autograd_in_float64(name: str, specs, activation: str, device: torch.device) -> None:
    supported(name, GradientCall(1, 512, *map(Spec.parse, specs), BLOCK, activation, True, torch.float32), device)
    z = on_grid(1, 2).to(device)
    size = torch.tensor([[2.0, 5.0]], device=device)
    p = (z * size.repeat_interleave(BLOCK, 1)).double().requires_grad_()
    dy = torch.randn(1, 512, device=device)
    out = (ACTIVATIONS[activation](normalize(p)) * dy.double()).sum()
    (expected,) = torch.autograd.grad(out, p)
    result = differentiate(dy, kept_from(z, 1 / size), specs, name, activation=activation, bias=True)
    # One row: the bias gradient is the gradient itself, in float32.
    assert (result.bias.double() - expected[0]).abs().max() <= FLOAT32 * expected.abs().max()
    assert not (result.bias.double() * 1.001 - expected[0]).abs().max() <= FLOAT32 * expected.abs().max()
    torch.testing.assert_close(result.amax.double(), expected.abs().max(), rtol=FLOAT32, atol=0)
    error = FLOAT32 * float(expected.abs().max())
    assert excess(result.g, expected, error) <= 1
    assert excess(result.g_t, expected.T, error) <= 1
    assert excess(result.g, expected * (1 + 2.0**-5), error) > 1


def by_formula(dy: Tensor, kept: FusedResult, activation: str) -> Tensor:
    """g in float64 from what was kept; the slope by autograd."""
    z = (kept.z.dequantize() if isinstance(kept.z, QTensor) else kept.z).double().requires_grad_()
    (slope,) = torch.autograd.grad(ACTIVATIONS[activation](z).sum(), z)
    g = dy.double() * slope
    if kept.rstd is None:
        return g
    z = z.detach()
    parts = zip(g.split(BLOCK, 1), z.split(BLOCK, 1), kept.rstd.double().split(1, 1), strict=True)
    return torch.cat([r * (d - v * (d * v).mean(1, keepdim=True)) for d, v, r in parts], 1)


@every_backend
@pytest.mark.parametrize(
    ("shape", "norm", "activation", "dtype", "specs"),
    [
        ((5, 300), True, "hard_swish", torch.bfloat16, GRADIENTS[0]),
        ((5, 300), True, "hard_swish", torch.bfloat16, GRADIENTS[2]),
        ((130, 27), True, "silu", torch.float32, GRADIENTS[1]),
        ((130, 27), True, "silu", torch.float32, GRADIENTS[2]),
        ((5, 300), False, "relu", torch.float16, GRADIENTS[3]),
        ((1, 70), False, "silu", torch.bfloat16, GRADIENTS[0]),
        ((70, 300), True, "hard_swish", torch.bfloat16, GRADIENTS[4]),
    ],
    ids=str,
)
def test_gradient_of_what_was_kept(
    name: str, specs, shape: tuple[int, int], norm: bool, activation: str, dtype: torch.dtype, device: torch.device
) -> None:
    block = BLOCK if norm else 0
    supported(name, GradientCall(*shape, *map(Spec.parse, specs), block, activation, True, dtype), device)
    z = torch.randn(shape, device=device)
    rstd = torch.rand(shape[0], -(-shape[1] // BLOCK), device=device) + 0.5 if norm else None
    kept = kept_from(z, rstd)
    dy = torch.randn(shape, device=device).to(dtype)
    if shape[0] > 3:
        dy[2] = 0
    result = differentiate(dy, kept, specs, name, activation=activation, norm_block=block, bias=True)
    expected = by_formula(dy, kept, activation)
    error = FLOAT32 * expected.abs().amax(1, keepdim=True).clamp(min=1e-3)
    assert (result.g.spec, result.g_t.spec) == tuple(map(Spec.parse, specs))
    assert excess(result.g, expected, error) <= 1
    assert excess(result.g_t, expected.T, error.T) <= 1
    assert excess(result.g, expected * (1 + 2.0**-5), error) > 1
    torch.testing.assert_close(result.amax.double(), expected.abs().max(), rtol=FLOAT32, atol=0)
    torch.testing.assert_close(result.bias.double(), expected.sum(0), rtol=FLOAT32, atol=1e-4)
    if result.g.spec.mode == "dynamic":
        assert scale_error(result.g, expected) <= 10 * FLOAT32
        assert scale_error(result.g_t, expected.T) <= 10 * FLOAT32
    law = differentiate(dy, kept, specs, "reference", activation=activation, norm_block=block, bias=True)
    assert_codes_close(result.g, law.g, 0.003)
    assert_codes_close(result.g_t, law.g_t, 0.003)


@every_backend
def test_forward_then_backward_is_near_autograd(name: str, device: torch.device) -> None:
    """End to end, with z rounded to E4M3 in between: a few percent, as 3 mantissa bits have it."""
    case = Case((40, 70, 300), "e4m3:row", "e4m3:row", STATIC, "silu", bias=True, keep=True)
    supported(name, case.call(), device)
    a, b, bias = operands(case, device)
    p = (a.dequantize().double() @ b.dequantize().double().T + bias.double()).requires_grad_()
    dy = torch.randn(40, 300, device=device)
    (expected,) = torch.autograd.grad((F.silu(normalize(p)) * dy.double()).sum(), p)
    result = differentiate(dy, run(name, case, a, b, bias), GRADIENTS[2], name, activation="silu", bias=True)
    for found in (result.g.dequantize(), result.g_t.dequantize().T):
        assert 0.001 < (found.double() - expected).norm() / expected.norm() < 0.06
    assert (result.bias.double() - expected.sum(0)).norm() / expected.sum(0).norm() < 0.06


@every_backend
@every_gradient
def test_special_gradients_stay_visible_and_alone(name: str, specs, device: torch.device) -> None:
    shape = (6, 300)
    supported(name, GradientCall(*shape, *map(Spec.parse, specs), 0, "silu", False, torch.float32), device)
    kept = kept_from(torch.randn(shape, device=device), None)
    dy = torch.randn(shape, device=device)
    dy[1, 5], dy[4, 299] = math.nan, math.inf
    result = differentiate(dy, kept, specs, name, activation="silu", norm_block=0)
    law = differentiate(dy, kept, specs, "reference", activation="silu", norm_block=0)
    for ours, expected in ((result.g, law.g), (result.g_t, law.g_t)):
        assert torch.equal(ours.data.float().isnan(), expected.data.float().isnan())
        assert torch.equal(ours.data.float().isinf(), expected.data.float().isinf())
        assert_codes_close(
            QTensor(ours.data.float().nan_to_num(1, 1, 1).to(ours.data.dtype), ours.scale, ours.spec),
            QTensor(expected.data.float().nan_to_num(1, 1, 1).to(ours.data.dtype), expected.scale, ours.spec),
            0.003,
        )
    assert int((~result.g.data.float().isfinite()).sum()) == 2
    torch.testing.assert_close(result.amax, law.amax, rtol=FLOAT32, atol=0)
    assert result.amax.isfinite()


@every_backend
def test_a_gradient_beyond_its_delayed_scale_saturates(name: str, device: torch.device) -> None:
    specs = GRADIENTS[0]
    supported(name, GradientCall(3, 40, *map(Spec.parse, specs), 0, "none", False, torch.float32), device)
    dy = torch.full((3, 40), 1e6, device=device)
    dy[1] = -1e38
    kept = kept_from(torch.ones(3, 40, device=device), None)
    result = differentiate(dy, kept, specs, name, activation="none", norm_block=0)
    assert result.g.data.float()[:, 0].tolist() == [448, -448, 448]
    assert result.g_t.data.float()[0].tolist() == [448, -448, 448]
    assert float(result.amax) == pytest.approx(1e38)


@every_backend
def test_strides_do_not_matter(name: str, device: torch.device) -> None:
    case = Case((5, 64, 40), "e4m3:1x128", "e4m3:row", "float32", "silu", keep=True)
    supported(name, case.call(), device)
    a, b, _ = operands(case, device)
    wide = torch.zeros(5, 100, dtype=torch.uint8, device=device)
    wide[:, 3:67] = a.data.view(torch.uint8)
    strided = QTensor(wide[:, 3:67].view(a.data.dtype), a.scale.T.contiguous().T, a.spec)
    kept, law = run(name, case, strided, b, None), run(name, case, a, b, None)
    assert torch.equal(kept.y, law.y)
    dy = torch.randn(40, 10, device=device).T[::2]
    found = differentiate(dy, kept, GRADIENTS[2], name, activation="silu")
    expected = differentiate(dy.contiguous(), law, GRADIENTS[2], name, activation="silu")
    assert torch.equal(found.g.data.float(), expected.g.data.float())
    assert torch.equal(found.g_t.data.float(), expected.g_t.data.float())


@every_backend
@pytest.mark.parametrize("shape", [(0, 64, 300), (5, 64, 0)], ids=str)
def test_nothing_in_nothing_out(name: str, shape: tuple[int, int, int], device: torch.device) -> None:
    case = Case(shape, "e4m3:row", "e4m3:row", GROUPED, keep=True, transpose=True)
    supported(name, case.call(), device)
    m, _, n = shape
    kept = run(name, case, *operands(case, device))
    assert (kept.y.shape, kept.y_t.shape, kept.z.shape) == ((m, n), (n, m), (m, n))
    result = differentiate(torch.zeros(m, n, device=device), kept, GRADIENTS[2], name, bias=True)
    assert (result.g.shape, result.g_t.shape, result.bias.shape) == ((m, n), (n, m), (n,))
    assert float(result.amax) == 0


@every_backend
def test_backward_compiles_without_a_graph_break(name: str, device: torch.device) -> None:
    supported(name, GradientCall(5, 300, *map(Spec.parse, GRADIENTS[0])), device)
    registry.load("fused_linear")
    kept = kept_from(torch.randn(5, 300, device=device), torch.ones(5, 2, device=device))

    spec, spec_t = map(Spec.parse, GRADIENTS[0])
    scale = torch.full((), 2.0**-6, device=device) if spec.mode != "dynamic" else None

    def backward(dy: Tensor) -> Tensor:
        return fused_linear_gradient(dy, kept, spec=spec, spec_t=spec_t, scale=scale, backend=name).g.dequantize()

    dy = torch.randn(5, 300, device=device)
    compiled = torch.compile(backward, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(dy), backward(dy))


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
def test_triton_under_its_interpreter() -> None:
    run_interpreted(__file__)
