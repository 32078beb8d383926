"""Rounding against torch's own casts, bit for bit, and against the tables of every code point."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch

from loka.formats import E2M1, E4M3, E5M2, FORMATS, INT8, Format, decode, encode, round_to

from .tables import TABLES

FP8 = [E4M3, E5M2]
ALL = list(FORMATS.values())
by_name = pytest.mark.parametrize("format", ALL, ids=str)


def every_16_bit(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()


def random_bits(count: int) -> torch.Tensor:
    """Uniform over bit patterns: every exponent, subnormals, NaN payloads."""
    return torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).to(torch.int32).view(torch.float32)


def hard_cases(format: Format) -> torch.Tensor:
    """Every code point, every midpoint, their float32 neighbours, the edge of the range and float32's own extremes."""
    values = torch.from_numpy(TABLES[format.name].values)
    middles = (values[:-1] + values[1:]) / 2
    edge = torch.tensor([format.max * f for f in (1 + 2**-23, 1.01, 1.0357142, 1.0357143, 1.1, 2.0, 1e30)])
    extremes = torch.tensor([0.0, 2.0**-149, 2.0**-127, 2.0**-126, 1e-38, 1e38, 3.4028234663852886e38])
    points = torch.cat([values.float(), middles.float(), edge, extremes.float()])
    infinity = torch.full_like(points, math.inf)
    points = torch.cat([points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)])
    points = points[points.isfinite()]
    return torch.cat([points, -points])


SAMPLES = {
    "float16": lambda: every_16_bit(torch.float16),
    "bfloat16": lambda: every_16_bit(torch.bfloat16),
    "float32": lambda: random_bits(1_000_000),
}


@pytest.mark.parametrize("format", FP8, ids=str)
@pytest.mark.parametrize("sample", SAMPLES)
def test_bits_equal_torch_casts(format: Format, sample: str) -> None:
    x = torch.cat([SAMPLES[sample](), hard_cases(format)])
    inside = x.abs() <= format.max  # beyond it torch makes NaN or Inf, we saturate
    expected = x.to(format.dtype).view(torch.uint8)
    assert torch.equal(encode(x, format).view(torch.uint8)[inside], expected[inside])
    by_arithmetic = round_to(x, format).to(format.dtype).view(torch.uint8)
    assert torch.equal(by_arithmetic[inside], expected[inside])


@by_name
@pytest.mark.parametrize("sample", SAMPLES)
def test_codes_equal_the_table(format: Format, sample: str) -> None:
    x = torch.cat([SAMPLES[sample](), hard_cases(format)])
    x = x[x.isfinite()]
    assert mismatches(encode(x, format), x, format) == 0


def mismatches(data: torch.Tensor, x: torch.Tensor, format: Format) -> int:
    codes = data.view(torch.uint8) if format.has_nan else data
    return int((codes.numpy().astype(np.int64) != TABLES[format.name].nearest(x.numpy())).sum())


@by_name
def test_the_table_notices_ties_rounded_away_from_even(format: Format) -> None:
    values = torch.from_numpy(TABLES[format.name].values)
    ties = ((values[:-1] + values[1:]) / 2).float()
    away = torch.nextafter(ties, torch.full_like(ties, math.inf))
    assert mismatches(encode(ties, format), ties, format) == 0
    assert (
        mismatches(encode(away, format), ties, format) == len(ties) // 2 + len(ties) % 2
    )  # the ties below an odd code


@by_name
def test_round_to_equals_encode_and_decode(format: Format) -> None:
    x = torch.cat([random_bits(200_000), hard_cases(format)])
    x = x[x.isfinite()]
    assert torch.equal(decode(encode(x, format), format), round_to(x, format))


@by_name
def test_finite_values_saturate_and_never_become_special(format: Format) -> None:
    x = random_bits(200_000)
    x = x[x.isfinite()]
    for rounding in ("nearest", "stochastic"):
        values = decode(encode(x, format, rounding=rounding), format)
        assert values.isfinite().all()
        beyond = x.abs() >= format.max
        assert torch.equal(values[beyond], torch.copysign(torch.tensor(format.max), x[beyond]))


@by_name
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_special_values(format: Format, rounding: str) -> None:
    payloads = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert payloads.isnan().all()
    assert round_to(payloads, format, rounding=rounding).isnan().all()
    infinities = torch.tensor([math.inf, -math.inf])
    rounded = round_to(infinities, format, rounding=rounding)
    assert torch.equal(rounded, infinities) if format.has_inf else bool(rounded.isnan().all())
    stored = encode(torch.cat([payloads, infinities]), format, rounding=rounding)
    values = decode(stored, format)
    if not format.has_nan:
        assert (values == 0).all()
    else:
        assert values[:-2].isnan().all()
        assert torch.equal(values[-2:], infinities) if format.has_inf else bool(values[-2:].isnan().all())


@by_name
def test_constants_follow_from_the_table(format: Format) -> None:
    values = TABLES[format.name].values
    assert format.max == values[-1]
    assert format.smallest_subnormal == values[1]
    assert format.smallest_normal == values[1 if format.is_integer else 2**format.mantissa_bits]
    assert 2 ** (format.bits - 1) >= len(values) > 2 ** (format.bits - 2)
    if format.has_nan:
        assert format.max == torch.finfo(format.dtype).max
        assert format.smallest_normal == torch.finfo(format.dtype).smallest_normal


@by_name
def test_every_code_survives_a_round_trip(format: Format) -> None:
    codes = np.arange(len(TABLES[format.name].values))
    sign = TABLES[format.name].sign_bit
    codes = np.concatenate([codes, -codes if sign is None else codes | sign])
    data = torch.from_numpy(codes.astype(np.int8 if sign is None else np.uint8))
    data = data.view(format.dtype) if format.has_nan else data
    values = decode(data, format)
    assert torch.equal(values.double(), torch.from_numpy(TABLES[format.name].decode(codes)))
    again = encode(values, format)
    assert torch.equal(again.view(torch.uint8), data.view(torch.uint8))


def test_signs_of_zero_survive_where_there_are_two() -> None:
    zeros = torch.tensor([0.0, -0.0, 1e-30, -1e-30])
    for signed in (E4M3, E5M2, E2M1):
        assert decode(encode(zeros, signed), signed).signbit().tolist() == [False, True, False, True]
    assert decode(encode(zeros, INT8), INT8).signbit().tolist() == [False] * 4


def test_only_the_low_bits_of_an_e2m1_byte_count() -> None:
    low = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(decode(low + 0x50, E2M1), decode(low, E2M1))


@by_name
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["copy", "pickle"]
)
def test_a_copied_format_is_the_same_format(format: Format, copied) -> None:
    x = torch.tensor([0.0, 0.6, -1.7, 3.0, 5.9])
    assert copied(format) == format
    assert torch.equal(decode(encode(x, copied(format)), copied(format)), decode(encode(x, format), format))


@by_name
@pytest.mark.parametrize("fraction", [0.0625, 0.3, 0.5, 0.9])
def test_stochastic_rounding_is_unbiased(format: Format, fraction: float) -> None:
    values = TABLES[format.name].values
    picked = values[[0, 1, len(values) // 2, len(values) - 2]]
    for low, high in ((v, values[np.searchsorted(values, v) + 1]) for v in picked):
        x = torch.full((100_000,), float(low + fraction * (high - low)))
        mean = round_to(x, format, rounding="stochastic").double().mean()
        assert abs(mean - x[0].double()) < bias_bound(fraction, high - low, len(x))


def bias_bound(fraction: float, quantum: float, count: int) -> float:
    """Five standard deviations of the mean of a Bernoulli variable."""
    return 5 * quantum * math.sqrt(fraction * (1 - fraction) / count)


@pytest.mark.parametrize("fraction", [0.0625, 0.3, 0.9])
def test_the_bias_bound_notices_rounding_to_nearest_and_a_probability_off_by_three_percent(fraction: float) -> None:
    x = torch.full((100_000,), 8 + fraction)  # E4M3 steps by 1 here
    off = torch.full((100_000,), 8 + fraction - 0.03)
    for biased in (round_to(x, E4M3), round_to(off, E4M3, rounding="stochastic")):
        assert abs(biased.double().mean() - x[0].double()) > bias_bound(fraction, 1.0, len(x))


@by_name
def test_stochastic_rounding_lands_on_the_two_neighbours(format: Format) -> None:
    x = torch.cat(
        [torch.randn(100_000) * format.max / 2, torch.randn(100_000) * format.smallest_normal, hard_cases(format)]
    )
    low, high = TABLES[format.name].neighbours(x.numpy())
    rounded = round_to(x, format, rounding="stochastic").double().numpy()
    assert ((rounded == low) | (rounded == high)).all()
    between = low < high
    assert 0.1 < (rounded == high)[between].mean() < 0.9  # both of them


@by_name
def test_stochastic_rounding_leaves_the_grid_alone(format: Format) -> None:
    """floor(x + noise) fails here: the sum rounds up to the next integer once in 2^18 draws."""
    grid = torch.from_numpy(TABLES[format.name].values).float()
    x = grid.repeat(2_000_000 // len(grid))
    assert torch.equal(round_to(x, format, rounding="stochastic"), x)


def test_stochastic_rounding_follows_its_generator() -> None:
    x = torch.randn(10_000)

    def draw(seed: int) -> torch.Tensor:
        return round_to(x, E4M3, rounding="stochastic", generator=torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    state = torch.get_rng_state()
    draw(3)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator was not touched


@pytest.mark.parametrize("function", [encode, round_to])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_only_float32_is_rounded(function, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"{function.__name__} takes float32, got {dtype}; hint: x.float()"):
        function(torch.ones(3, dtype=dtype), E4M3)


@pytest.mark.parametrize("function", [encode, round_to])
def test_unknown_rounding_is_refused(function) -> None:
    with pytest.raises(ValueError, match="rounding must be 'nearest' or 'stochastic', got 'up'"):
        function(torch.ones(3), E4M3, rounding="up")


def test_decode_refuses_another_formats_storage() -> None:
    with pytest.raises(ValueError, match=r"e4m3 is stored as torch.float8_e4m3fn, got torch.int8"):
        decode(torch.zeros(3, dtype=torch.int8), E4M3)


@by_name
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (2, 3, 5)])
def test_shapes_are_kept(format: Format, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for rounding in ("nearest", "stochastic"):
        assert encode(x, format, rounding=rounding).shape == x.shape
        assert decode(encode(x, format, rounding=rounding), format).shape == x.shape
