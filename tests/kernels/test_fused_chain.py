"""fused_linear without norms: what a chain [linear + bias -> activation]* asks of it, forward and back to the GEMM.

The largest |z| in a buffer, every activation, and what is kept for backward in FP8.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fp8_bounds import excess
from kernels.fused_cases import (
    ACTIVATIONS,
    FLOAT32,
    INTERPRETED,
    ROUNDING,
    STATIC,
    Case,
    assert_codes_close,
    every_backend,
    operands,
    run,
    supported,
)
from kernels.interpreter import run_interpreted
from loka.formats import QTensor, Spec, quantize
from loka.kernels import registry
from loka.kernels.fused_linear import FusedResult, fused_linear, fused_linear_gradient
from loka.kernels.scaled_mm import MatmulCall
from loka.measure.conformance import accumulation_error

every_activation = pytest.mark.parametrize("activation", list(ACTIVATIONS))
SCALED = {"silu", "hard_swish", "gelu", "gelu_tanh"}  # z itself is needed
DELAYED = Spec.parse("e4m3:tensor:delayed")
SHAPE = (70, 40, 150)


def layer(activation: str, out: str = STATIC, shape: tuple[int, int, int] = SHAPE, **more) -> Case:
    options = {"bias": True, "keep": True, "transpose": out == STATIC, "amax": True, **more}
    return Case(shape, "e4m3:tensor", "e4m3:tensor", out, activation, norm=False, **options)


def exact(case: Case, a: QTensor, b: QTensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """z in float64, and what adding K products may have done to it."""
    left, right = a.dequantize().double(), b.dequantize().double()
    z = left @ right.T if bias is None else left @ right.T + bias.double()
    terms = (left.square() @ right.square().T + z.square()).sqrt()
    lost = FLOAT32
    if a.device.type == "cuda":
        lost += 8 * accumulation_error(MatmulCall(*case.shape, a.spec, b.spec, fast_accum=True))
    return z, 1.5 * lost * terms


@every_backend
@every_activation
@pytest.mark.parametrize("out", [STATIC, "bfloat16"])
def test_every_activation_forward(name: str, activation: str, out: str, device: torch.device) -> None:
    case = layer(activation, out)
    supported(name, case.call(), device)
    a, b, bias = operands(case, device)
    amax = torch.full((), 0.25, device=device)
    result = run(name, case, a, b, bias, amax)
    z, error = exact(case, a, b, bias)
    y = ACTIVATIONS[activation](z)
    torch.testing.assert_close(amax.double(), z.abs().max(), rtol=float(error.max() / z.abs().max()), atol=0)
    if out == STATIC:
        assert excess(result.y, y, error) <= 1
        assert excess(result.y_t, y.T, error.T) <= 1
        assert excess(result.y, y * (1 + 2.0**-5), error) > 1
    else:
        assert ((result.y.double() - y).abs() <= error + ROUNDING[torch.bfloat16] * y.abs() + 1e-6).all()
    check_kept(result, activation, out, z, error)
    law = run("reference", case, a, b, bias)
    for field in ("y", "y_t", "z"):
        if getattr(law, field) is not None:
            assert_codes_close(getattr(result, field), getattr(law, field), 0.05 if device.type == "cuda" else 0.003)


def check_kept(result: FusedResult, activation: str, out: str, z: Tensor, error: Tensor) -> None:
    assert result.rstd is None
    if activation == "none":
        assert result.z is None
    elif out != STATIC:
        assert result.z.dtype == torch.bfloat16
        assert ((result.z.double() - z).abs() <= error + ROUNDING[torch.bfloat16] * z.abs() + 1e-6).all()
    elif activation in SCALED:
        assert (result.z.spec, float(result.z.scale)) == (result.y.spec, float(result.y.scale))
        assert excess(result.z, z, error) <= 1
        assert excess(result.z, z * (1 + 2.0**-5), error) > 1
    else:
        assert result.z is result.y


@every_backend
def test_one_scale_from_amax_fits_y_and_z(name: str, device: torch.device) -> None:
    """What a chain does: the largest |z| of one step makes the scale of the next, and nothing saturates."""
    for activation in SCALED:
        case = layer(activation, transpose=False)
        supported(name, case.call(), device)
        a, b, bias = operands(case, device)
        amax = torch.zeros((), device=device)
        options = {"bias": bias, "norm_block": 0, "activation": activation, "keep": True, "backend": name}
        for _ in range(2):
            scale = amax / 448 if float(amax) else torch.ones((), device=device)
            result = fused_linear(a, b, out=Spec.parse(STATIC), out_scale=scale, amax=amax, **options)
        z, error = exact(case, a, b, bias)
        assert excess(result.z, z, error) <= 1
        assert (z.abs().max() / scale).item() <= 448 * (1 + 1e-6)
        assert result.z.data.float().abs().max() == 448


@every_backend
@pytest.mark.parametrize("width", [48, 1104])
def test_a_prepared_weight_gives_the_same_bits(name: str, width: int, device: torch.device) -> None:
    """Rows of the weight, and of every FP8 output, start at whole sectors of 32 bytes whatever the width."""
    case = layer("relu", shape=(20, width, 304))
    supported(name, case.call(), device)
    a, b, bias = operands(case, device)
    prepared = registry.prepare("fused_linear", name, b, a.spec)
    law, found = run(name, case, a, b, bias), run(name, case, a, prepared, bias)
    assert torch.equal(law.y.data.float(), found.y.data.float())
    if name == "triton":
        assert prepared.data.stride(0) % 32 == 0
        assert [q.data.stride(0) % 32 for q in (found.y, found.y_t)] == [0, 0]
        assert registry.prepare("fused_linear", name, prepared, a.spec) is prepared


@every_backend
def test_amax_is_raised_and_never_lowered(name: str, device: torch.device) -> None:
    case = layer("relu")
    supported(name, case.call(), device)
    a, b, bias = operands(case, device)
    high = torch.full((1,), 1e30, device=device)  # one number, whatever its shape
    run(name, case, a, b, bias, high)
    assert float(high) == pytest.approx(1e30)
    history = torch.zeros(3, device=device)
    run(name, case, a, b, bias, history[1])  # a view of a longer buffer
    assert history[0] == history[2] == 0
    assert float(history[1]) > 0


@every_backend
def test_rows_beyond_the_last_do_not_count(name: str, device: torch.device) -> None:
    """A tile's rows beyond M hold the bias alone, which here is larger than any z."""
    case = layer("none", shape=(5, 32, 40))
    supported(name, case.call(), device)
    ones = torch.ones(5, 32, device=device)
    a, b = (quantize(t, Spec.parse("e4m3:tensor")) for t in (ones, torch.ones(40, 32, device=device)))
    bias = torch.full((40,), -30.0, device=device)
    amax = torch.zeros((), device=device)
    run(name, case, a, b, bias, amax)
    assert float(amax) == pytest.approx(2.0, rel=1e-4)


@every_backend
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "tanh"])
@pytest.mark.parametrize("out", [STATIC, "float32"])
def test_special_values_stay_visible_and_leave_no_trace_in_amax(
    name: str, activation: str, out: str, device: torch.device
) -> None:
    case = Case(
        (70, 40, 150), "e5m2:tensor", "e4m3:tensor", out, activation, norm=False, keep=True, bias=True, amax=True
    )
    supported(name, case.call(), device)
    a, b, bias = operands(case, device)
    data = a.data.float()
    data[1, 3] = math.nan
    poisoned = QTensor(data.to(a.data.dtype), a.scale, a.spec)
    bias[7], bias[149] = math.inf, -math.inf
    amax, law_amax = torch.zeros((), device=device), torch.zeros((), device=device)
    result = run(name, case, poisoned, b, bias, amax)
    law = run("reference", case, poisoned, b, bias, law_amax)
    assert amax.isfinite()
    torch.testing.assert_close(amax, law_amax, rtol=0.02 if device.type == "cuda" else FLOAT32, atol=0)
    found, expected = ((r.y.data if isinstance(r.y, QTensor) else r.y).float() for r in (result, law))
    ordinary = [i for i in range(150) if i not in (7, 149)]  # gelu(-Inf) is NaN or 0, as a library likes
    assert torch.equal(found[:, ordinary].isnan(), expected[:, ordinary].isnan())
    assert found[1].isnan().all()
    if activation not in ("tanh", "sigmoid"):
        assert not found[:, 7].isfinite().any()


@every_backend
def test_values_beyond_the_scale_clamp(name: str, device: torch.device) -> None:
    case = layer("none", shape=(3, 16, 40), keep=False)
    supported(name, case.call(), device)
    a, b, _ = operands(case, device)
    bias = torch.full((40,), 1e6, device=device)
    bias[1::2] = -1e30
    amax = torch.zeros((), device=device)
    result = run(name, case, a, b, bias, amax)
    assert result.y.data.float()[:, :2].tolist() == [[448, -448]] * 3
    assert result.y_t.data.float()[:2].tolist() == [[448] * 3, [-448] * 3]
    assert float(amax) == pytest.approx(1e30)


@every_backend
def test_no_rows_leave_the_buffer_alone(name: str, device: torch.device) -> None:
    case = layer("gelu", shape=(0, 64, 40))
    supported(name, case.call(), device)
    amax = torch.full((), 3.0, device=device)
    result = run(name, case, *operands(case, device), amax)
    assert (result.y.shape, result.y_t.shape, result.z.shape, float(amax)) == ((0, 40), (40, 0), (0, 40), 3.0)


@every_backend
def test_leaky_relu_takes_its_slope(name: str, device: torch.device) -> None:
    case = layer("leaky_relu", "float32", transpose=False)
    supported(name, case.call(), device)
    a, b, bias = operands(case, device)
    result = run(name, case, a, b, bias, slope=0.3)
    z, error = exact(case, a, b, bias)
    assert ((result.y.double() - F.leaky_relu(z, 0.3)).abs() <= error + 1e-6).all()
    dy = torch.ones(SHAPE[0], SHAPE[2], device=device)
    options = {"spec": DELAYED, "spec_t": DELAYED, "scale": torch.full((), 2.0**-8, device=device), "backend": name}
    back = fused_linear_gradient(dy, result, norm_block=0, activation="leaky_relu", slope=0.3, bias=True, **options)
    slope = torch.where(result.z > 0, 1.0, 0.3)
    torch.testing.assert_close(back.bias, slope.sum(0), rtol=FLOAT32, atol=0)


def slope_in_float64(kept: QTensor | Tensor | None, activation: str, shape: tuple[int, int]) -> Tensor:
    """By autograd from the kept z, or in closed form from the kept y."""
    if kept is None:
        return torch.ones(shape, dtype=torch.float64)
    held = (kept.dequantize() if isinstance(kept, QTensor) else kept).double()
    if isinstance(kept, QTensor) and activation == "tanh":
        return 1 - held.square()
    if isinstance(kept, QTensor) and activation == "sigmoid":
        return held * (1 - held)
    held.requires_grad_()
    (slope,) = torch.autograd.grad(ACTIVATIONS[activation](held).sum(), held)
    return slope


@every_backend
@every_activation
@pytest.mark.parametrize("out", [STATIC, "bfloat16"])
def test_gradient_from_what_was_kept(name: str, activation: str, out: str, device: torch.device) -> None:
    case = layer(activation, out)
    supported(name, case.call(), device)
    a, b, bias = operands(case, device)
    kept = run(name, case, a, b, bias)
    dy = torch.randn(SHAPE[0], SHAPE[2], device=device)
    scale = torch.full((), 2.0**-6, device=device)
    options = {"scale": scale, "norm_block": 0, "activation": activation, "bias": True}
    result = fused_linear_gradient(dy, kept, spec=DELAYED, spec_t=DELAYED, backend=name, **options)
    slope = slope_in_float64(kept.z, activation, tuple(dy.shape)).to(device)
    expected = dy.double() * slope
    error = 4 * FLOAT32 * dy.abs().double()
    assert excess(result.g, expected, error) <= 1
    assert excess(result.g_t, expected.T, error.T) <= 1
    torch.testing.assert_close(result.bias.double(), expected.sum(0), rtol=FLOAT32, atol=1e-3)
    torch.testing.assert_close(result.amax.double(), expected.abs().max(), rtol=4 * FLOAT32, atol=0)
    # And near the derivative at the z that was not rounded: as near as three mantissa bits of z allow.
    z, _ = exact(case, a, b, bias)
    z.requires_grad_()
    (true,) = torch.autograd.grad((ACTIVATIONS[activation](z) * dy.double()).sum(), z)
    assert (expected - true).norm() / true.norm() < 0.08


@every_backend
def test_nothing_kept_where_something_is_needed_is_refused(name: str, device: torch.device) -> None:
    nothing = FusedResult(torch.empty(0, device=device))
    options = {
        "spec": DELAYED,
        "spec_t": DELAYED,
        "scale": torch.ones((), device=device),
        "norm_block": 0,
        "backend": name,
    }
    with pytest.raises(ValueError, match="nothing for backward"):
        fused_linear_gradient(torch.ones(4, 64, device=device), nothing, activation="relu", **options)


@every_backend
def test_compiled_code_raises_the_buffer(name: str, device: torch.device) -> None:
    case = layer("gelu")
    supported(name, case.call(), device)
    registry.load("fused_linear")
    a, b, bias = operands(case, device)
    out, scale = Spec.parse(STATIC), torch.full((), 2.0**-5, device=device)
    options = {"bias": bias, "norm_block": 0, "activation": "gelu", "keep": True, "transpose": True, "backend": name}

    def forward(data: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
        result = fused_linear(QTensor(data, a.scale, a.spec), b, out=out, out_scale=scale, amax=amax, **options)
        return result.y.dequantize(), amax * 2  # read behind the call: the raised value

    buffers = torch.zeros((), device=device), torch.zeros((), device=device)
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    found, expected = compiled(a.data, buffers[0]), forward(a.data, buffers[1])
    assert torch.equal(found[0], expected[0])
    assert float(found[1]) == float(expected[1]) == 2 * float(buffers[0]) > 0
    assert torch.equal(*buffers)


def test_the_op_describes_itself_truthfully_to_triton(device: torch.device) -> None:
    """The schema names the buffer and nothing else as mutated; fake outputs are like the real ones, with the buffer and without."""
    case = layer("gelu", shape=(20, 48, 40))
    supported("triton", case.call(), device)
    from loka.kernels.fused_linear import triton_ops

    schema = torch.ops.loka.fused_linear.default._schema
    assert [argument.name for argument in schema.arguments if argument.is_write] == ["amax"]
    a, b, bias = operands(case, device)
    scale = torch.full((), 2.0**-5, device=device)
    for amax, keep in ((torch.zeros((), device=device), 2), (None, 0), (None, 3)):
        tensors = a.data, b.data, a.scale, b.scale, bias, scale, amax
        options = 1, 1, False, 4, 0.01, 1, torch.float8_e4m3fn, False, keep, True, None
        # The checker's other tests multiply FP8 tensors, which torch cannot; compiled code is run above.
        torch.library.opcheck(triton_ops.fused_linear, (*tensors, *options, None, 0.0, 0), test_utils="test_faketensor")
        drawn = torch.tensor([3], device=device), 0.2, 1
        torch.library.opcheck(triton_ops.fused_linear, (*tensors, *options, *drawn), test_utils="test_faketensor")


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
def test_triton_under_its_interpreter() -> None:
    run_interpreted(__file__)
