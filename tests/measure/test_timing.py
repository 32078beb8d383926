import time

import pytest
import torch

from loka.measure.conformance import Conformance
from loka.measure.timing import (
    CaptureError,
    Contender,
    RedKernelError,
    Timing,
    bootstrap_median,
    sets_needed,
    time_together,
)

GREEN = Conformance(True, 0.0, 0.0)


def test_a_red_kernel_is_not_timed() -> None:
    red = Conformance(False, 1.0, 0.1, "row 3 is wrong")
    with pytest.raises(RedKernelError, match="row 3 is wrong"):
        Contender("broken", [lambda: None], red)


def test_the_slower_one_is_slower() -> None:
    fast = Contender("fast", [lambda: time.sleep(0.001)], GREEN)
    slow = Contender("slow", [lambda: time.sleep(0.01)], GREEN)
    timings = time_together([fast, slow], "cpu", repeats=7)
    assert [timing.name for timing in timings] == ["fast", "slow"]
    speedup = timings[0].speedup_over(timings[1])
    assert 1 < speedup.low <= speedup.value <= speedup.high
    assert speedup.value > 2  # 10 on an idle machine; sleeps only ever get longer
    assert timings[0].method == "perf_counter on a CPU"
    assert timings[1].microseconds().value > 10_000


def test_repeats_are_interleaved_and_walk_through_all_sets() -> None:
    seen: list[str] = []
    candidates = [
        Contender(
            name, [lambda name=name, s=s: (seen.append(f"{name}{s}"), time.sleep(0.0003)) for s in range(3)], GREEN
        )
        for name in "ab"
    ]
    time_together(candidates, "cpu", repeats=6)
    rounds = "".join(seen).replace("0", "").replace("1", "").replace("2", "").lstrip("a").lstrip("b")
    assert "ab" in rounds  # the two alternate rather than run one after the other
    assert "ba" in rounds
    assert {f"{name}{s}" for name in "ab" for s in range(3)} <= set(seen)


def test_a_speedup_is_paired_by_repeat() -> None:
    """A drift of the machine that hits both alike must not blur the ratio."""
    drift = [1.0, 2.0, 4.0, 8.0, 16.0]
    base = Timing("base", tuple(2e-6 * d for d in drift), "test", 1)
    ours = Timing("ours", tuple(1e-6 * d for d in drift), "test", 1)
    speedup = ours.speedup_over(base)
    assert speedup.low == pytest.approx(2.0)
    assert speedup.high == pytest.approx(2.0)
    assert ours.microseconds().high > 2 * ours.microseconds().low
    with pytest.raises(ValueError, match="not timed together"):
        Timing("other", (1e-6,), "test", 1).speedup_over(base)


def test_bootstrap_covers_the_median() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(60):
        sample = torch.randn(31, generator=generator).exp().tolist()  # true median 1
        interval = bootstrap_median(sample)
        inside += interval.low <= 1.0 <= interval.high
    assert inside >= 52  # 95 % of 60 is 57; below 52 has a chance under 1 %


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [1.0, 0.0]])
def test_impossible_measurements_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="positive finite"):
        bootstrap_median(values)


def test_candidates_need_names_and_something_to_call() -> None:
    with pytest.raises(ValueError, match="nothing to call"):
        Contender("empty", [], GREEN)
    twin = Contender("twin", [lambda: None], GREEN)
    with pytest.raises(ValueError, match="different names"):
        time_together([twin, twin], "cpu")


def test_one_set_is_enough_without_a_gpu() -> None:
    assert sets_needed(1, torch.device("cpu")) == 1


@pytest.mark.gpu
def test_graphs_time_a_gpu_and_refuse_what_cannot_be_captured() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    once, twice = Contender("once", [lambda: x @ x], GREEN), Contender("twice", [lambda: (x @ x) @ x], GREEN)
    timings = time_together([once, twice], "cuda", repeats=9)
    assert 1.6 < timings[0].speedup_over(timings[1]).value < 2.4
    assert sets_needed(1 << 20, torch.device("cuda")) > 8
    with pytest.raises(CaptureError, match="cannot be captured"):
        time_together([Contender("syncs", [lambda: float(x.sum())], GREEN)], "cuda", repeats=3)
