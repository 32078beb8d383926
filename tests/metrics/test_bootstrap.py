"""Intervals cover the truth as often as they say; t quantiles against SciPy; large samples stay bounded."""

import math

import pytest
import torch
from scipy.stats import t as student

from loka.metrics.bootstrap import MAX_UNITS, Method, estimate_interval, find_t_quantile, standard_error


def coverage(method: Method, units: int, *, skewed: bool, trials: int, confidence: float = 0.9) -> float:
    """Share of intervals that hold the true mean, 1."""
    generator = torch.Generator().manual_seed(units)
    covered = 0
    for trial in range(trials):
        if skewed:
            values = -torch.log(torch.rand(units, generator=generator, dtype=torch.float64))  # exponential, mean 1
        else:
            values = 1 + torch.randn(units, generator=generator, dtype=torch.float64)
        low, high = estimate_interval(
            values, torch.ones_like(values), method=method, confidence=confidence, resamples=400, seed=trial
        )
        covered += low <= 1 <= high
    return covered / trials


@pytest.mark.parametrize(
    ("method", "units", "skewed"),
    [("bca", 60, False), ("bca", 60, True), ("percentile", 60, False), ("student", 5, False), ("student", 40, False)],
)
def test_coverage(method: Method, units: int, skewed: bool) -> None:
    """600 trials: three standard deviations are 0.037, and the bootstrap is allowed one percent more for its bias."""
    assert coverage(method, units, skewed=skewed, trials=600) == pytest.approx(0.9, abs=0.047)


def test_bootstrap_is_too_narrow_for_five_units() -> None:
    """Why `student` exists: this is the failure it avoids."""
    assert coverage("percentile", 5, skewed=False, trials=300) < 0.85


def test_ratio_interval_matches_the_delta_method() -> None:
    generator = torch.Generator().manual_seed(0)
    base = 0.5 + torch.rand(5000, generator=generator, dtype=torch.float64)
    difference = 0.01 * base + 0.1 * torch.randn(5000, generator=generator, dtype=torch.float64)
    low, high = estimate_interval(difference, base, method="bca", confidence=0.95, resamples=4000, seed=0)
    error = standard_error(difference, base)
    theta = float(difference.sum() / base.sum())
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.06)
    assert (high + low) / 2 == pytest.approx(theta, abs=0.2 * error)


def test_same_seed_same_interval() -> None:
    values = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def interval(seed: int) -> tuple[float, float]:
        return estimate_interval(
            values, torch.ones_like(values), method="bca", confidence=0.95, resamples=500, seed=seed
        )

    assert interval(1) == interval(1)
    assert interval(1) != interval(2)


def test_many_units_are_dealt_into_blocks() -> None:
    values = torch.randn(1_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.01
    assert values.numel() > MAX_UNITS
    low, high = estimate_interval(
        values, torch.ones_like(values), method="bca", confidence=0.95, resamples=1000, seed=0
    )
    assert (high - low) / 2 == pytest.approx(1.96e-3, rel=0.12)
    assert low < float(values.mean()) < high


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 101, 1000])
@pytest.mark.parametrize("probability", [0.025, 0.2, 0.5, 0.8, 0.95, 0.999])
def test_t_quantile_matches_scipy(freedom: int, probability: float) -> None:
    assert find_t_quantile(probability, freedom) == pytest.approx(student.ppf(probability, freedom), rel=1e-9, abs=1e-9)


def test_t_quantile_beyond_the_series() -> None:
    assert find_t_quantile(0.975, 5000) == pytest.approx(student.ppf(0.975, 5000), rel=2e-3)
    with pytest.raises(ValueError, match="at least 1"):
        find_t_quantile(0.9, 0)


def test_identical_units_have_no_width() -> None:
    values = torch.full((50,), 0.25, dtype=torch.float64)
    low, high = estimate_interval(values, torch.ones_like(values), method="bca", confidence=0.95, resamples=300, seed=0)
    assert low == high == 0.25
    assert math.isclose(standard_error(values, torch.ones_like(values)), 0.0)
