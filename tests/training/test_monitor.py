import math

import pytest

from loka.training import TrainConfig
from loka.training.monitor import Monitor


def make(**settings):
    return Monitor(TrainConfig(evaluate_every=1, **settings))


def test_lower_ne_is_better_and_a_tie_is_not():
    monitor = make(patience=2)
    assert [monitor.update(step, {"ne": value}) for step, value in enumerate([0.9, 0.8, 0.8])] == [True, True, False]
    assert monitor.best == {"step": 1, "metric": "ne", "value": 0.8}
    assert not monitor.gives_up
    monitor.update(3, {"ne": 0.85})
    assert monitor.gives_up


def test_higher_auc_is_better_and_an_improvement_restores_patience():
    monitor = make(monitor="auc", patience=2)
    values = [0.7, 0.6, 0.8, 0.7]
    assert [monitor.update(step, {"auc": value}) for step, value in enumerate(values)] == [True, False, True, False]
    assert not monitor.gives_up


def test_label_and_cutoff_suffixes_keep_the_direction():
    assert make(monitor="ne/1").update(0, {"ne/1": 1.0})
    assert make(monitor="hr@10").update(0, {"hr@10": 1.0})


def test_an_unknown_metric_needs_a_direction():
    with pytest.raises(ValueError, match="monitor_direction"):
        make(monitor="revenue")
    monitor = make(monitor="revenue", monitor_direction="max")
    assert [monitor.update(i, {"revenue": v}) for i, v in enumerate([1.0, 2.0])] == [True, True]


@pytest.mark.parametrize("metrics", [{}, {"ne": math.nan}])
def test_a_missing_or_undefined_value_is_an_error(metrics):
    with pytest.raises(ValueError, match="monitor 'ne'"):
        make().update(0, metrics)


def test_state_round_trip():
    monitor, other = make(patience=2), make(patience=2)
    monitor.update(1, {"ne": 0.9})
    monitor.update(2, {"ne": 0.9})
    other.load_state_dict(monitor.state_dict())
    other.update(3, {"ne": 0.9})
    assert other.gives_up
