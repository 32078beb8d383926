"""fused_linear, forward: every backend against a float64 formulation (torch's own norms) and against the reference."""

import math

import pytest
import torch
from torch import Tensor

from kernels.fp8_bounds import excess, scale_error
from kernels.fused_cases import (
    ACTIVATIONS,
    BLOCK,
    FLOAT32,
    GROUPED,
    INTERPRETED,
    ROUNDING,
    STATIC,
    Case,
    assert_codes_close,
    every_backend,
    normalize,
    operands,
    run,
    supported,
)
from kernels.interpreter import run_interpreted
from loka.formats import QTensor, Spec
from loka.kernels import registry
from loka.kernels.fused_linear import NORMALIZED, NORMALIZED_SCALE, FusedResult, fused_linear
from loka.kernels.scaled_mm import MatmulCall
from loka.measure.conformance import accumulation_error

STEEPEST = 1.5  # no activation here has a larger slope
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


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
def test_triton_under_its_interpreter() -> None:
    run_interpreted(__file__)
