"""Online statistics equal one pass over everything, whatever the order, and survive merging and saving."""

import math

import pytest
import torch

from loka.probe.statistics import Statistics


def collect(*batches: torch.Tensor) -> Statistics:
    statistics = Statistics(batches[0].shape[1], torch.device("cpu"))
    for batch in batches:
        statistics.update(batch)
    return statistics


@pytest.fixture
def values() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(600, 24, generator=generator) * torch.logspace(-2, 1, 24) + 0.3
    return torch.where(torch.rand(rows.shape, generator=generator) < 0.1, torch.zeros(()), rows)


def test_batches_give_the_moments_of_one_pass(values: torch.Tensor) -> None:
    found = collect(*values.split([100, 1, 299, 200])).finish("x")
    assert found is not None
    exact = values.double()
    centred = exact - exact.mean()
    assert found.mean == pytest.approx(float(exact.mean()), rel=1e-9)
    assert found.std == pytest.approx(float(exact.std(correction=0)), rel=1e-9)
    kurtosis = float(centred.pow(4).mean() / centred.square().mean() ** 2) - 3
    assert found.kurtosis == pytest.approx(kurtosis, rel=1e-6)
    assert found.absmax == pytest.approx(float(values.abs().max()))
    assert found.zero_fraction == pytest.approx(float((values == 0).double().mean()))
    assert found.elements == values.numel()


def test_merging_ranks_equals_one_rank(values: torch.Tensor) -> None:
    first, second = collect(values[:250]), collect(values[250:])
    first.merge(second)
    whole = collect(values)
    torch.testing.assert_close(first.moments, whole.moments, rtol=1e-9, atol=1e-9)
    assert torch.equal(first.bins, whole.bins)
    assert torch.equal(first.channel_absmax, whole.channel_absmax)


def test_merging_other_widths_is_refused(values: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="24 and 3 channels"):
        collect(values).merge(collect(values[:, :3]))


def test_quantiles_are_within_an_eighth_of_an_octave(values: torch.Tensor) -> None:
    found = collect(values).finish("x")
    assert found is not None
    for level, seen in ((0.99, found.abs_p99), (0.999, found.abs_p999)):
        exact = float(values.abs().flatten().double().quantile(level))
        assert abs(seen / exact - 1) < 1 / 8


def test_no_quantile_exceeds_the_largest_value() -> None:
    found = collect(torch.full((4, 8), 1.01)).finish("x")  # at the beginning of its bin
    assert found is not None
    assert found.abs_p99 == found.abs_p999 == found.absmax


def test_histogram_counts_powers_of_two() -> None:
    found = collect(torch.tensor([[1.0, 1.999, 2.0, 0.25, -0.3, 0.0]])).finish("x")
    assert found is not None
    assert found.histogram_first == -2
    assert found.histogram == [2, 0, 2, 1]  # [1/4, 1/2), [1/2, 1), [1, 2), [2, 4)


def test_histogram_holds_the_extremes_of_float32() -> None:
    found = collect(torch.tensor([[2.0**-149, 2.0**-128, 3e38]])).finish("x")
    assert found is not None
    assert found.histogram_first == -127  # all subnormals, but the least of them count as zero
    assert sum(found.histogram) == 2
    assert len(found.histogram) == 127 + 128
    assert found.zero_fraction == pytest.approx(1 / 3)


def test_outlier_channels_are_those_far_above_the_median() -> None:
    rows = torch.ones(10, 8)
    rows[:, 3] = 100.0
    rows[:, 5] = 7.9  # under eight times the median
    found = collect(rows).finish("x")
    assert found is not None
    assert found.outlier_channels == 1


def test_non_finite_values_are_counted_and_left_out(values: torch.Tensor) -> None:
    dirty = values.clone()
    dirty[0, 0], dirty[1, 1] = torch.nan, torch.inf
    found = collect(dirty).finish("dy")
    assert found is not None
    assert found.non_finite == 2
    assert math.isfinite(found.mean + found.std + found.kurtosis)
    kept = dirty[dirty.isfinite()].double()
    assert found.mean == pytest.approx(float(kept.mean()), rel=1e-9)


def test_nothing_seen_is_none_and_empty_changes_nothing() -> None:
    statistics = Statistics(4, torch.device("cpu"))
    statistics.update(torch.zeros(0, 4))
    assert statistics.finish("x") is None


def test_all_zero_is_defined() -> None:
    found = collect(torch.zeros(5, 3)).finish("x")
    assert found is not None
    assert (found.absmax, found.abs_p99, found.kurtosis, found.histogram) == (0, 0, 0, [])
    assert found.zero_fraction == 1


def test_state_survives(values: torch.Tensor) -> None:
    before = collect(values)
    after = Statistics(24, torch.device("cpu"))
    after.load_state_dict(before.state_dict())
    assert after.finish("x") == before.finish("x")
    with pytest.raises(ValueError, match="channel_absmax"):
        Statistics(5, torch.device("cpu")).load_state_dict(before.state_dict())
