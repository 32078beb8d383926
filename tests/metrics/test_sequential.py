"""Intervals that may be peeked at: false alarms over many looks, power, and the sample ratio."""

import math

import numpy as np
import pytest

from loka.metrics import Moments, check_ratio_anytime, compare_anytime
from loka.metrics.sequential import LEAST

TESTS, PEEKS = 2000, 60


def moments(values: np.ndarray) -> Moments:
    return Moments(len(values), float(values.mean()), float(values.var(ddof=1)))


def alarms(draw: object, tests: int, users: int, *, lift: float = 0.0, share: float = 0.5) -> tuple[float, float]:
    """Share of experiments that ever call a difference, over PEEKS looks while users arrive; and of those at a fixed-sample 95 % interval."""
    source = np.random.default_rng(0)
    looks = np.linspace(users // PEEKS, users, PEEKS).astype(int) - 1
    anytime = fixed = 0
    for _ in range(tests):
        arm = source.random(users) < share
        values = draw(source, users) * np.where(arm, 1 + lift, 1.0)  # type: ignore[operator]
        sums = [[np.cumsum(x * mask)[looks] for x in (np.ones(users), values, values**2)] for mask in (arm, ~arm)]
        ever, naive = False, False
        for look in range(PEEKS):
            one, two = (so_far(*(float(x[look]) for x in arm_sums)) for arm_sums in sums)
            if min(one.units, two.units) < LEAST:
                continue
            ever |= compare_anytime(one, two, margin=0.05).verdict in ("better", "worse")
            error = math.sqrt(one.variance / one.units + two.variance / two.units)
            naive |= abs(one.mean - two.mean) > 1.96 * error
        anytime += ever
        fixed += naive
    return anytime / tests, fixed / tests


def so_far(count: float, total: float, squares: float) -> Moments:
    mean = total / max(count, 1)
    return Moments(int(count), mean, max(0.0, squares - count * mean**2) / max(count - 1, 1))


def test_peeking_sixty_times_raises_at_most_five_percent_false_alarms() -> None:
    found, naive = alarms(lambda source, n: source.exponential(1.0, n), TESTS, 2400)
    assert found <= 0.05
    assert naive > 0.15  # what peeking does to an interval that does not expect it: the test can tell them apart


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_rare_clicks_and_uneven_splits(share: float) -> None:
    found, _ = alarms(lambda source, n: (source.random(n) < 0.05).astype(float), 300, 6000, share=share)
    assert found <= 0.05


def test_users_who_come_back_do_not_raise_more() -> None:
    """Values of a user change between looks: the mean over what the user did so far, with a taste of the user's own."""
    source = np.random.default_rng(1)
    wrong, users = 0, 1200
    for _ in range(300):
        taste = source.gamma(2.0, 0.1, users)
        arm = source.random(users) < 0.5
        clicks, visits = np.zeros(users), np.zeros(users)
        ever = False
        for look in range(1, PEEKS + 1):
            active = (source.random(users) < 0.2) & (np.arange(users) < users * look / PEEKS)
            visits += active
            clicks += active & (source.random(users) < taste)
            here = visits > 0
            value = clicks[here] / visits[here]
            b, a = value[arm[here]], value[~arm[here]]
            if min(len(a), len(b)) >= LEAST:
                ever |= compare_anytime(moments(b), moments(a), margin=0.05).verdict in ("better", "worse")
        wrong += ever
    assert wrong / 300 <= 0.05


def test_a_real_difference_is_found_and_sameness_too() -> None:
    found, _ = alarms(lambda source, n: source.exponential(1.0, n), 50, 6000, lift=0.2)
    assert found >= 0.95
    same = compare_anytime(Moments(400_000, 1.0005, 1.0), Moments(400_000, 1.0, 1.0), margin=0.02)
    assert same.verdict == "equivalent"
    worse = compare_anytime(Moments(5000, 1.2, 1.0), Moments(5000, 1.0, 1.0), margin=0.02, lower_is_better=True)
    assert worse.verdict == "worse"


def test_too_little_is_said_to_be_so() -> None:
    few = compare_anytime(Moments(99, 2.0, 1.0), Moments(5000, 1.0, 1.0), margin=0.02)
    assert (few.verdict, few.low) == ("inconclusive", None)
    assert "99 units" in few.reason
    zero = compare_anytime(Moments(500, 0.0, 0.1), Moments(500, 0.001, 0.1), margin=0.02)
    assert "near zero" in zero.reason
    with pytest.raises(ValueError, match="margin"):
        compare_anytime(Moments(500, 1, 1), Moments(500, 1, 1), margin=0.0)


def test_the_sample_ratio_may_be_checked_after_every_user() -> None:
    source = np.random.default_rng(2)
    false = 0
    for _ in range(300):
        arm = np.cumsum(source.random(4000) < 0.05)
        false += any(
            check_ratio_anytime([n - int(arm[n - 1]), int(arm[n - 1])], [95, 5]) < 0.05 for n in range(50, 4001, 50)
        )
    assert false / 300 <= 0.05
    assert check_ratio_anytime([9_400, 600], [95, 5]) < 0.001
    with pytest.raises(ValueError, match="ratio"):
        check_ratio_anytime([1, 2], [1, 0])
