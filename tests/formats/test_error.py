"""Error metrics against values computed by hand, and their edges: zero references, NaN, Inf, nothing at all."""

import math

import pytest
import torch

from loka.formats import (
    Spec,
    cosine,
    mere,
    quantize,
    relative_l2,
    saturated_fraction,
    sqnr,
    underflowed_fraction,
)

METRICS = [mere, relative_l2, sqnr, cosine]
every_metric = pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.__name__)
NAN, INF = math.nan, math.inf


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_mere_by_hand() -> None:
    # rms = sqrt((9 + 16) / 2); both references are above 1 % of it: (0.3 / 3 + 0.2 / 4) / 2
    assert mere(t(3.3, 4.2), t(3, 4)) == pytest.approx(0.075, rel=1e-12)
    # the guard: rms = sqrt(10000 / 2) = 70.71..., floor = 0.7071...; errors 0 and 0.5
    assert mere(t(100, 0.5), t(100, 0)) == pytest.approx(0.5 / math.sqrt(0.5) / 2, rel=1e-12)
    assert mere(t(100, 1.5), t(100, 1), guard=0.1) == pytest.approx(0.5 / math.sqrt(50.005) / 2, rel=1e-12)


def test_mere_without_guard_is_the_plain_mean() -> None:
    assert mere(t(1.1, 1e-6), t(1.0, 2e-6), guard=0) == pytest.approx((0.1 + 0.5) / 2, rel=1e-12)
    assert mere(t(1.0, 0.0), t(1.0, 0.0), guard=0) == 0
    assert mere(t(1.0, 1e-9), t(1.0, 0.0), guard=0) == INF
    for guard in (-0.1, NAN):
        with pytest.raises(ValueError, match="guard is a share of rms"):
            mere(t(1), t(1), guard=guard)


def test_the_guard_makes_mere_stable_where_the_plain_mean_is_not() -> None:
    ref = torch.randn(1000, 1000)
    out = ref + 0.05 * torch.randn(1000, 1000)
    sizes = (100, 1000)
    guarded = [mere(out[:n, :n], ref[:n, :n]) for n in sizes]
    plain = [mere(out[:n, :n], ref[:n, :n], guard=0) for n in sizes]
    assert guarded[1] == pytest.approx(guarded[0], rel=0.1)
    assert abs(plain[1] - plain[0]) > 0.1 * plain[0]


def test_relative_l2_and_sqnr_by_hand() -> None:
    assert relative_l2(t(3, 4.5), t(3, 4)) == pytest.approx(0.1, rel=1e-12)
    assert sqnr(t(3, 4.5), t(3, 4)) == pytest.approx(20, rel=1e-12)
    assert sqnr(t(6, 8), t(3, 4)) == pytest.approx(0, abs=1e-12)


def test_cosine_by_hand() -> None:
    assert cosine(t(1, 0), t(1, 1)) == pytest.approx(math.sqrt(0.5), rel=1e-12)
    assert cosine(t(1, 2), t(-1, -2)) == pytest.approx(-1, rel=1e-12)
    assert cosine(t(1, 0), t(0, 1)) == 0
    for _ in range(50):  # a last bit above 1 would make an acos of it NaN
        x = torch.randn(13)
        assert cosine(x * 3, x) <= 1


@every_metric
def test_exact_results(metric) -> None:
    x = torch.randn(7, 13)
    assert metric(x, x) == {"sqnr": INF, "cosine": pytest.approx(1, abs=1e-15)}.get(metric.__name__, 0)


@every_metric
def test_zero_reference(metric) -> None:
    zero = torch.zeros(4)
    assert metric(zero, zero) == {"sqnr": INF, "cosine": 1}.get(metric.__name__, 0)
    assert metric(torch.ones(4), zero) == {"sqnr": -INF, "cosine": 0}.get(metric.__name__, INF)


@every_metric
@pytest.mark.parametrize("zero", [False, True], ids=["reference", "zero-reference"])
def test_nan_in_nan_out(metric, zero: bool) -> None:
    clean = torch.zeros(3) if zero else torch.ones(3)
    dirty = torch.tensor([1.0, NAN, 1.0])
    assert math.isnan(metric(dirty, clean))
    assert math.isnan(metric(clean, dirty))


def test_an_infinite_result_has_an_infinite_error() -> None:
    out, ref = t(1, INF), t(1, 2)
    assert mere(out, ref) == relative_l2(out, ref) == INF
    assert sqnr(out, ref) == -INF


@every_metric
def test_empty_has_no_error(metric) -> None:
    assert metric(torch.empty(0, 3), torch.empty(0, 3)) == {"sqnr": INF, "cosine": 1}.get(metric.__name__, 0)


@every_metric
def test_shapes_must_agree(metric) -> None:
    with pytest.raises(ValueError, match=r"result and reference differ in shape: \(3,\) and \(3, 1\)"):
        metric(torch.ones(3), torch.ones(3, 1))


@every_metric
@pytest.mark.parametrize("magnitude", [2.0**-1000, 2.0**-500, 2.0**500, 2.0**1000])
def test_squares_neither_overflow_nor_underflow(metric, magnitude: float) -> None:
    out, ref = t(3, 4.5, -1), t(3, 4, -1)
    assert metric(out * magnitude, ref * magnitude) == metric(out, ref)


@every_metric
def test_narrow_types_are_accumulated_in_float64(metric) -> None:
    ref = torch.ones(100_000, dtype=torch.bfloat16)
    out = ref.clone()
    out[0] = 2
    expected = metric(out.double(), ref.double())
    assert metric(out, ref) == expected
    assert metric(out.requires_grad_(), ref) == expected


def test_saturated_and_underflowed_by_hand() -> None:
    spec = Spec.parse("e4m3:tensor:static")
    x = torch.tensor([448.0, 449.0, -1000.0, 1.0, 2.0**-11, 2.0**-10, 2.0**-9, 0.0, NAN, INF])
    q = quantize(x, spec, scale=torch.tensor(1.0))
    assert saturated_fraction(x, q) == 2 / 8  # 449 and -1000 of the eight finite ones
    assert underflowed_fraction(x, q) == 2 / 7  # 2^-11, and 2^-10 by the tie to even, of the seven that are not 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_fractions_compare_in_the_inputs_own_precision(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 100.5, 1e-60 if dtype == torch.float64 else 1e-7], dtype=dtype)
    q = quantize(x, Spec.parse("int8:tensor:static"), scale=torch.tensor(100.25 / 127))
    assert saturated_fraction(x, q) == pytest.approx(1 / 3)
    assert underflowed_fraction(x, q) == pytest.approx(1 / 3)


@pytest.mark.parametrize("spec", ["e4m3:row", "e4m3:1x128:pow2", "int8:row", "e2m1:1x32:e8m0", "e5m2:128x128"])
def test_a_dynamic_scale_clips_nothing(spec: str) -> None:
    x = torch.randn(64, 300) * torch.logspace(-30, 30, 64)[:, None]
    assert saturated_fraction(x, quantize(x, Spec.parse(spec))) == 0


def test_fractions_of_nothing_are_zero() -> None:
    x = torch.empty(0, 4)
    q = quantize(x, Spec.parse("e4m3:row"))
    assert saturated_fraction(x, q) == underflowed_fraction(x, q) == 0


def test_fractions_refuse_another_tensor() -> None:
    q = quantize(torch.ones(2, 4), Spec.parse("e4m3:row"))
    for fraction in (saturated_fraction, underflowed_fraction):
        with pytest.raises(ValueError, match=r"x of shape \(4,\) is not what was quantized: \(2, 4\)"):
            fraction(torch.ones(4), q)
