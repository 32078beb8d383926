"""What must hold for every tensor: bounded error, scale equivariance, idempotence, monotonicity. Each bound is shown to be tight."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from loka.formats import FORMATS, Format, Spec, expand_scale, fake_quantize, quantize

from .tables import TABLES

SPECS = [
    *[f"{name}:{block}" for name in FORMATS for block in ("tensor", "row", "1x4", "2x3")],
    *[f"{name}:{rest}" for name in FORMATS for rest in ("row:pow2", "1x4:e8m0")],
]
specs = st.sampled_from([Spec.parse(s) for s in SPECS])
EXAMPLES = settings(max_examples=100)
EPSILON = 2.0**-22  # of x: 1 / scale and x * (1 / scale) are rounded to float32 before the format is

# Normal float32 numbers with room on both sides, and zero: what happens at the ends of float32 has its own tests.
numbers = st.floats(-(2.0**60), 2.0**60, width=32).map(lambda v: v if abs(v) >= 2.0**-60 else 0.0)


def matrices() -> st.SearchStrategy[torch.Tensor]:
    return arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=7), elements=numbers).map(torch.from_numpy)


def half_quantum(x: torch.Tensor, format: Format) -> torch.Tensor:
    """Half the distance of the two code points around |x| (in units of the scale)."""
    values = torch.from_numpy(TABLES[format.name].values)
    upper = torch.searchsorted(values, x.abs().double(), right=True).clamp(1, len(values) - 1)
    return (values[upper] - values[upper - 1]) / 2


def error_and_bound(x: torch.Tensor, spec: Spec) -> tuple[torch.Tensor, torch.Tensor]:
    q = quantize(x, spec)
    scale = expand_scale(q.scale, x.shape, spec.block).double()
    return (q.dequantize().double() - x).abs(), scale * half_quantum(x / scale, spec.format) + EPSILON * x.abs()


@EXAMPLES
@given(spec=specs, x=matrices())
def test_the_error_is_at_most_half_a_quantum(spec: Spec, x: torch.Tensor) -> None:
    error, bound = error_and_bound(x, spec)
    assert (error <= bound).all()


@pytest.mark.parametrize("spec", [Spec.parse(s) for s in SPECS], ids=str)
def test_half_a_quantum_is_reached(spec: Spec) -> None:
    """So a bound two percent smaller would fail."""
    error, bound = error_and_bound(torch.rand(64, 256) * 2 - 1, spec)
    assert (error > 0.98 * bound).any()
    assert (error <= bound).all()


@EXAMPLES
@given(spec=specs, x=matrices(), power=st.integers(-40, 40))
def test_a_power_of_two_scales_the_scale_and_nothing_else(spec: Spec, x: torch.Tensor, power: int) -> None:
    q, scaled = quantize(x, spec), quantize(x * 2.0**power, spec)
    assert torch.equal(q.data.view(torch.uint8), scaled.data.view(torch.uint8))
    assert torch.equal(torch.where(q.scale == 1, scaled.scale, q.scale * 2.0**power), scaled.scale)
    assert torch.equal(q.dequantize() * 2.0**power, scaled.dequantize())


def test_another_factor_does_change_the_codes_of_power_of_two_scales() -> None:
    x = torch.randn(4, 64)
    a, b = (quantize(v, Spec.parse("e4m3:row:pow2")).data.view(torch.uint8) for v in (x, 1.3 * x))
    assert not torch.equal(a, b)


@EXAMPLES
@given(spec=specs, x=matrices())
def test_a_second_round_trip_changes_nothing(spec: Spec, x: torch.Tensor) -> None:
    """To the bit with power-of-two scales. Others are made again from a rounded maximum and may move by a last bit, codes may not."""
    q = quantize(x, spec)
    once = q.dequantize()
    again = quantize(once, spec)
    if spec.scale == "f32":
        assert torch.equal(again.data.view(torch.uint8), q.data.view(torch.uint8))
        assert torch.allclose(again.dequantize(), once, rtol=2**-22, atol=0)
    else:
        assert torch.equal(again.dequantize(), once)


@EXAMPLES
@given(name=st.sampled_from(list(FORMATS)), x=matrices(), scale=st.floats(2.0**-20, 2.0**20, width=32))
def test_with_a_given_scale_the_codes_are_a_fixed_point(name: str, x: torch.Tensor, scale: float) -> None:
    spec = Spec.parse(f"{name}:tensor:static")
    q = quantize(x, spec, scale=torch.tensor(scale))
    again = quantize(q.dequantize(), spec, scale=torch.tensor(scale))
    assert torch.equal(again.data.view(torch.uint8), q.data.view(torch.uint8))


@EXAMPLES
@given(spec=specs, x=matrices())
def test_larger_inputs_never_become_smaller(spec: Spec, x: torch.Tensor) -> None:
    """Within a block, where all share a scale."""
    block = x.reshape(1, -1).sort().values
    values = fake_quantize(block, Spec(spec.format, Spec.parse("e4m3:row").block, spec.scale))
    assert (values.diff(dim=-1) >= 0).all()


@EXAMPLES
@given(spec=specs, x=matrices())
def test_the_sign_is_symmetric(spec: Spec, x: torch.Tensor) -> None:
    assert torch.equal(fake_quantize(-x, spec), -fake_quantize(x, spec))


@EXAMPLES
@given(spec=specs, x=matrices())
def test_the_largest_of_a_block_is_kept(spec: Spec, x: torch.Tensor) -> None:
    """A float32 scale maps it onto the largest code; a power-of-two scale leaves it within half a quantum, never clipped."""
    row = x.reshape(1, -1)
    spec = Spec(spec.format, Spec.parse("e4m3:row").block, spec.scale)
    kept = fake_quantize(row, spec).abs().max().item()
    half_step = 1 / spec.format.max if spec.format.is_integer else 2.0 ** -(spec.format.mantissa_bits + 1)
    tolerance = EPSILON if spec.scale == "f32" else half_step * (1 + EPSILON)
    assert kept == pytest.approx(row.abs().max().item(), rel=tolerance, abs=0)


@EXAMPLES
@given(spec=specs, x=matrices(), seed=st.integers(0, 2**31))
def test_stochastic_rounding_stays_within_a_quantum(spec: Spec, x: torch.Tensor, seed: int) -> None:
    stochastic = Spec(spec.format, spec.block, spec.scale, rounding="stochastic")
    q = quantize(x, stochastic, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(q.scale, quantize(x, spec).scale)
    scale = expand_scale(q.scale, x.shape, spec.block).double()
    bound = 2 * scale * half_quantum(x / scale, spec.format) + EPSILON * x.abs()
    assert ((q.dequantize().double() - x).abs() <= bound).all()


@pytest.mark.parametrize("name", FORMATS)
def test_relative_precision_follows_from_the_mantissa(name: str) -> None:
    """Half a unit in the last place, for values that are normal in the format: a number to remember per format."""
    form = FORMATS[name]
    x = torch.empty(100_000).uniform_(form.smallest_normal, form.max)
    spec = Spec.parse(f"{name}:tensor:static")
    error = (fake_quantize(x, spec, scale=torch.tensor(1.0)) - x).abs() / (0.5 if form.is_integer else x)
    worst = error.max().item()
    expected = 1.0 if form.is_integer else 1 / (2.0 ** (form.mantissa_bits + 1) + 1)
    assert 0.98 * expected <= worst <= expected * (1 + EPSILON)
