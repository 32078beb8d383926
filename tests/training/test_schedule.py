import itertools
import math

import pytest

from loka.training import TrainConfig, learning_rate_factor


def factors(**settings):
    config = TrainConfig(steps=100, **settings)
    return [learning_rate_factor(config, step) for step in range(100)]


def test_constant_is_one():
    assert factors() == [1.0] * 100


def test_warmup_is_linear_and_ends_at_the_peak():
    values = factors(warmup_steps=4)
    assert values[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_starts_at_the_peak_falls_and_ends_near_the_fraction(schedule):
    values = factors(schedule=schedule, warmup_steps=10, final_fraction=0.1)
    assert values[10] == 1.0
    assert all(later < earlier for earlier, later in itertools.pairwise(values[10:]))
    assert 0.1 < values[-1] < 0.12


def test_midpoints():
    assert factors(schedule="linear")[50] == pytest.approx(0.5)
    assert factors(schedule="cosine")[25] == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_warmup_over_the_whole_run():
    assert factors(schedule="cosine", warmup_steps=100)[-1] == 1.0
