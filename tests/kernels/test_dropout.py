"""Dropout inside our kernels: what is drawn, and every kernel that draws against the same layer with the same mask."""

import math

import pytest
import torch
from torch import Tensor

from kernels.fused_cases import ACTIVATIONS, INTERPRETED, every_backend, supported
from kernels.interpreter import run_interpreted
from loka.formats import QTensor, Spec, quantize
from loka.kernels import registry
from loka.kernels.dropout import Dropout, factor_of, keep_mask
from loka.kernels.fused_linear import DgradCall, FusedCall, fused_linear, fused_linear_dgrad, fused_linear_gradient
from loka.kernels.norm_quantize import NormCall, norm_gradient, norm_quantize

TENSOR, STATIC, DELAYED = (Spec.parse(f"e4m3:tensor{mode}") for mode in ("", ":static", ":delayed"))
SHAPE = (37, 48, 90)  # with a norm 300 columns: a block of 256 and a ragged one
CODES, WIDE = "e4m3:tensor:static", "bfloat16"
LAYERS = [("relu", 0, CODES), ("gelu", 0, CODES), ("none", 0, CODES), ("leaky_relu", 0, CODES), ("sigmoid", 0, CODES),
          ("silu", 256, CODES), ("relu", 256, CODES), ("relu", 0, WIDE), ("none", 0, WIDE)]  # fmt: skip
every_layer = pytest.mark.parametrize(("activation", "block", "out"), LAYERS)


def draw(p: float, seed: int = 7, stream: int = 0) -> Dropout:
    return Dropout(p, torch.tensor([seed]), stream)


def on(device: torch.device, dropout: Dropout) -> Dropout:
    return dropout._replace(seed=dropout.seed.to(device))


@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_kept_is_one_minus_p(p: float) -> None:
    kept = keep_mask(draw(p), 2000, 1000).double()
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(float(kept.mean()) - (1 - p)) <= 4 * deviation
    for axis in (0, 1):  # no row and no column has a share of its own
        sums = (kept - (1 - p)).sum(axis) / math.sqrt(max(p * (1 - p), 1e-9) * kept.shape[axis])
        assert float(sums.var()) == pytest.approx(min(1.0, p * 1e9), abs=0.2)
        assert float(sums.abs().max()) < 6


def test_draws_of_rows_columns_streams_and_seeds_have_nothing_in_common() -> None:
    p, shape = 0.3, (2000, 1000)
    first = keep_mask(draw(p), *shape).double() - (1 - p)
    others = {
        "next row": (first[1:], first[:-1]),
        "next column": (first[:, 1:], first[:, :-1]),
        "eight columns on": (first[:, 8:], first[:, :-8]),
        "next stream": (first, keep_mask(draw(p, stream=1), *shape).double() - (1 - p)),
        "next seed": (first, keep_mask(draw(p, seed=8), *shape).double() - (1 - p)),
        "seed that differs above 2^32": (first, keep_mask(draw(p, seed=7 + 2**32), *shape).double() - (1 - p)),
    }
    for name, (a, b) in others.items():
        score = float((a * b).mean()) / (p * (1 - p)) * math.sqrt(a.numel())
        assert abs(score) < 4.5, (name, score)


def test_a_row_has_nothing_in_common_with_itself_further_on() -> None:
    """The spread over rows of the correlation at every lag is that of independent draws: a bad mix repeats itself in some rows, which means hide."""
    drawn = (keep_mask(draw(0.5), 512, 2048).double() - 0.5) * 2
    power = torch.fft.rfft(drawn, 4096).abs().square()
    correlations = torch.fft.irfft(power)[:, 1:1024] / (2048 - torch.arange(1, 1024)).sqrt()
    assert 0.97 < float(correlations.var(0).mean()) < 1.03
    assert float(correlations.var(0).max()) < 1.4


def test_some_rows_have_the_draws_they_have_among_all() -> None:
    whole, rows = keep_mask(draw(0.4), 50, 90), torch.tensor([3, 49, 0])
    assert torch.equal(keep_mask(draw(0.4), rows, 90), whole[rows])
    assert torch.equal(keep_mask(draw(0.4), 50, 40), whole[:, :40])
    assert keep_mask(draw(0.0), 50, 90).all()
    assert not torch.equal(keep_mask(draw(0.4, stream=1), 50, 90), whole)


def undropped(q: QTensor, factor: float) -> Tensor:
    return q.dequantize() / factor


@every_backend
@pytest.mark.parametrize(("activation", "block", "out"), [*LAYERS, ("silu", 256, "e4m3:1x128")])
def test_a_fused_layer_drops_what_the_mask_says(name: str, activation: str, block: int, out: str, device: torch.device) -> None:  # fmt: skip
    m, k, n = *SHAPE[:2], 300 if block else SHAPE[2]
    spec = Spec.parse(out) if ":" in out else getattr(torch, out)
    supported(name, FusedCall(m, k, n, TENSOR, TENSOR, spec, block, activation, dropout=True), device)
    a, b = quantize(torch.randn(m, k, device=device), TENSOR), quantize(torch.randn(n, k, device=device) / 8, TENSOR)
    scale = torch.full((), 1 / 16, device=device) if "static" in out else None
    options = {"out": spec, "out_scale": scale, "norm_block": block, "activation": activation, "bias": torch.randn(n, device=device), "keep": True, "transpose": isinstance(spec, Spec)}  # fmt: skip
    dropout, amax = on(device, draw(0.3, stream=2)), torch.zeros((), device=device)
    plain_amax = torch.zeros((), device=device)
    plain = fused_linear(a, b, **options, amax=plain_amax, backend=name)
    made = fused_linear(a, b, **options, amax=amax, dropout=dropout, backend=name)
    kept, factor = keep_mask(dropout, m, n), factor_of(0.3)
    assert torch.equal(amax, plain_amax)  # scales are those of the layer without dropout
    if scale is not None:  # the same codes or zero, and a scale with the factor
        assert torch.equal(made.y.data.float(), torch.where(kept, plain.y.data.float(), 0.0))
        assert torch.equal(made.y_t.data.float(), made.y.data.float().T)
        assert float(made.y.scale) == float(made.y_t.scale) == pytest.approx(factor / 16)
    else:
        wide = [y.dequantize() if isinstance(y, QTensor) else y.float() for y in (made.y, plain.y)]
        torch.testing.assert_close(wide[0], torch.where(kept, wide[1] * factor, 0.0), rtol=0.14 if ":" in out else 0.01, atol=0.02)  # fmt: skip
    if isinstance(made.z, QTensor) and activation not in ("relu", "leaky_relu"):
        same = torch.where(kept, plain.z.dequantize(), 0.0) if activation == "sigmoid" else plain.z.dequantize()
        assert torch.equal(made.z.dequantize(), same)
    law = fused_linear(a, b, **options, dropout=dropout, backend="reference")
    if isinstance(spec, Spec):
        torch.testing.assert_close(made.y.dequantize(), law.y.dequantize(), rtol=0.14, atol=0.02)
        assert torch.equal(made.y.dequantize() == 0, law.y.dequantize() == 0) or "relu" in activation


@every_backend
@every_layer
def test_the_gradient_of_a_fused_layer_is_autograds_with_the_same_mask(name: str, activation: str, block: int, out: str, device: torch.device) -> None:  # fmt: skip
    m, k, n = *SHAPE[:2], 300 if block else SHAPE[2]
    spec = Spec.parse(out) if ":" in out else getattr(torch, out)
    supported(name, FusedCall(m, k, n, TENSOR, TENSOR, spec, block, activation, dropout=True), device)
    a, b = quantize(torch.randn(m, k, device=device), TENSOR), quantize(torch.randn(n, k, device=device) / 8, TENSOR)
    scale, dropout = torch.full((), 1 / 16, device=device) if ":" in out else None, on(device, draw(0.4, stream=1))
    kept = fused_linear(a, b, out=spec, out_scale=scale, norm_block=block, activation=activation, keep=True, dropout=dropout, backend=name)  # fmt: skip
    specs = "e4m3:tensor" if out == WIDE else "e4m3:tensor:static"  # a scale of its own takes a kernel of its own
    dy, given = torch.randn(m, n, device=device), torch.full((), 2.0**-6, device=device) if "static" in specs else None
    back = fused_linear_gradient(dy, kept, spec=Spec.parse(specs), spec_t=Spec.parse(specs), scale=given, norm_block=block, activation=activation, bias=True, dropout=dropout, backend=name)  # fmt: skip
    p = (a.dequantize() @ b.dequantize().T).double().requires_grad_()
    z = p if not block else torch.cat([torch.nn.functional.rms_norm(c, c.shape[1:], eps=1e-6) for c in p.split(256, 1)], 1)  # fmt: skip
    (ACTIVATIONS[activation](z) * keep_mask(dropout, m, n) * factor_of(0.4) * dy).sum().backward()
    assert float((back.g.dequantize() - p.grad).norm() / p.grad.norm()) < 0.06
    assert float((back.g_t.dequantize().T - p.grad).norm() / p.grad.norm()) < 0.06
    assert float((back.bias - p.grad.sum(0)).norm() / p.grad.sum(0).norm()) < 0.06
    if not block:  # what was dropped has no gradient at all
        assert (back.g.dequantize()[~keep_mask(dropout, m, n)] == 0).all()


@every_backend
@pytest.mark.parametrize(
    ("activation", "form"), [("relu", "fp8"), ("silu", "fp8"), ("none", "fp8"), ("tanh", "fp8"), ("relu", "bf16")]
)
def test_a_step_of_backward_drops_what_forward_dropped(name: str, activation: str, form: str, device: torch.device) -> None:  # fmt: skip
    m, k, n = SHAPE
    supported(name, DgradCall(m, k, n, TENSOR, TENSOR, DELAYED, dropout=True), device)
    dropout = on(device, draw(0.25, stream=3))
    a, b = quantize(torch.randn(m, 48, device=device), TENSOR), quantize(torch.randn(n, 48, device=device) / 7, TENSOR)
    out, scale = (STATIC, torch.full((), 1 / 32, device=device)) if form == "fp8" else (torch.bfloat16, None)
    before = fused_linear(a, b, out=out, out_scale=scale, norm_block=0, activation=activation, keep=True, dropout=dropout, backend=name)  # fmt: skip
    g, w_t = quantize(torch.randn(m, k, device=device), TENSOR), quantize(torch.randn(n, k, device=device) / 8, TENSOR)
    amax, given = torch.zeros((), device=device), torch.full((), 2.0**-5, device=device)
    step = fused_linear_dgrad(g, w_t, before.z, spec=DELAYED, scale=given, activation=activation, amax=amax, bias=True, dropout=dropout, backend=name)  # fmt: skip
    z = (a.dequantize() @ b.dequantize().T).double().requires_grad_()
    kept = keep_mask(dropout, m, n)
    arriving = g.dequantize().double() @ w_t.dequantize().double().T
    (ACTIVATIONS[activation](z) * kept * factor_of(0.25) * arriving).sum().backward()
    assert float((step.g.dequantize() - z.grad).norm() / z.grad.norm()) < 0.07
    assert torch.equal(step.g_t.dequantize(), step.g.dequantize().T)
    assert (step.g.dequantize()[~kept] == 0).all()
    torch.testing.assert_close(amax.double(), z.grad.abs().max(), rtol=0.05, atol=0)
    assert float((step.bias - z.grad.sum(0)).norm() / z.grad.sum(0).norm()) < 0.06


def norm_supported(name: str, call: NormCall, device: torch.device) -> None:
    verdict = registry.backend("norm_quantize", name).supports(call, device)
    if not verdict:
        pytest.skip(f"{name}: {verdict.reason}")


@pytest.mark.parametrize("name", registry.BACKENDS["norm_quantize"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_a_norm_drops_what_the_mask_says_both_ways(name: str, norm: str, transpose: bool, wide: bool, device: torch.device) -> None:  # fmt: skip
    m, k = 37, 300
    if wide and transpose:
        pytest.skip("16 bits are not written beside a transpose")
    norm_supported(name, NormCall(m, k, STATIC, norm, "silu", True, transpose=transpose, dropout=True), device)
    x, weight, bias = torch.randn(m, k, device=device), 1 + 0.1 * torch.randn(k, device=device), 0.1 * torch.randn(k, device=device)  # fmt: skip
    bias = bias if norm == "layer" else None
    options = {"norm": norm, "weight": weight, "bias": bias, "activation": "silu", "backend": name, "eps": 1e-5}
    dropout, scale = on(device, draw(0.2, stream=1)), torch.full((), 1 / 32, device=device)
    amaxes = [torch.zeros((), device=device) for _ in range(2)]
    form = {"spec": None, "out_dtype": torch.float32} if wide else {"spec": STATIC, "scale": scale, "transpose": transpose}  # fmt: skip
    plain = norm_quantize(x, **form, amax=amaxes[0], **options)
    made = norm_quantize(x, **form, amax=amaxes[1], dropout=dropout, **options)
    kept, factor = keep_mask(dropout, m, k), factor_of(0.2)
    assert torch.equal(*amaxes)
    if wide:
        torch.testing.assert_close(made.y, torch.where(kept, plain.y * factor, 0.0))
    else:
        assert torch.equal(made.q.data.float(), torch.where(kept, plain.q.data.float(), 0.0))
        assert float(made.q.scale) == pytest.approx(factor / 32)
    if transpose:
        assert torch.equal(made.q_t.dequantize(), made.q.dequantize().T)
    exact = x.double().requires_grad_()
    size, w, b = (k,), weight.double().requires_grad_(), None if bias is None else bias.double()
    y = torch.nn.functional.layer_norm(exact, size, w, b, 1e-5) if norm == "layer" else torch.nn.functional.rms_norm(exact, size, w, 1e-5)  # fmt: skip
    dy = torch.randn(m, k, device=device)
    (torch.nn.functional.silu(y) * kept * factor * dy).sum().backward()
    fp8 = {"spec": DELAYED, "scale": torch.full((), 2.0**-6, device=device)} if transpose else {}
    back = norm_gradient(dy, made.h, made.mean, made.rstd, norm=norm, weight=weight, bias=bias, activation="silu", dropout=dropout, backend=name, **fp8)  # fmt: skip
    dx = back.dx.dequantize() if transpose else back.dx
    assert float((dx - exact.grad).norm() / exact.grad.norm()) < (0.05 if transpose else 1e-4)
    torch.testing.assert_close(back.weight.double(), w.grad, rtol=1e-3, atol=1e-3)
    if transpose:
        assert torch.equal(back.dx_t.dequantize(), back.dx.dequantize().T)


@every_backend
def test_what_is_not_finite_stays_visible(name: str, device: torch.device) -> None:
    supported(name, FusedCall(8, 64, 300, TENSOR, TENSOR, torch.float32, 0, "none", dropout=True), device)
    a, b = quantize(torch.randn(8, 64, device=device), TENSOR), quantize(torch.randn(300, 64, device=device), TENSOR)
    bias = torch.zeros(300, device=device)
    bias[5] = float("nan")
    made = fused_linear(a, b, out=torch.float32, norm_block=0, activation="none", bias=bias, dropout=on(device, draw(0.5)), backend=name)  # fmt: skip
    assert made.y[:, 5].isnan().all()
    assert made.y[:, 6].isfinite().all()


def test_what_cannot_be_drawn_is_refused() -> None:
    a = quantize(torch.randn(8, 64), TENSOR)
    for wrong, said in (
        (draw(1.0), "p is 1.0"),
        (draw(-0.1), "p is -0.1"),
        (Dropout(0.1, torch.tensor([1.0])), "one int64"),
    ):
        with pytest.raises(ValueError, match=said):
            fused_linear(a, a, out=torch.float32, norm_block=0, activation="none", dropout=wrong)
        with pytest.raises(ValueError, match=said):
            norm_quantize(torch.randn(4, 8), None, norm="rms", out_dtype=torch.float32, dropout=wrong)


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
def test_triton_under_its_interpreter() -> None:
    run_interpreted(__file__)
