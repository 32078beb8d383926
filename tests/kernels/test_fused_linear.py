"""fused_linear: every backend against a float64 formulation (torch's own norms, autograd for the gradient) and against the reference.

The gradient sees z as it was kept, rounded. So it is compared with autograd where rounding changes nothing (z on the E4M3 grid with unit mean
square), to float32 precision through the bias gradient of a single row, which is g itself before quantisation; and elsewhere with the formula in
float64 on the kept z.
"""

import math
import os
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fp8_bounds import excess, scale_error
from kernels.interpreter import run_interpreted
from loka.formats import QTensor, Spec, quantize
from loka.kernels import BACKENDS, registry
from loka.kernels.backend import UnsupportedError
from loka.kernels.fused_linear import (
    NORMALIZED,
    NORMALIZED_SCALE,
    FusedCall,
    FusedResult,
    GradientCall,
    fused_linear,
    fused_linear_gradient,
)
from loka.kernels.scaled_mm import MatmulCall
from loka.measure.conformance import accumulation_error

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
every_backend = pytest.mark.parametrize("name", BACKENDS["fused_linear"])
# A result of 16 bits is rounded once; Triton's interpreter truncates instead, which errs up to a whole unit.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0 ** -(7 if INTERPRETED else 8), torch.float16: 2.0**-11}
ROUNDING[torch.float16] *= 2 if INTERPRETED else 1
FLOAT32 = 1e-5  # sums in another order, an approximate reciprocal
BLOCK = 256
ACTIVATIONS = {"none": lambda z: z, "relu": F.relu, "silu": F.silu, "hard_swish": F.hardswish}
STEEPEST = 1.5  # no activation here has a larger slope


@dataclass(frozen=True)
class Case:
    """One way to call the op."""

    shape: tuple[int, int, int]
    a: str
    b: str
    out: str
    activation: str = "hard_swish"
    norm: bool = True
    bias: bool = False
    keep: bool = False
    transpose: bool = False

    def __str__(self) -> str:
        extras = "".join(f"+{name}" for name in ("norm", "bias", "keep", "transpose") if getattr(self, name))
        return f"{'x'.join(map(str, self.shape))}-{self.a}@{self.b}-{self.activation}{extras}-{self.out}"

    @property
    def output(self) -> Spec | torch.dtype:
        return Spec.parse(self.out) if ":" in self.out else getattr(torch, self.out)

    def call(self) -> FusedCall:
        specs = Spec.parse(self.a), Spec.parse(self.b)
        norm = BLOCK if self.norm else 0
        return FusedCall(*self.shape, *specs, self.output, norm, self.activation, self.bias, self.keep, self.transpose)


STATIC, GROUPED = "e4m3:tensor:static", "e4m3:1x128"
CASES = [
    Case((5, 70, 300), "e4m3:row", "e4m3:row", "float32"),
    Case((5, 70, 27), "e4m3:tensor", "e4m3:tensor", "bfloat16", "silu", bias=True, keep=True),
    Case((1, 128, 300), "e4m3:1x128", "e4m3:128x128", "float16", "relu", norm=False, keep=True),
    Case((130, 70, 27), "e4m3:row", "e4m3:tensor", STATIC, keep=True, transpose=True),
    Case((5, 200, 300), "e4m3:1x128", "e4m3:1x128", STATIC, "none", bias=True, keep=True, transpose=True),
    Case((1, 70, 300), "e5m2:row", "e4m3:row", "e5m2:tensor:static", "silu"),
    Case((5, 70, 300), "e4m3:row", "e4m3:row", GROUPED, keep=True),
    Case((130, 70, 300), "e4m3:tensor", "e4m3:tensor", GROUPED, "silu", bias=True, keep=True, transpose=True),
    Case((5, 70, 27), "e4m3:tensor", "e4m3:row", "e5m2:1x128:pow2", "relu", norm=False, transpose=True),
    Case((5, 70, 150), "e4m3:row:pow2", "e4m3:row:pow2", "e4m3:tensor:static:pow2", "none", norm=False, bias=True),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def operands(case: Case, device: torch.device) -> tuple[QTensor, QTensor, Tensor | None]:
    """Rows of different size, a zero row of activations."""
    m, k, n = case.shape
    a = torch.randn(m, k) * torch.exp(torch.randn(m, 1))
    if m > 3:
        a[2] = 0
    b = torch.randn(n, k) / math.sqrt(k) * torch.exp(0.3 * torch.randn(n, 1))
    bias = (0.5 * torch.randn(n)).to(device) if case.bias else None
    return quantize(a.to(device), Spec.parse(case.a)), quantize(b.to(device), Spec.parse(case.b)), bias


def run(name: str, case: Case, a: QTensor, b: QTensor, bias: Tensor | None) -> FusedResult:
    given = torch.full((), 2.0**-5, device=a.device) if "static" in case.out else None
    options = {"activation": case.activation, "keep": case.keep, "transpose": case.transpose, "bias": bias}
    norm = BLOCK if case.norm else 0
    return fused_linear(a, b, out=case.output, out_scale=given, norm_block=norm, backend=name, **options)


def normalize(p: Tensor) -> Tensor:
    """Block norm in float64: torch's RMS norm on slices of 256 columns."""
    return torch.cat([F.rms_norm(part, part.shape[1:], eps=1e-6) for part in p.split(BLOCK, 1)], 1)


def exact(case: Case, a: QTensor, b: QTensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """z and y in float64, and what adding K products on this device may have done to z."""
    left, right = a.dequantize().double(), b.dequantize().double()
    p = left @ right.T
    terms = (left.square() @ right.square().T + p.square()).sqrt()
    p = p if bias is None else p + bias.double()
    z = normalize(p) if case.norm else p
    factor = (z / p).nan_to_num() if case.norm else torch.ones_like(p)
    lost = FLOAT32
    if a.device.type == "cuda":  # FP8 tensor cores keep about 14 bits while they add
        lost += 8 * accumulation_error(MatmulCall(*case.shape, a.spec, b.spec, fast_accum=True))
    return z, ACTIVATIONS[case.activation](z), lost * (terms * factor.abs() + z.abs())


def supported(name: str, call: FusedCall | GradientCall, device: torch.device) -> None:
    verdict = registry.backend("fused_linear", name).supports(call, device)
    if not verdict:
        pytest.skip(f"{name}: {verdict.reason}")


@every_backend
@every_case
def test_forward_is_float64_up_to_rounding(name: str, case: Case, device: torch.device) -> None:
    supported(name, case.call(), device)
    a, b, bias = operands(case, device)
    result = run(name, case, a, b, bias)
    z, y, error = exact(case, a, b, bias)
    error = STEEPEST * error
    if isinstance(result.y, QTensor):
        assert result.y.spec == case.output
        assert excess(result.y, y, error) <= 1
        assert excess(result.y, y * (1 + 2.0**-5), error) > 1  # notices 3 %
        if result.y.spec.mode == "dynamic":
            assert scale_error(result.y, y) <= 4 * float((error / y.abs().clamp(min=1e-3)).max())
    else:
        assert result.y.dtype == case.output
        allowed = error + ROUNDING[result.y.dtype] * y.abs() + 1e-6
        assert ((result.y.double() - y).abs() <= allowed).all()
        assert not ((result.y.double() * (1 + 2.0**-6) - y).abs() <= allowed).all()
    if case.transpose:
        assert result.y_t.shape == (case.shape[2], case.shape[0])
        assert result.y_t.data.stride(1) == 1
        assert excess(result.y_t, y.T, error.T) <= 1
    else:
        assert result.y_t is None
    check_kept(case, result, z, error)
    assert_equals_the_reference(result, run("reference", case, a, b, bias), device)


def check_kept(case: Case, result: FusedResult, z: Tensor, error: Tensor) -> None:
    """What backward needs, and only where asked."""
    if not case.keep:
        assert result.z is None
        assert result.rstd is None
    elif case.norm:
        assert (result.z.spec, float(result.z.scale)) == (NORMALIZED, NORMALIZED_SCALE)
        assert excess(result.z, z, error) <= 1
        assert excess(result.z, z * (1 + 2.0**-5), error) > 1
        assert result.rstd.shape == (case.shape[0], -(-case.shape[2] // BLOCK))
    else:
        assert (result.z.dtype, result.rstd) == (torch.bfloat16, None)
        assert ((result.z.double() - z).abs() <= error + ROUNDING[torch.bfloat16] * z.abs() + 1e-6).all()


def assert_codes_close(ours: QTensor | Tensor, law: QTensor | Tensor, share: float) -> None:
    """The same codes but for a small share, one code apart; 16-bit tensors within two units."""
    if not isinstance(law, QTensor):
        unit = 2 * ROUNDING[law.dtype] if law.dtype in ROUNDING else 0.0
        torch.testing.assert_close(ours.float(), law.float(), rtol=unit + 10 * FLOAT32, atol=1e-2 * share)
        return
    torch.testing.assert_close(ours.scale, law.scale, rtol=0.02 if share > 0.01 else FLOAT32, atol=0)
    codes = [q.data.contiguous().view(torch.uint8).int() for q in (ours, law)]
    apart = torch.where(ours.data.float() == law.data.float(), 0, (codes[0] - codes[1]).abs())  # -0 is 0
    size = law.dequantize().abs()
    largest = size.amax(-1, keepdim=True)
    small = size < 2.0**-5 * largest if share > 0.01 else torch.zeros_like(size, dtype=torch.bool)
    # Near zero many codes lie within what a tensor core's sums lose: there the bound around the float64 result decides.
    assert apart[~small].max() <= 1
    assert (apart != 0).double().mean() <= share


def assert_equals_the_reference(ours: FusedResult, law: FusedResult, device: torch.device) -> None:
    """Code for code, but for elements between two codes within what the GEMM's sums may lose (more in a tensor core)."""
    share = 0.05 if device.type == "cuda" else 0.003
    for field in ("y", "y_t", "z"):
        found, expected = getattr(ours, field), getattr(law, field)
        assert (found is None) == (expected is None)
        if expected is not None:
            assert_codes_close(found, expected, share)
    if law.rstd is not None:
        torch.testing.assert_close(ours.rstd, law.rstd, rtol=0.02 if share > 0.01 else FLOAT32, atol=0)


def on_grid(rows: int, blocks: int) -> Tensor:
    """Normalised values that E4M3 holds exactly and whose mean square is 1 in every block: 4 f(0.5) + ... solved by counting."""
    column = torch.tensor([0.5] * 100 + [1.5] * 60 + [1.0] * 96)  # 100/4 + 60 * 9/4 + 96 = 256
    z = torch.stack([column[torch.randperm(BLOCK)] for _ in range(rows * blocks)]).reshape(rows, blocks * BLOCK)
    return z * torch.where(torch.rand_like(z) < 0.5, -1.0, 1.0)


GRADIENTS = [
    ("e4m3:tensor:delayed", "e4m3:tensor:delayed"),
    ("e5m2:tensor:static", "e4m3:tensor:static"),
    ("e4m3:1x128", "e4m3:1x128"),
    ("e5m2:1x128:pow2", "e5m2:1x128:pow2"),
    ("e4m3:tensor", "e4m3:tensor"),
]
every_gradient = pytest.mark.parametrize("specs", GRADIENTS, ids="+T".join)


def kept_from(z: Tensor, rstd: Tensor | None) -> FusedResult:
    """What forward would have kept."""
    scale = torch.tensor(NORMALIZED_SCALE, device=z.device)
    held = quantize(z, NORMALIZED, scale=scale) if rstd is not None else z.to(torch.bfloat16)
    return FusedResult(torch.empty(0), z=held, rstd=rstd)


def differentiate(dy: Tensor, kept: FusedResult, specs: tuple[str, str], name: str, **options):
    given = torch.full((), 2.0**-6, device=dy.device) if "tensor:" in specs[0] else None
    spec, spec_t = map(Spec.parse, specs)
    return fused_linear_gradient(dy, kept, spec=spec, spec_t=spec_t, scale=given, backend=name, **options)


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
@pytest.mark.parametrize("out", ["float32", "e4m3:tensor:static", "e5m2:1x128"])
def test_a_nan_row_changes_no_other_row(name: str, out: str, device: torch.device) -> None:
    case = Case((6, 64, 300), "e5m2:row", "e4m3:row", out, keep=True)  # E4M3's NaN is 480 to the interpreter
    supported(name, case.call(), device)
    a, b, _ = operands(case, device)
    clean = run(name, case, a, b, None)
    data = a.data.float()
    data[1, 3], data[4, 60] = math.nan, math.inf
    poisoned = QTensor(data.to(a.data.dtype), a.scale, a.spec)
    result = run(name, case, poisoned, b, None)
    values = [(r.y.data if isinstance(r.y, QTensor) else r.y).float() for r in (clean, result)]
    assert torch.equal(values[0][[0, 2, 3, 5]], values[1][[0, 2, 3, 5]])
    assert values[1][1].isnan().all()
    assert values[1][4].isnan().all()
    assert (values[1][2] == 0).all()  # an all-zero row
    assert result.z.data[[1, 4]].float().isnan().all()


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


@pytest.mark.parametrize("name", BACKENDS["fused_linear"])
@pytest.mark.parametrize("what", ["scale of a", "scale of b", "bias"])
def test_strided_scales_and_bias(name: str, what: str, device: torch.device) -> None:
    case = Case((5, 64, 40), "e4m3:row", "e4m3:row", "float32", "none", norm=False, bias=True)
    supported(name, case.call(), device)
    a, b, bias = operands(case, device)
    law = run(name, case, a, b, bias)
    apart = {t: torch.stack([t.flatten(), torch.ones_like(t.flatten())], 1)[:, :1] for t in (a.scale, b.scale, bias)}
    if what == "scale of a":
        a = QTensor(a.data, apart[a.scale], a.spec)
    elif what == "scale of b":
        b = QTensor(b.data, apart[b.scale], b.spec)
    else:
        bias = apart[bias][:, 0]
    torch.testing.assert_close(run(name, case, a, b, bias).y, law.y, rtol=FLOAT32, atol=1e-5)


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


def fused(out: str | torch.dtype, a: str = "e4m3:row", b: str = "e4m3:row") -> FusedCall:
    return FusedCall(4, 32, 64, Spec.parse(a), Spec.parse(b), Spec.parse(out) if isinstance(out, str) else out)


def backward(spec: str, spec_t: str) -> GradientCall:
    return GradientCall(4, 64, Spec.parse(spec), Spec.parse(spec_t))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (fused("e4m3:tensor"), "an epilogue sees one tile and cannot know the amax e4m3:tensor needs; hint: a static"),
        (fused("e4m3:row"), "cannot know the amax e4m3:row needs"),
        (fused("e4m3:128x128"), "static per tensor or dynamic per 1x128, not e4m3:128x128"),
        (fused("int8:tensor:static"), "writes e4m3 or e5m2 rounded to nearest"),
        (fused(torch.float64), "writes bf16, fp16, fp32 or FP8, not torch.float64"),
        (fused(torch.bfloat16, a="int8:row"), "multiplies e4m3 and e5m2, not int8"),
        (fused(torch.bfloat16, a="e4m3:128x128"), "a is scaled per tensor, row or 1x128, not 128x128"),
        (backward("e4m3:tensor", "e5m2:tensor"), "one dynamic scale serves both"),
        (backward("e4m3:tensor", "e4m3:tensor:static"), "scaled alike in one pass"),
        (backward("e4m3:1x128", "e4m3:tensor:static"), "scaled alike in one pass"),
        (backward("e4m3:1x128", "int8:1x128"), "writes e4m3 or e5m2"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[:60],
)
def test_triton_refuses_with_the_reason(call: FusedCall | GradientCall, reason: str, monkeypatch) -> None:
    backend = registry.backend("fused_linear", "triton")
    scaled_mm = registry.backend("scaled_mm", "triton")
    for module in (backend, scaled_mm):  # answer as where Triton runs: about the call, not about this machine
        monkeypatch.setattr(module, "triton_runs_on", lambda device: registry.Verdict(True))
    verdict = backend.supports(call, torch.device("cuda"))
    assert not verdict
    assert reason in verdict.reason


def test_mistakes_are_named(device: torch.device) -> None:
    case = Case((4, 32, 64), "e4m3:row", "e4m3:row", "bfloat16")
    a, b, _ = operands(case, device)
    with pytest.raises(ValueError, match=r"the norm block is 256 \(or 0 for none\), got 128"):
        fused_linear(a, b, out=torch.bfloat16, norm_block=128)
    with pytest.raises(ValueError, match="activation 'gelu' is not one of none, relu"):
        fused_linear(a, b, out=torch.bfloat16, activation="gelu")
    with pytest.raises(ValueError, match="the transpose is an FP8 operand for the next wgrad"):
        fused_linear(a, b, out=torch.bfloat16, transpose=True)
    result = fused_linear(a, b, out=torch.bfloat16)
    with pytest.raises(ValueError, match=r"nothing for backward; hint: fused_linear\(..., keep=True\)"):
        fused_linear_gradient(torch.ones(4, 64), result, spec=Spec.parse(GROUPED), spec_t=Spec.parse(GROUPED))
    with pytest.raises(UnsupportedError, match=r"'triton' cannot run 4x32x64 int8:row @ e4m3:row blocknorm256"):
        fused_linear(quantize(torch.ones(4, 32), Spec.parse("int8:row")), b.__class__(b.data.cpu(), b.scale.cpu(), b.spec),
                     out=torch.bfloat16, backend="triton")  # fmt: skip


@pytest.mark.parametrize("name", BACKENDS["fused_linear"])
@pytest.mark.parametrize(("out", "given"), [(STATIC, False), (GROUPED, True)])
def test_an_output_scale_that_is_missing_or_unasked_is_refused(
    name: str, out: str, given: bool, device: torch.device
) -> None:
    case = Case((4, 32, 64), "e4m3:row", "e4m3:row", STATIC)
    supported(name, case.call(), device)
    a, b, _ = operands(case, device)
    scale = torch.ones((), device=device) if given else None
    with pytest.raises(ValueError, match=f"{out} .* scale"):
        fused_linear(a, b, out=Spec.parse(out), out_scale=scale, backend=name)


@every_backend
def test_forward_compiles_without_a_graph_break(name: str, device: torch.device) -> None:
    case = Case((5, 64, 40), "e4m3:row", "e4m3:row", STATIC, keep=True, transpose=True)
    supported(name, case.call(), device)
    registry.load("fused_linear")
    a, b, _ = operands(case, device)
    out, scale = (
        Spec.parse(STATIC),
        torch.full((), 2.0**-4, device=device),
    )  # torch 2.11 cannot trace the making of a Spec

    def forward(data: Tensor) -> Tensor:
        x = QTensor(data, a.scale, a.spec)
        return fused_linear(x, b, out=out, out_scale=scale, keep=True, transpose=True, backend=name).y.dequantize()

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a.data), forward(a.data))


@pytest.mark.parametrize("name", BACKENDS["fused_linear"])
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
