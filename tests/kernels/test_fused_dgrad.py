"""fused_linear_dgrad: one step of backward through a chain, every backend against float64 and against the reference."""

import math

import pytest
import torch
from torch import Tensor

from kernels.fp8_bounds import excess
from kernels.fused_cases import ACTIVATIONS, FLOAT32, INTERPRETED, STATIC, assert_codes_close, every_backend
from kernels.interpreter import run_interpreted
from loka.formats import QTensor, Spec, quantize
from loka.kernels import registry
from loka.kernels.backend import UnsupportedError
from loka.kernels.fused_linear import (
    DgradCall,
    DgradResult,
    FusedResult,
    Launch,
    fused_linear,
    fused_linear_dgrad,
    fused_linear_gradient,
)
from loka.kernels.scaled_mm import MatmulCall
from loka.measure.conformance import accumulation_error

TENSOR, DELAYED, OUT = Spec.parse("e4m3:tensor"), Spec.parse("e4m3:tensor:delayed"), Spec.parse(STATIC)
SHAPE = (70, 200, 90)  # M, K of the product, N
every_activation = pytest.mark.parametrize("activation", list(ACTIVATIONS))


def supported(name: str, device: torch.device) -> None:
    verdict = registry.backend("fused_linear", name).supports(DgradCall(*SHAPE, TENSOR, TENSOR, DELAYED), device)
    if not verdict:
        pytest.skip(f"{name}: {verdict.reason}")


def operands(shape: tuple[int, int, int], device: torch.device) -> tuple[QTensor, QTensor]:
    m, k, n = shape
    g, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device) / math.sqrt(max(k, 1))
    return quantize(g, TENSOR), quantize(w, TENSOR)


def kept(activation: str, form: str, shape: tuple[int, int, int], device: torch.device) -> QTensor | Tensor | None:
    """What forward leaves: FP8 z or y, or z in bf16."""
    z = 2 * torch.randn(shape[0], shape[2], device=device)
    if activation == "none":
        return None
    if form == "bf16":
        return z.to(torch.bfloat16)
    held = ACTIVATIONS[activation](z) if activation in ("relu", "leaky_relu", "tanh", "sigmoid") else z
    return quantize(held, OUT, scale=torch.full((), 2.0**-5, device=device))


def slope_in_float64(z: QTensor | Tensor | None, activation: str) -> Tensor | float:
    if z is None:
        return 1.0
    held = (z.dequantize() if isinstance(z, QTensor) else z).double()
    if isinstance(z, QTensor) and activation in ("tanh", "sigmoid"):
        return 1 - held.square() if activation == "tanh" else held * (1 - held)
    held.requires_grad_()
    return torch.autograd.grad(ACTIVATIONS[activation](held).sum(), held)[0]


def exact(g: QTensor, w_t: QTensor, slope: Tensor | float) -> tuple[Tensor, Tensor]:
    left, right = g.dequantize().double(), w_t.dequantize().double()
    product = left @ right.T
    terms = (left.square() @ right.square().T + product.square()).sqrt()
    lost = 4 * FLOAT32
    if g.device.type == "cuda":
        lost += 8 * accumulation_error(MatmulCall(*g.shape, w_t.shape[0], g.spec, w_t.spec, fast_accum=True))
    return product * slope, lost * terms


def step(name: str, g: QTensor, w_t: QTensor, z: QTensor | Tensor | None, activation: str, **more) -> DgradResult:
    scale = torch.full((), 2.0**-6, device=g.device)
    return fused_linear_dgrad(
        g, w_t, z, spec=DELAYED, scale=scale, activation=activation, **{"backend": name, "bias": True, **more}
    )


@every_backend
@every_activation
@pytest.mark.parametrize("form", ["fp8", "bf16"])
def test_a_step_is_float64_up_to_rounding(name: str, activation: str, form: str, device: torch.device) -> None:
    supported(name, device)
    g, w_t = operands(SHAPE, device)
    z = kept(activation, form, SHAPE, device)
    amax = torch.full((), 0.01, device=device)
    result = step(name, g, w_t, z, activation, amax=amax)
    expected, error = exact(g, w_t, slope_in_float64(z, activation))
    assert (result.g.shape, result.g_t.shape) == ((70, 90), (90, 70))
    assert (result.g.spec, result.g_t.spec) == (DELAYED, DELAYED)
    assert result.g_t.data.stride(1) == 1
    assert excess(result.g, expected, error) <= 1
    assert excess(result.g_t, expected.T, error.T) <= 1
    assert excess(result.g, expected * (1 + 2.0**-5), error) > 1
    torch.testing.assert_close(
        amax.double(), expected.abs().max(), rtol=float(error.max() / expected.abs().max()), atol=0
    )
    # On a GPU each addend is rounded to bf16 on its way to the sum.
    slack = error.sum(0) + (2.0**-8 * expected.abs().sum(0) if device.type == "cuda" else 0)
    assert ((result.bias.double() - expected.sum(0)).abs() <= slack).all()
    law = step("reference", g, w_t, z, activation)
    share = 0.05 if device.type == "cuda" else 0.003
    assert_codes_close(result.g, law.g, share)
    assert_codes_close(result.g_t, law.g_t, share)


@every_backend
def test_two_layers_forward_and_back_are_near_autograd(name: str, device: torch.device) -> None:
    """x -> gelu(x W0 + b0) -> (. W1 + b1), FP8 all the way back: a few percent of autograd in float64, as three mantissa bits have it."""
    supported(name, device)
    x, w0, w1 = (
        torch.randn(70, 64, device=device),
        torch.randn(90, 64, device=device) / 8,
        torch.randn(48, 90, device=device) / 9,
    )
    b0 = 0.3 * torch.randn(90, device=device)
    scale = torch.full((), 2.0**-6, device=device)
    q = [quantize(t, TENSOR) for t in (x, w0, w1)]
    options = {"out": OUT, "out_scale": scale, "norm_block": 0, "activation": "gelu", "keep": True, "backend": name}
    hidden = fused_linear(q[0], q[1], bias=b0, **options)
    dy = torch.randn(70, 48, device=device)
    last = FusedResult(dy)
    back = fused_linear_gradient(
        dy, last, spec=DELAYED, spec_t=DELAYED, scale=scale, norm_block=0, activation="none", bias=True, backend=name
    )
    found = step(name, back.g, quantize(w1.T.contiguous(), TENSOR), hidden.z, "gelu")
    z0 = (x.double() @ w0.double().T + b0.double()).requires_grad_()
    y = torch.nn.functional.gelu(z0) @ w1.double().T
    (expected,) = torch.autograd.grad((y * dy.double()).sum(), z0)
    for ours in (found.g.dequantize(), found.g_t.dequantize().T):
        assert 0.001 < (ours.double() - expected).norm() / expected.norm() < 0.08
    assert (found.bias.double() - expected.sum(0)).norm() / expected.sum(0).norm() < 0.08


@every_backend
def test_special_gradients_stay_visible_and_leave_no_trace_in_amax(name: str, device: torch.device) -> None:
    supported(name, device)
    g, w_t = operands(SHAPE, device)
    g = quantize(g.dequantize(), Spec.parse("e5m2:tensor"))  # E4M3's NaN is 480 to the interpreter
    data = g.data.float()
    data[3, 7], data[60, 0] = math.nan, math.inf
    g = QTensor(data.to(g.data.dtype), g.scale, g.spec)
    z = kept("leaky_relu", "fp8", SHAPE, device)
    amax, law_amax = torch.zeros((), device=device), torch.zeros((), device=device)
    result = step(name, g, w_t, z, "leaky_relu", amax=amax)
    law = step("reference", g, w_t, z, "leaky_relu", amax=law_amax)
    for ours, expected in ((result.g, law.g), (result.g_t, law.g_t)):
        assert torch.equal(ours.data.float().isnan(), expected.data.float().isnan())
    assert result.g.data.float()[[3, 60]].isnan().all()
    assert amax.isfinite()
    torch.testing.assert_close(amax, law_amax, rtol=0.02 if device.type == "cuda" else FLOAT32, atol=0)


@every_backend
@pytest.mark.parametrize("factor", [math.nan, math.inf, 3e38], ids=["nan", "inf", "overflow"])
def test_a_scale_that_is_no_number_leaves_no_trace_in_amax(name: str, factor: float, device: torch.device) -> None:
    supported(name, device)
    g, w_t = operands(SHAPE, device)
    g = QTensor(g.data, torch.full_like(g.scale, factor), g.spec)
    w_t = QTensor(w_t.data, w_t.scale * 100, w_t.spec)
    amax = torch.full((), 0.01, device=device)
    result = step(name, g, w_t, None, "none", amax=amax)
    assert amax.isfinite()
    assert not result.g.dequantize().isfinite().all()


@every_backend
def test_values_beyond_the_scale_clamp(name: str, device: torch.device) -> None:
    supported(name, device)
    g, w_t = (quantize(torch.full(s, v, device=device), TENSOR) for s, v in (((3, 32), 1e4), ((40, 32), -1e4)))
    amax = torch.zeros((), device=device)
    result = step(name, g, w_t, None, "none", amax=amax)
    assert (result.g.data.float() == -448).all()
    assert (result.g_t.data.float() == -448).all()
    assert float(amax) == pytest.approx(3.2e9, rel=1e-2)


@every_backend
@pytest.mark.parametrize("shape", [(0, 64, 40), (5, 64, 0), (5, 0, 40)], ids=str)
def test_nothing_in_nothing_out(name: str, shape: tuple[int, int, int], device: torch.device) -> None:
    supported(name, device)
    g, w_t = operands(shape, device)
    amax = torch.full((), 2.0, device=device)
    result = step(name, g, w_t, kept("relu", "fp8", shape, device), "relu", amax=amax)
    m, _, n = shape
    assert (result.g.shape, result.g_t.shape, result.bias.shape, float(amax)) == ((m, n), (n, m), (n,), 2.0)
    assert (result.g.data.float() == 0).all()


@every_backend
@pytest.mark.parametrize("launch", [Launch(64, 64), Launch(128, 256, 128, 8, 3), Launch(64, 128, 64, 4, 3, 2)], ids=str)
def test_launches_agree(name: str, launch: Launch, device: torch.device) -> None:
    supported(name, device)
    shape = (150, 200, 290)
    g, w_t = operands(shape, device)
    z = kept("silu", "fp8", shape, device)
    found, law = step(name, g, w_t, z, "silu", launch=launch), step("reference", g, w_t, z, "silu")
    share = 0.05 if device.type == "cuda" else 0.003
    assert_codes_close(found.g, law.g, share)
    assert_codes_close(found.g_t, law.g_t, share)
    torch.testing.assert_close(found.bias, law.bias, rtol=1e-2, atol=0.1 if device.type == "cuda" else 1e-3)


@every_backend
def test_compiled_code_raises_the_buffer(name: str, device: torch.device) -> None:
    supported(name, device)
    registry.load("fused_linear")
    g, w_t = operands((20, 48, 40), device)
    z = kept("gelu", "fp8", (20, 48, 40), device)
    scale = torch.full((), 2.0**-6, device=device)

    def backward(data: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        incoming = QTensor(data, g.scale, g.spec)
        options = {"spec": DELAYED, "scale": scale, "activation": "gelu", "amax": amax, "bias": True, "backend": name}
        result = fused_linear_dgrad(incoming, w_t, z, **options)
        return result.g.dequantize(), result.bias, amax * 2

    buffers = torch.zeros((), device=device), torch.zeros((), device=device)
    compiled = torch.compile(backward, fullgraph=True, backend="aot_eager")
    found, expected = compiled(g.data, buffers[0]), backward(g.data, buffers[1])
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])
    assert float(found[2]) == float(expected[2]) == 2 * float(buffers[0]) > 0


def test_the_op_describes_itself_truthfully_to_triton(device: torch.device) -> None:
    supported("triton", device)
    from loka.kernels.fused_linear import triton_ops

    schema = torch.ops.loka.fused_linear_dgrad.default._schema
    assert [argument.name for argument in schema.arguments if argument.is_write] == ["amax"]
    g, w_t = operands((20, 48, 40), device)
    z = kept("gelu", "fp8", (20, 48, 40), device)
    scale = torch.full((), 2.0**-6, device=device)
    for amax, bias in ((torch.zeros((), device=device), True), (None, False)):
        tensors = g.data, w_t.data, g.scale, w_t.scale, z.data, z.scale, scale, amax
        arguments = (*tensors, 4, 2, 0.01, torch.float8_e4m3fn, bias, None)
        torch.library.opcheck(
            triton_ops.fused_linear_dgrad, (*arguments, None, 0.0, 0, 0), test_utils="test_faketensor"
        )
    drawn = torch.tensor([3], device=device), 0.2, 1, 1
    torch.library.opcheck(triton_ops.fused_linear_dgrad, (*arguments, *drawn), test_utils="test_faketensor")


def test_mistakes_are_named(device: torch.device) -> None:
    g, w_t = operands(SHAPE, device)
    z = kept("relu", "fp8", SHAPE, device)
    with pytest.raises(ValueError, match=r"z is \[70, 90\], as g and w_t have it, got \(70, 200\)"):
        step("reference", g, w_t, quantize(torch.zeros(70, 200, device=device), TENSOR), "relu")
    with pytest.raises(ValueError, match="activation relu needs a kept z, got nothing"):
        step("reference", g, w_t, None, "relu")
    with pytest.raises(ValueError, match="activation none needs no kept z"):
        step("reference", g, w_t, z, "none")
    with pytest.raises(ValueError, match="amax is one float32 number"):
        step("reference", g, w_t, z, "relu", amax=torch.zeros(3, device=device))


def test_triton_refuses_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, scaled_mm = registry.backend("fused_linear", "triton"), registry.backend("scaled_mm", "triton")
    for module in (backend, scaled_mm):
        monkeypatch.setattr(module, "triton_runs_on", lambda device: registry.Verdict(True))
    row, device = Spec.parse("e4m3:row"), torch.device("cuda")
    for call, reason in (
        (DgradCall(4, 32, 64, row, TENSOR, DELAYED), "one scale for each tensor in this step, not e4m3:row"),
        (DgradCall(4, 32, 64, TENSOR, TENSOR, TENSOR), "cannot know the amax e4m3:tensor needs; hint: a delayed"),
        (DgradCall(4, 32, 64, Spec.parse("int8:tensor"), TENSOR, DELAYED), "multiplies e4m3 and e5m2, not int8"),
    ):
        verdict = backend.supports(call, device)
        assert not verdict
        assert reason in verdict.reason
    monkeypatch.undo()
    if not torch.cuda.is_available() and not INTERPRETED:
        g, w_t = operands(SHAPE, torch.device("cpu"))
        with pytest.raises(UnsupportedError, match="dgrad e4m3:tensor @ e4m3:tensor none from nothing"):
            step("triton", g, w_t, None, "none")


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
def test_triton_under_its_interpreter() -> None:
    run_interpreted(__file__)
