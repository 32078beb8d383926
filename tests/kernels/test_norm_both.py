"""norm_quantize for chains: FP8 both ways under a given scale, an amax raised in place, an x kept in FP8, 16 bits alone; forward and gradient, every backend against float64."""

import math
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fp8_bounds import excess
from kernels.interpreter import run_interpreted
from loka.formats import QTensor, Spec, quantize
from loka.kernels import BACKENDS, registry
from loka.kernels.activation import ACTIVATIONS, activate, activation_slope
from loka.kernels.backend import UnsupportedError
from loka.kernels.norm_quantize import NormCall, NormGradientCall, norm_gradient, norm_quantize

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
every_backend = pytest.mark.parametrize("name", BACKENDS["norm_quantize"])
FLOAT32 = 2e-5  # sums in another order, an approximate reciprocal; relative to the largest of the row
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0 ** -(7 if INTERPRETED else 8)}
STATIC = Spec.parse("e4m3:tensor:static")
# norm, activation, weight and bias, shape, type of x, spec of an x in FP8, spec of the outputs
CASES = [
    ("layer", "silu", (True, True), (37, 300), torch.bfloat16, None, "e4m3:tensor:static"),
    ("layer", "gelu", (True, False), (5, 1100), torch.float32, None, "e5m2:tensor:delayed"),
    ("rms", "relu", (False, False), (17, 70), torch.float32, None, "e4m3:tensor:static"),
    ("rms", "sigmoid", (True, True), (4, 129), torch.bfloat16, "e4m3:tensor", "e4m3:tensor:static"),
    ("layer", "none", (False, True), (9, 513), torch.float32, "e4m3:row", "e4m3:tensor:static"),
    ("rms", "gelu_tanh", (True, False), (1, 16), torch.float32, "e5m2:tensor", "e5m2:tensor:static"),
]
every_case = pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[3][0]}x{c[3][1]}-{c[5] or c[4]}-{c[6]}"
)


class Problem:
    """Operands of a case, and the truth in float64: of the x that the kernel reads."""

    def __init__(self, case: tuple[Any, ...], device: torch.device) -> None:
        self.norm, self.activation, (weighted, biased), shape, self.dtype, kept, out = case
        self.spec = Spec.parse(out)
        x = (torch.randn(shape) * torch.exp(torch.randn(shape[0], 1)) + torch.randn(shape[0], 1)).to(device, self.dtype)
        self.x: Any = x if kept is None else quantize(x, Spec.parse(kept))
        self.weight = (1 + 0.3 * torch.randn(shape[1])).to(device, self.dtype) if weighted else None
        self.bias = (0.3 * torch.randn(shape[1])).to(device, self.dtype) if biased else None
        self.dy = torch.randn(shape).to(device, self.dtype)
        self.scale = torch.full((), 2.0**-6, device=device)

    @property
    def options(self) -> dict[str, Any]:
        return {"norm": self.norm, "weight": self.weight, "bias": self.bias, "activation": self.activation}

    @property
    def kept(self) -> Spec | None:
        return self.x.spec if isinstance(self.x, QTensor) else None

    def values(self) -> Tensor:
        return self.x.dequantize().double() if isinstance(self.x, QTensor) else self.x.double()

    def exact(self) -> tuple[Tensor, list[Tensor | None]]:
        """The output, and the gradients of x, weight and bias by autograd."""
        leaves = [None if t is None else t.double().requires_grad_() for t in (self.values(), self.weight, self.bias)]
        x, weight, bias = leaves
        assert x is not None
        if self.norm == "layer":
            p = F.layer_norm(x, x.shape[1:], weight, bias, 1e-5)
        else:
            p = F.rms_norm(x, x.shape[1:], weight, 1e-6)
            p = p if bias is None else p + bias
        y = activate(p, self.activation)
        found = iter(torch.autograd.grad(y, [t for t in leaves if t is not None], self.dy.double()))
        return y.detach(), [None if t is None else next(found) for t in leaves]

    def supported(self, name: str, *, backward: bool = False, both: bool = True) -> None:
        m, k = self.dy.shape
        affine = self.weight is not None or self.bias is not None
        call: Any = NormCall(
            m, k, self.spec, self.norm, self.activation, affine, in_dtype=self.dtype, transpose=both, kept=self.kept
        )
        if backward:
            spec = self.spec if both else None
            call = NormGradientCall(m, k, self.norm, self.activation, affine, False, self.dtype, spec, self.kept)
        verdict = registry.backend("norm_quantize", name).supports(call, self.dy.device)
        if not verdict:
            pytest.skip(f"{name}: {verdict.reason}")


def row_error(exact: Tensor) -> Tensor:
    return FLOAT32 * exact.abs().amax(1, keepdim=True)


def assert_turned(q: QTensor, q_t: QTensor) -> None:
    """The same bytes the other way, contiguous along M."""
    assert (q_t.spec, q_t.shape) == (q.spec, (q.shape[1], q.shape[0]))
    assert q_t.data.stride(1) == 1
    assert torch.equal(q_t.data.float().nan_to_num(-1), q.data.float().T.nan_to_num(-1))


@every_backend
@every_case
def test_forward_both_ways(name: str, case: tuple[Any, ...], device: torch.device) -> None:
    p = Problem(case, device)
    p.supported(name)
    amax = torch.full((), 1e-3, device=device)
    found = norm_quantize(p.x, p.spec, scale=p.scale, transpose=True, amax=amax, backend=name, **p.options)
    y, _ = p.exact()
    assert found.y is None
    assert found.h is p.x
    assert excess(found.q, y, row_error(y)) <= 1
    assert excess(found.q, y * (1 + 2.0**-5), row_error(y)) > 1  # and notices 3 %
    assert_turned(found.q, found.q_t)
    torch.testing.assert_close(amax.double(), y.abs().max(), rtol=1e-5, atol=0)
    law = norm_quantize(p.x, p.spec, scale=p.scale, transpose=True, backend="reference", **p.options)
    torch.testing.assert_close(found.rstd, law.rstd, rtol=2e-5, atol=0)
    assert (found.mean is None) == (law.mean is None) == (p.norm == "rms")
    if found.mean is not None:
        torch.testing.assert_close(found.mean, law.mean, rtol=2e-5, atol=1e-6)


@every_backend
@every_case
def test_gradient_both_ways(name: str, case: tuple[Any, ...], device: torch.device) -> None:
    """dx in FP8, its transpose, its largest value, dweight and dbias. On the way dx may be rounded to the 16 bits of x."""
    p = Problem(case, device)
    p.supported(name, backward=True)
    kept = norm_quantize(p.x, p.spec, scale=p.scale, transpose=True, backend="reference", **p.options)
    amax = torch.zeros((), device=device)
    back = norm_gradient(
        p.dy, kept.h, kept.mean, kept.rstd, spec=p.spec, scale=p.scale, amax=amax, backend=name, **p.options
    )
    _, (dx, dw, db) = p.exact()
    assert isinstance(back.dx, QTensor)
    slack = (
        2 * row_error(dx) + (0.0 if p.dtype == torch.float32 else 2.0**-7) * dx.abs()
    )  # one unit: the interpreter truncates
    assert excess(back.dx, dx, slack) <= 1
    assert excess(back.dx, dx * (1 + 2.0**-5), slack) > 1
    assert_turned(back.dx, back.dx_t)
    torch.testing.assert_close(amax.double(), dx.abs().max(), rtol=1e-4, atol=0)
    assert_parameters(back, dw, db, p)


def assert_parameters(back: Any, dw: Tensor | None, db: Tensor | None, p: Problem) -> None:
    for ours, exact in ((back.weight, dw), (back.bias, db)):
        assert (ours is None) == (exact is None)
        if exact is not None:
            assert ours.dtype == p.dtype
            assert (ours.double() - exact).abs().max() <= (FLOAT32 + ROUNDING[p.dtype]) * exact.abs().max()


@every_backend
@pytest.mark.parametrize("case", CASES[3:], ids=lambda c: f"{c[0]}-{c[5]}")
def test_a_gradient_in_16_bits_of_an_x_in_fp8(name: str, case: tuple[Any, ...], device: torch.device) -> None:
    p = Problem(case, device)
    p.supported(name, backward=True, both=False)
    kept = norm_quantize(p.x, p.spec, scale=p.scale, backend="reference", **p.options)
    amax = torch.zeros((), device=device)
    back = norm_gradient(p.dy, kept.h, kept.mean, kept.rstd, amax=amax, backend=name, **p.options)
    _, (dx, dw, db) = p.exact()
    assert back.dx.dtype == p.dtype
    assert back.dx_t is None
    allowed = 2 * FLOAT32 + ROUNDING[p.dtype]
    assert ((back.dx.double() - dx).abs() <= allowed * dx.abs().amax(1, keepdim=True)).all()
    torch.testing.assert_close(amax.double(), dx.abs().max(), rtol=1e-4, atol=0)
    assert_parameters(back, dw, db, p)


@every_backend
@pytest.mark.parametrize("kept", [None, "e4m3:tensor", "e4m3:row"])
def test_sixteen_bits_alone(name: str, kept: str | None, device: torch.device) -> None:
    case = ("layer", "tanh", (True, True), (5, 70), torch.float32, kept, "e4m3:tensor:static")
    p = Problem(case, device)
    p.supported(name, both=False)
    amax = torch.zeros((), device=device)
    found = norm_quantize(p.x, None, out_dtype=torch.bfloat16, amax=amax, backend=name, **p.options)
    y, _ = p.exact()
    assert found.q is None
    assert found.q_t is None
    assert found.y.dtype == torch.bfloat16
    assert ((found.y.double() - y).abs() <= row_error(y) + ROUNDING[torch.bfloat16] * y.abs()).all()
    torch.testing.assert_close(amax.double(), y.abs().max(), rtol=1e-5, atol=0)


@every_backend
@pytest.mark.parametrize("both", [True, False])
def test_amax_only_rises_and_ignores_what_is_not_finite(name: str, both: bool, device: torch.device) -> None:
    case = ("rms", "none", (True, False), (20, 40), torch.float32, None, "e4m3:tensor:static")
    p = Problem(case, device)
    p.supported(name, both=both)
    p.x[3, 5], p.x[11, 0] = math.nan, math.inf
    options = {"scale": p.scale, "transpose": both, "backend": name, **p.options}
    amax = torch.zeros((), device=device)
    found = norm_quantize(p.x, p.spec, amax=amax, **options)
    y = activate(F.rms_norm(p.x.double(), (40,), p.weight.double(), 1e-6), "none")
    torch.testing.assert_close(amax.double(), y[y.isfinite()].abs().max(), rtol=1e-5, atol=0)
    assert torch.equal(found.q.data.float().isnan(), y.isnan())
    if both:
        assert_turned(found.q, found.q_t)
    high = torch.full((), 1e9, device=device)
    norm_quantize(p.x, p.spec, amax=high, **options)
    assert high == 1e9
    back = torch.zeros((), device=device)
    spec = {"spec": p.spec, "scale": p.scale} if both else {}
    norm_gradient(p.dy, found.h, found.mean, found.rstd, amax=back, backend=name, **spec, **p.options)
    assert 0 < back < math.inf


@every_backend
@pytest.mark.parametrize("both", [True, False])
def test_an_offset_does_not_drown_the_variance(name: str, both: bool, device: torch.device) -> None:
    """A common offset of 300 standard deviations, and a row whose first columns lie elsewhere."""
    case = ("layer", "none", (False, False), (6, 1500), torch.float32, None, "e4m3:tensor:static")
    p = Problem(case, device)
    p.supported(name, both=both)
    p.x = torch.randn(6, 1500, device=device) + 300
    p.x[0, :600] = 500
    found = norm_quantize(p.x, p.spec, scale=p.scale, transpose=both, backend=name, **p.options)
    y, _ = p.exact()
    assert excess(found.q, y, 1e-3) <= 1
    spread = p.x.double().var(1, correction=0, keepdim=True)
    torch.testing.assert_close(found.rstd.double(), (spread + 1e-5).rsqrt(), rtol=2e-4, atol=0)


@every_backend
def test_rows_that_are_views(name: str, device: torch.device) -> None:
    p = Problem(CASES[0], device)
    p.supported(name)
    wide = torch.randn(37, 320, device=device, dtype=p.dtype)
    options = {"scale": p.scale, "transpose": True, "backend": name, **p.options}
    found = norm_quantize(wide[:, 9:309], p.spec, **options)
    same = norm_quantize(wide[:, 9:309].contiguous(), p.spec, **options)
    assert torch.equal(found.q.data.float(), same.q.data.float())
    gradient = {"spec": p.spec, "scale": p.scale, "backend": name, **p.options}
    dy = torch.randn(300, 37, device=device, dtype=p.dtype).T
    ours = norm_gradient(dy, found.h, found.mean, found.rstd, **gradient)
    theirs = norm_gradient(dy.contiguous(), same.h, same.mean, same.rstd, **gradient)
    assert torch.equal(ours.dx.data.float(), theirs.dx.data.float())


@every_backend
def test_no_rows(name: str, device: torch.device) -> None:
    p = Problem(CASES[0], device)
    p.supported(name)
    x, amax = torch.zeros(0, 300, device=device, dtype=p.dtype), torch.full((), 2.0, device=device)
    kept = norm_quantize(x, p.spec, scale=p.scale, transpose=True, amax=amax, backend=name, **p.options)
    assert (kept.q.shape, kept.q_t.shape, float(amax)) == ((0, 300), (300, 0), 2.0)
    back = norm_gradient(x, x, kept.mean, kept.rstd, spec=p.spec, scale=p.scale, backend=name, **p.options)
    assert (back.dx.shape, back.dx_t.shape) == ((0, 300), (300, 0))
    assert (back.weight == 0).all()


@every_backend
def test_compiles_without_a_graph_break_and_still_raises_amax(name: str, device: torch.device) -> None:
    p = Problem(CASES[0], device)
    p.supported(name)
    registry.load("norm_quantize")

    def step(x: Tensor, dy: Tensor, amax: Tensor, gradient_amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept = norm_quantize(x, STATIC, scale=p.scale, transpose=True, amax=amax, backend=name, **p.options)
        back = norm_gradient(
            dy, kept.h, kept.mean, kept.rstd, spec=STATIC, scale=p.scale, amax=gradient_amax, backend=name, **p.options
        )
        return kept.q_t.data, back.dx_t.data, back.weight

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    plain, traced = (torch.zeros(2, device=device) for _ in range(2))
    expected = step(p.x, p.dy, plain[0], plain[1])
    found = compiled(p.x, p.dy, traced[0], traced[1])
    assert torch.equal(plain, traced)
    assert (plain > 0).all()
    for ours, law in zip(found, expected, strict=True):
        assert torch.equal(ours.float(), law.float())


def test_the_ops_keep_their_word_triton(device: torch.device) -> None:
    """Schema, fake tensors, mutation: torch's own check of a custom op."""
    p = Problem(("layer", "silu", (True, True), (3, 20), torch.bfloat16, None, "e4m3:tensor:static"), device)
    p.supported("triton")
    from loka.kernels.norm_quantize import triton_ops as ops

    checks = ("test_schema", "test_faketensor")
    amax = torch.zeros((), device=device)
    operands = (p.x, None, p.weight, p.bias, p.scale, amax, 0, 2, 1e-5, torch.float8_e4m3fn)
    nothing = None, 0.0, 0
    torch.library.opcheck(ops.norm_quantize_both, (*operands, *nothing), test_utils=checks)
    drawn = torch.tensor([3], device=device), 0.2, 1
    torch.library.opcheck(ops.norm_quantize_both, (*operands, *drawn), test_utils=checks)
    _, _, _, mean, rstd = ops.norm_quantize_both(*operands, *nothing)
    kept = (p.dy, p.x, None, p.weight, p.bias, mean, rstd)
    torch.library.opcheck(
        ops.norm_gradient_both, (*kept, p.scale, None, 0, 2, torch.float8_e5m2, *nothing), test_utils=checks
    )
    torch.library.opcheck(ops.norm_gradient, (*kept, None, amax, 0, 2, *nothing), test_utils=checks)
    alone = (p.x, None, None, p.weight, p.bias, None, amax, 0, 2, 1e-5, torch.float8_e4m3fn, 0, False, torch.bfloat16)
    torch.library.opcheck(ops.norm_quantize, (*alone, *nothing, None), test_utils=checks)
    given = (p.x, None, None, p.weight, p.bias, p.scale, amax, 0, 2, 1e-5, torch.float8_e4m3fn, 1, False, None)
    torch.library.opcheck(ops.norm_quantize, (*given, *drawn, None), test_utils=checks)
    torch.library.opcheck(ops.norm_quantize, (*given, None, 0.0, 0, p.weight[None].repeat(3, 1)), test_utils=checks)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slopes_are_those_of_autograd(name: str) -> None:
    z = torch.cat([torch.linspace(-6, 6, 97), torch.tensor([0.0, 3.0, -3.0])]).double().requires_grad_()
    expected = torch.autograd.grad(activate(z, name).sum(), z)[0]
    torch.testing.assert_close(activation_slope(z.detach(), name), expected, rtol=1e-9, atol=1e-12)


def test_mistakes_are_named() -> None:
    x = torch.randn(4, 32)
    with pytest.raises(ValueError, match="asked for nothing"):
        norm_quantize(x, None, norm="rms")
    with pytest.raises(ValueError, match="shares one given scale with q, e4m3:row does not"):
        norm_quantize(x, Spec.parse("e4m3:row"), norm="rms", transpose=True)
    with pytest.raises(ValueError, match="an FP8 gradient takes one given scale, e4m3:row does not"):
        norm_gradient(x, x, None, torch.ones(4, 1), norm="rms", spec=Spec.parse("e4m3:row"))
    with pytest.raises(ValueError, match="amax is a float32 scalar"):
        norm_quantize(x, STATIC, norm="rms", scale=torch.ones(()), amax=torch.zeros(2))
    with pytest.raises(ValueError, match="no FP8 tensor; hint: dequantize"):
        norm_quantize(quantize(x, Spec.parse("e4m3:tensor")), STATIC, norm="rms", scale=torch.ones(()), residual=x)
    with pytest.raises(ValueError, match="one scale, or one a row, not e4m3:1x128"):
        norm_quantize(quantize(x, Spec.parse("e4m3:1x128")), STATIC, norm="rms", scale=torch.ones(()))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (NormCall(4, 32, STATIC, "block", transpose=True), "block norm is not written both ways"),
        (NormCall(4, 32, STATIC, "rms", residual=True, transpose=True), "not written together with FP8 both ways"),
        (NormCall(4, 32, STATIC, "rms", out_dtype=torch.bfloat16, transpose=True), "not together with torch.bfloat16"),
        (NormCall(4, 32, STATIC, "rms", kept=Spec.parse("int8:row")), "reads an x in e4m3 or e5m2, not int8:row"),
        (NormGradientCall(4, 32, "rms", in_dtype=torch.float64, spec=STATIC), "reads bf16, fp16 and fp32"),
        (NormGradientCall(4, 16385, "rms"), "at most 16384 wide"),
    ],
    ids=str,
)
def test_triton_refuses_with_the_reason(call: Any, reason: str) -> None:
    verdict = registry.backend("norm_quantize", "triton").supports(call, torch.device("cuda"))
    assert not verdict
    assert reason in verdict.reason


def test_an_explicit_backend_that_cannot_raises() -> None:
    x = torch.randn(4, 300)
    with pytest.raises(UnsupportedError, match="cannot run 4x300 block none -> e4m3:tensor:static \\+ T on cpu"):
        norm_quantize(x, STATIC, norm="block", scale=torch.ones(()), transpose=True, backend="triton")


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
def test_triton_under_its_interpreter() -> None:
    run_interpreted(__file__)
