"""Speeds of a device that is not here: from measured units, with an error that holds for units left out, and never mixed with measured ones."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import loka
from loka.records import load
from loka.records.tuning import Tuning
from loka.tuning.estimating import Estimator, Unit, _shipped_units, _times

from .small import MARGIN, loss, make_batches, make_trained

H200 = "NVIDIA H200"


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    return Estimator(H200)


def test_units_that_were_left_out_are_predicted(estimator: Estimator) -> None:
    """The error that the page states. A constant, the mean of all others, is what a model must beat."""
    logs = np.log(estimator.measured)
    constant = np.abs((logs.sum() - logs) / (len(logs) - 1) - logs)
    assert len(estimator.units) >= 19
    assert np.median(np.abs(estimator.left_out)) < 0.08 < np.median(constant)
    assert estimator.spread < 0.2 < np.quantile(constant, 0.9)
    assert estimator.same_side >= len(estimator.units) - 1
    inside = np.abs(estimator.left_out) <= estimator.spread + 1e-12
    assert inside.mean() >= 0.89, "the interval holds what it says"


def test_speeds_that_a_roofline_makes_are_found_again() -> None:
    torch.manual_seed(0)
    truth = np.log([700.0, 1200.0, 3.6, 3.0, 8.0, 2.0, 1.1])
    units = [Unit(m, ((k, n),) * depth, training) for m in (2048, 8192, 16384) for k, n in ((512, 512), (1024, 1024), (2048, 2048), (4096, 4096)) for depth in (1, 3) for training in (True, False) if k == n]  # fmt: skip
    speeds = [(unit, (lambda t: t[0] / t[1])(_times(unit, truth))) for unit in units]
    made = Estimator("made up", speeds)
    assert made.spread < 0.03
    other = Unit(4096, ((768, 1536), (1536, 768)), True)
    t16, t8 = _times(other, truth)
    assert made.speedup(other).value == pytest.approx(t16 / t8, rel=0.05)


def test_small_units_are_slower_and_large_ones_faster(estimator: Estimator) -> None:
    small = estimator.speedup(Unit(512, ((64, 64), (64, 64)), True))
    large = estimator.speedup(Unit(16384, ((4096, 4096),) * 3, True))
    assert small.high < 1 < large.low
    assert not estimator.covers(Unit(512, ((64, 64),), True))
    assert np.log(small.high / small.value) == pytest.approx(2 * estimator.spread), "nothing so small was measured"


def test_linears_alone_come_from_the_database(estimator: Estimator) -> None:
    found = estimator.linear_speedup(8192, 4096, 4096, "rowwise", training=True)
    assert found is not None
    assert found.low < found.value < found.high
    assert estimator.linear_speedup(256, 64, 64, "rowwise", training=True).high < 1


def test_a_gemm_that_stays_in_16_bits_takes_its_time_in_an_estimate(estimator: Estimator) -> None:
    """Two GEMMs of three in FP8: with the third in no time at all the linear would be as fast as those two."""
    whole = estimator.linear_speedup(16384, 4096, 4096, "rowwise_with_gw_hp", training=True)
    forward = estimator.linear_speedup(16384, 4096, 4096, "rowwise", training=False)
    assert whole is not None
    assert forward is not None
    assert 1.0 < whole.value < 3 / (2 / forward.value + 1)


def test_tune_takes_what_is_estimated_to_pay_and_says_so(tmp_path: Path) -> None:
    model, _ = make_trained()
    options = {"margin": MARGIN, "progress": False, "estimate_for": H200}
    small = loka.tune(model, make_batches(), loss, **options)
    assert small.conversion is None or not small.conversion.converted, "64 wide: FP8 does not pay"
    small.revert()
    assert all("estimated" in unit.reason for unit in small.record.units if unit.estimated is not None)
    tuned = loka.tune(model, make_batches(), loss, row_factor=65536, out=tmp_path, **options)
    record = load(tmp_path / "tuning.json", Tuning)
    taken = [unit for unit in record.units if unit.way != "high"]
    assert taken
    assert all(unit.estimated.value > 1 and unit.speedup is None for unit in taken)
    assert record.speedup is None
    assert record.step_microseconds == {}
    assert record.estimate.target == H200
    assert record.estimate.linears.value > 1
    assert tuned.plan.target is None, "a target is a device that was measured"
    assert "none was measured" in tuned.plan.notes[0]
    assert all(unit.evidence.speedup is None and unit.evidence.estimated is not None for unit in tuned.plan.units)
    assert "speed not measured" in str(tuned)
    assert f"estimated for {H200}" in str(tuned)
    page = (tmp_path / "report.html").read_text()
    assert "estimated" in page
    assert "None was measured" in page


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"estimate_for": "NVIDIA Z9"}, "no unit was measured on 'NVIDIA Z9'; estimates are for 'NVIDIA H200'"),
        ({"row_factor": 4.0}, "together with estimate_for"),
        ({"row_factor": -1.0, "estimate_for": H200}, "expected a positive number"),
        ({"thorough": True, "estimate_for": H200}, "in the default mode; hint: leave these out"),
        ({"cuda_graph": False, "estimate_for": H200}, "estimates are of steps in CUDA graphs"),
    ],
)
def test_what_cannot_be_estimated_is_said(options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        loka.tune(nn.Linear(4, 1), make_batches(), loss, progress=False, **options)


def test_targets_are_those_that_ship() -> None:
    assert list(_shipped_units()) == [H200]
