"""norm_quantize: every backend against a float64 formulation (torch's own norms, autograd for the gradients) and against the reference."""

import math
import os
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fp8_bounds import excess, scale_error
from kernels.interpreter import run_interpreted
from loka.formats import Spec
from loka.kernels import BACKENDS, registry
from loka.kernels.backend import UnsupportedError
from loka.kernels.norm_quantize import (
    NormCall,
    NormGradient,
    NormGradientCall,
    NormResult,
    norm_gradient,
    norm_quantize,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")
every_backend = pytest.mark.parametrize("name", BACKENDS["norm_quantize"])
# A result of 16 bits is rounded once; Triton's interpreter truncates instead, which errs up to a whole unit.
ROUNDING = {
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0 ** -(7 if INTERPRETED else 8),
    torch.float16: 2.0 ** -(10 if INTERPRETED else 11),
}
FLOAT32 = 1e-5  # sums in another order, an approximate reciprocal; relative to the row
EPS = {"layer": 1e-5, "rms": 1e-6, "block": 1e-6}
ACTIVATIONS = {
    "none": lambda z: z, "relu": F.relu, "silu": F.silu, "hard_swish": F.hardswish, "gelu": F.gelu, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"), "leaky_relu": F.leaky_relu,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One way to call the op."""

    norm: str
    activation: str
    spec: str
    shape: tuple[int, int]
    dtype: torch.dtype = torch.float32
    affine: bool = False
    residual: bool = False
    out: torch.dtype | None = torch.float32

    def __str__(self) -> str:
        extras = "+affine" * self.affine + "+residual" * self.residual
        return f"{self.norm}-{self.activation}-{self.spec}-{self.shape[0]}x{self.shape[1]}{extras}"

    def call(self) -> NormCall:
        spec = Spec.parse(self.spec)
        return NormCall(*self.shape, spec, self.norm, self.activation, self.affine, self.residual, self.dtype, self.out)


CASES = [
    Case("layer", "none", "e4m3:row", (5, 300)),
    Case("layer", "silu", "e4m3:1x128", (5, 300), affine=True, residual=True),
    Case("layer", "relu", "e4m3:tensor:static", (5, 27), torch.bfloat16, affine=True, out=torch.bfloat16),
    Case("rms", "none", "e5m2:row", (5, 70), out=None),
    Case("rms", "hard_swish", "e4m3:1x128:pow2", (1, 300), torch.bfloat16, affine=True, residual=True),
    Case("rms", "silu", "e4m3:row:pow2", (130, 27), torch.float16, out=torch.float16),
    Case("rms", "relu", "e5m2:tensor:static", (5, 256)),
    Case("block", "none", "e4m3:row", (5, 300), torch.bfloat16, residual=True, out=torch.bfloat16),
    Case("block", "hard_swish", "e4m3:1x128", (5, 600)),
    Case("block", "silu", "e5m2:1x128", (3, 27)),
    Case("block", "relu", "e4m3:tensor:static", (1, 513), residual=True),
    Case("layer", "gelu", "e4m3:row", (5, 300), affine=True),
    Case("rms", "gelu_tanh", "e4m3:tensor:static", (5, 70), torch.bfloat16, affine=True, out=None),
    Case("layer", "tanh", "e4m3:1x128", (3, 200), affine=True),
    Case("rms", "sigmoid", "e4m3:row", (5, 70), affine=True),
    Case("layer", "leaky_relu", "e5m2:row", (5, 300)),
    # more rows than programs: each walks over several
    Case("layer", "silu", "e4m3:row", (29, 2100), affine=True, residual=True),
    Case("rms", "sigmoid", "e4m3:1x128", (14, 5000), residual=True),
    Case("block", "relu", "e4m3:tensor:static", (25, 4096)),
    # rows of two parts that end where the row does (512 + 256)
    Case("layer", "silu", "e4m3:tensor:static", (6, 768), torch.bfloat16, affine=True, out=torch.bfloat16),
    Case("block", "hard_swish", "e4m3:1x128", (5, 768), residual=True),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def run(name: str, case: Case, x: Tensor, spec: Spec | None = None, **extra: Tensor | None) -> NormResult:
    spec = Spec.parse(case.spec) if spec is None else spec
    scale = torch.full((), 2.0**-5, device=x.device) if spec.mode == "static" else None
    options = {"activation": case.activation, "out_dtype": case.out, "scale": scale, **extra}
    return norm_quantize(x, spec, norm=case.norm, backend=name, **options)


def gradient_of(dy: Tensor, kept: NormResult, **options: object) -> NormGradient:
    """From what forward kept."""
    return norm_gradient(dy, kept.h, kept.mean, kept.rstd, **options)


def operands(case: Case, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows of different size and a zero row; parameters near 1 and 0."""
    m, k = case.shape
    x = torch.randn(m, k) * torch.exp(torch.randn(m, 1))
    if m > 3:
        x[2] = 0
    extra = {"residual": torch.randn(m, k)} if case.residual else {}
    if case.affine:
        extra |= {"weight": 1 + 0.3 * torch.randn(k), "bias": 0.3 * torch.randn(k)}
    return x.to(device, case.dtype), {key: t.to(device, case.dtype) for key, t in extra.items()}


def exact(h: Tensor, case: Case, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """The layer in float64, by torch's own norms; block norm is an RMS norm of each slice of 256 columns."""
    h, eps = h.double(), EPS[case.norm]
    if case.norm == "layer":
        p = F.layer_norm(h, h.shape[1:], eps=eps)
    else:
        width = 256 if case.norm == "block" else h.shape[1]
        p = torch.cat([F.rms_norm(part, part.shape[1:], eps=eps) for part in h.split(width, 1)], 1)
    p = p if weight is None else p * weight.double()
    p = p if bias is None else p + bias.double()
    return ACTIVATIONS[case.activation](p)


def supported(name: str, case: Case, device: torch.device) -> None:
    verdict = registry.backend("norm_quantize", name).supports(case.call(), device)
    if not verdict:
        pytest.skip(f"{name}: {verdict.reason}")


def relative(out: Tensor, expected: Tensor) -> float:
    """Worst difference, relative to the largest magnitude of its row."""
    size = expected.abs().amax(1, keepdim=True).clamp(min=1e-30)
    return float(((out.double() - expected) / size).abs().max())


def parameters(extra: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: extra[key] for key in ("weight", "bias") if key in extra}


@every_backend
@every_case
def test_forward_is_float64_up_to_rounding(name: str, case: Case, device: torch.device) -> None:
    supported(name, case, device)
    x, extra = operands(case, device)
    before = x.clone()
    result = run(name, case, x, **extra)
    assert torch.equal(x, before)
    if case.residual:
        assert relative(result.h, x.double() + extra["residual"].double()) <= ROUNDING[case.dtype]
        assert result.h.dtype == case.dtype
    else:
        assert torch.equal(result.h, x)
    y = exact(result.h, case, **parameters(extra))  # of the h that was kept: what backward and the next layer see
    assert excess(result.q, y, FLOAT32 * y.abs().amax(1, keepdim=True)) <= 1
    assert excess(result.q, y * (1 + 2.0**-5), FLOAT32 * y.abs().amax(1, keepdim=True)) > 1  # and notices 3 %
    if result.q.spec.mode == "dynamic":
        assert scale_error(result.q, y) <= FLOAT32
    if case.out is None:
        assert result.y is None
    else:
        assert result.y.dtype == case.out
        assert relative(result.y, y) <= FLOAT32 + ROUNDING[case.out]
        assert relative(result.y * (1 + 4 * (FLOAT32 + ROUNDING[case.out])), y) > FLOAT32 + ROUNDING[case.out]
    if not (INTERPRETED and case.residual and case.dtype != torch.float32):  # there h is truncated: another input
        assert_equals_the_reference(result, case, x, extra)


def assert_equals_the_reference(ours: NormResult, case: Case, x: Tensor, extra: dict[str, Tensor]) -> None:
    """Code for code, but for the rare element whose exact value lies between two codes within float32 rounding."""
    law = run("reference", case, x, **extra)
    assert (ours.q.spec, ours.q.shape, ours.rstd.shape) == (law.q.spec, law.q.shape, law.rstd.shape)
    torch.testing.assert_close(ours.q.scale, law.q.scale, rtol=FLOAT32, atol=0)
    torch.testing.assert_close(ours.rstd, law.rstd, rtol=FLOAT32, atol=0)
    assert (ours.mean is None) == (law.mean is None) == (case.norm != "layer")
    if ours.mean is not None:
        torch.testing.assert_close(ours.mean, law.mean, rtol=FLOAT32, atol=1e-6)
    codes = [r.q.data.contiguous().view(torch.uint8).int() for r in (ours, law)]
    apart = torch.where(ours.q.data.float() == law.q.data.float(), 0, (codes[0] - codes[1]).abs())  # -0 is 0
    assert apart.max() <= 1
    assert (apart != 0).double().mean() <= 0.002


def gradients(case: Case, h: Tensor, dy: Tensor, dh: Tensor | None, affine: dict[str, Tensor]) -> list[Tensor]:
    """By autograd in float64."""
    leaf = h.double().requires_grad_()
    leaves = [leaf, *(t.double().requires_grad_() for t in affine.values())]
    out = (exact(leaf, case, *leaves[1:]) * dy.double()).sum()
    return list(torch.autograd.grad(out if dh is None else out + (leaf * dh.double()).sum(), leaves))


@every_backend
@every_case
def test_backward_is_autograd_in_float64(name: str, case: Case, device: torch.device) -> None:
    supported(name, case, device)
    x, extra = operands(case, device)
    affine = parameters(extra)
    kept = run(name, case, x, **extra)
    dy = torch.randn(case.shape, device=device).to(case.dtype)
    dh = torch.randn(case.shape, device=device).to(case.dtype) if case.residual else None
    back = gradient_of(dy, kept, norm=case.norm, activation=case.activation, dh=dh, backend=name, **affine)
    dx, dw, db = back.dx, back.weight, back.bias
    expected = gradients(case, kept.h, dy, dh, affine)
    assert dx.dtype == case.dtype
    allowed = 2 * FLOAT32 + ROUNDING[case.dtype]
    live = x.abs().amax(1) > 0 if case.norm == "layer" else slice(None)  # rstd of a zero row is huge: see below
    assert relative(dx[live], expected[0][live]) <= allowed
    assert relative(dx[live] * (1 + 4 * allowed), expected[0][live]) > allowed
    for ours, law in zip((dw, db), expected[1:] or (None, None), strict=True):
        assert (ours is None) == (law is None)
        if law is not None:
            assert ours.dtype == case.dtype
            assert relative(ours[None], law[None]) <= allowed


@every_backend
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("case", [case for case in CASES if case.shape[1] in (300, 768, 2100, 4096)], ids=str)
def test_products_with_a_head(name: str, case: Case, heads: int, device: torch.device) -> None:
    supported(name, case, device)
    x, extra = operands(case, device)
    head = torch.randn(heads, case.shape[1], device=device).to(case.dtype)
    alone = norm_quantize(x, None, norm=case.norm, activation=case.activation, head=head, backend=name, **extra)
    y = exact(alone.h, case, **parameters(extra))
    assert alone.q is None
    assert alone.y is None
    size = (y.abs() @ head.double().abs().T).clamp(min=1e-30)
    assert float(((alone.dots.double() - y @ head.double().T) / size).abs().max()) < FLOAT32
    beside = run(name, case, x, head=head, **extra).dots  # of q, which is another kernel: sums in another order
    assert float(((beside - alone.dots) / size).abs().max()) < FLOAT32
    assert run(name, case, x, **extra).dots is None


@pytest.mark.parametrize("width", [1, 256, 257, 384, 512, 513, 768, 1000, 1536, 3072, 4000, 5000, 8192, 12000, 16384])
def test_a_row_is_covered_by_two_powers_of_two(width: int) -> None:
    kernels = pytest.importorskip("loka.kernels.norm_quantize.triton_kernels", exc_type=ImportError)
    first, rest = kernels.split_row(width)
    assert all(part & (part - 1) == 0 and part % 256 == 0 for part in (first, rest))
    assert width <= first + rest <= max(256, 2 * width - 1)
    if rest:
        assert first < width <= first + rest < 2 * first


@every_backend
@pytest.mark.parametrize("norm", ["layer", "rms", "block"])
def test_zero_rows_stay_zero_and_have_finite_gradients(name: str, norm: str, device: torch.device) -> None:
    case = Case(norm, "silu", "e4m3:row", (3, 40))
    supported(name, case, device)
    x = torch.zeros(3, 40, device=device)
    kept = run(name, case, x)
    assert (kept.q.data.float() == 0).all()
    assert (kept.q.scale == 1).all()
    torch.testing.assert_close(kept.rstd, torch.full_like(kept.rstd, EPS[norm] ** -0.5), rtol=FLOAT32, atol=0)
    dy = torch.randn(3, 40, device=device)
    dx = gradient_of(dy, kept, norm=norm, activation="silu", backend=name).dx
    assert relative(dx, gradients(case, x, dy, None, {})[0]) <= 2 * FLOAT32


@every_backend
@pytest.mark.parametrize(
    ("spec", "norm"), [("e4m3:row", "layer"), ("e5m2:1x128", "block"), ("e4m3:tensor:static", "rms")]
)
def test_a_nan_row_changes_no_other_row(name: str, spec: str, norm: str, device: torch.device) -> None:
    case = Case(norm, "hard_swish", spec, (6, 300))
    supported(name, case, device)
    x = torch.randn(6, 300, device=device)
    clean = run(name, case, x)
    x[1, 7], x[3, 290], x[4, 3] = math.nan, math.inf, -math.inf
    result, law = run(name, case, x), run("reference", case, x)
    untouched = [0, 2, 5]
    assert torch.equal(result.q.data[untouched].float(), clean.q.data[untouched].float())
    assert torch.equal(result.y[untouched], clean.y[untouched])
    assert torch.equal(result.y.isnan(), law.y.isnan())
    assert torch.equal(result.q.data.float().isnan(), law.q.data.float().isnan())
    assert result.q.data[1].float().isnan().any()
    assert result.q.data[3].float().isnan().any()  # Inf * 0: an infinite row is not quietly finite
    if result.q.scale.dim():
        torch.testing.assert_close(result.q.scale, law.q.scale, rtol=FLOAT32, atol=0)
    dy = torch.randn(6, 300, device=device)
    dy[5, 2] = math.nan
    dx = gradient_of(dy, result, norm=norm, activation="hard_swish", backend=name).dx
    assert dx[[0, 2]].isfinite().all()
    assert dx[[1, 5]].isnan().any(1).all()


@every_backend
def test_strides_do_not_matter(name: str, device: torch.device) -> None:
    case = Case("layer", "silu", "e4m3:1x128", (9, 40), residual=True)
    supported(name, case, device)
    x, r, dy, dh = (torch.randn(40, 18, device=device).T[::2] for _ in range(4))
    wide = torch.randn(9, 80, device=device)
    for view in (x, wide[:, 5:45], wide[:, ::2], wide[:1, :40].expand(9, 40)):
        kept = run(name, case, view, residual=r)
        law = run(name, case, view.contiguous(), residual=r.contiguous())
        if name != "reference":  # torch sums a strided row in another order
            assert torch.equal(kept.q.data.float(), law.q.data.float())
        assert torch.equal(kept.h, law.h)
        torch.testing.assert_close(kept.y, law.y, rtol=FLOAT32, atol=1e-6)
        found = gradient_of(dy, kept, norm="layer", activation="silu", dh=dh, backend=name).dx
        expected = gradient_of(
            dy.contiguous(), law, norm="layer", activation="silu", dh=dh.contiguous(), backend=name
        ).dx
        torch.testing.assert_close(found, expected, rtol=FLOAT32, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS["norm_quantize"])
def test_strided_parameters(name: str, device: torch.device) -> None:
    case = Case("rms", "silu", "e4m3:row", (3, 40), affine=True)
    supported(name, case, device)
    x, dy = torch.randn(3, 40, device=device), torch.randn(3, 40, device=device)
    weight, bias = torch.randn(80, device=device)[::2], torch.randn(40, 2, device=device)[:, 1]
    kept = run(name, case, x, weight=weight, bias=bias)
    law = run(name, case, x, weight=weight.contiguous(), bias=bias.contiguous())
    assert torch.equal(kept.y, law.y)
    options = {"norm": "rms", "activation": "silu", "backend": name}
    found = gradient_of(dy, kept, weight=weight, bias=bias, **options)
    expected = gradient_of(dy, law, weight=weight.contiguous(), bias=bias.contiguous(), **options)
    for part in ("dx", "weight", "bias"):
        assert torch.equal(getattr(found, part), getattr(expected, part))


@every_backend
@pytest.mark.parametrize("norm", ["layer", "rms", "block"])
def test_no_rows(name: str, norm: str, device: torch.device) -> None:
    case = Case(norm, "silu", "e4m3:1x128", (0, 300), residual=True)
    supported(name, case, device)
    x = torch.zeros(0, 300, device=device)
    kept = run(name, case, x, residual=x)
    assert (kept.q.shape, kept.q.scale.shape, kept.y.shape, kept.h.shape) == ((0, 300), (0, 3), (0, 300), (0, 300))
    dx = gradient_of(x, kept, norm=norm, activation="silu", dh=x, backend=name).dx
    assert dx.shape == (0, 300)


def test_eps_is_used() -> None:
    x = torch.full((2, 8), 1e-3)
    for eps in (1e-6, 1e-2):
        result = norm_quantize(x, Spec.parse("e4m3:row"), norm="rms", eps=eps, backend="reference")
        torch.testing.assert_close(result.rstd, torch.full((2, 1), (1e-6 + eps) ** -0.5), rtol=FLOAT32, atol=0)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (NormCall(4, 32, Spec.parse("e4m3:tensor"), "rms"), "a tensor's scale must be given"),
        (NormCall(4, 32, Spec.parse("e4m3:row:static"), "rms"), "row and 1x128 scales are made here"),
        (NormCall(4, 32, Spec.parse("e4m3:128x128"), "rms"), "per tensor, row or 1x128, not 128x128"),
        (NormCall(4, 32, Spec.parse("int8:row"), "rms"), "writes e4m3 or e5m2 rounded to nearest, not int8:row"),
        (NormCall(4, 32, Spec.parse("e4m3:row:stochastic"), "rms"), "rounded to nearest"),
        (NormCall(4, 16385, Spec.parse("e4m3:row"), "rms"), "at most 16384 wide, not 16385"),
        (NormCall(4, 0, Spec.parse("e4m3:row"), "rms"), "a norm over nothing"),
        (NormCall(4, 32, Spec.parse("e4m3:row"), "rms", in_dtype=torch.float64), "reads bf16, fp16 and fp32"),
    ],
    ids=str,
)
def test_triton_refuses_with_the_reason(call: NormCall, reason: str) -> None:
    verdict = registry.backend("norm_quantize", "triton").supports(call, torch.device("cuda"))
    assert not verdict
    assert reason in verdict.reason


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="at most 8 rows here, got 9"):
        NormCall(4, 8, None, "layer", heads=9)
    x, spec = torch.ones(2, 300), Spec.parse("e4m3:row")
    with pytest.raises(ValueError, match="norm 'batch' is not one of layer, rms, block"):
        norm_quantize(x, spec, norm="batch")
    with pytest.raises(ValueError, match="activation 'mish' is not one of none, relu"):
        norm_quantize(x, spec, norm="rms", activation="mish")
    with pytest.raises(ValueError, match="block norm has no parameters; hint: fold"):
        norm_quantize(x, spec, norm="block", weight=torch.ones(300))
    with pytest.raises(
        UnsupportedError, match=r"'triton' cannot run 2x20000 rms none -> e4m3:row on cpu: a row must fit"
    ):
        norm_quantize(torch.ones(2, 20000), spec, norm="rms", backend="triton")


def test_a_gradient_call_names_its_dtype() -> None:
    """The text is the variant of a performance row: calls that differ in dtype must differ in it."""
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float32, "float32")):
        assert str(NormGradientCall(4, 32, "rms", in_dtype=dtype)) == f"4x32 gradient rms none -> {name}"
    low = NormGradientCall(4, 32, "rms", spec=Spec.parse("e4m3:tensor:delayed"))
    assert str(low) == "4x32 gradient rms none -> e4m3:tensor:delayed + T"


@every_backend
def test_a_scale_that_is_missing_or_unasked_is_refused(name: str, device: torch.device) -> None:
    case = Case("rms", "none", "e4m3:tensor:static", (2, 32))
    supported(name, case, device)
    x = torch.ones(2, 32, device=device)
    with pytest.raises(ValueError, match="e4m3:tensor:static needs a scale"):
        norm_quantize(x, Spec.parse("e4m3:tensor:static"), norm="rms", backend=name)
    with pytest.raises(ValueError, match=r"e4m3:row .* its (own )?scale"):
        norm_quantize(x, Spec.parse("e4m3:row"), norm="rms", scale=torch.ones(2, 1, device=device), backend=name)


@every_backend
def test_forward_compiles_without_a_graph_break(name: str, device: torch.device) -> None:
    case = Case("rms", "silu", "e4m3:1x128", (5, 300), residual=True)
    supported(name, case, device)
    registry.load("norm_quantize")
    x, r = (torch.randn(5, 300, device=device) for _ in range(2))
    spec = Spec.parse(case.spec)  # torch 2.11 cannot trace the making of one

    def forward(x: Tensor, r: Tensor) -> Tensor:
        return run(name, case, x, spec, residual=r).q.dequantize()

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, r), forward(x, r))


@pytest.mark.parametrize("name", BACKENDS["norm_quantize"])
def test_backward_compiles_without_a_graph_break(name: str, device: torch.device) -> None:
    case = Case("rms", "silu", "e4m3:1x128", (5, 300))
    supported(name, case, device)
    registry.load("norm_quantize")
    dy, x = torch.randn(5, 300, device=device), torch.randn(5, 300, device=device)
    kept = run(name, case, x)

    def backward(dy: Tensor) -> Tensor:
        return gradient_of(dy, kept, norm="rms", activation="silu", dh=dy, backend=name).dx

    compiled = torch.compile(backward, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(dy), backward(dy))


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
def test_triton_under_its_interpreter() -> None:
    run_interpreted(__file__)
