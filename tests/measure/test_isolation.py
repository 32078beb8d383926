import pytest

from loka.measure.isolation import map_isolated

MODULE = f"{__package__}.isolated" if __package__ else "isolated"


def test_values_come_back_in_order() -> None:
    outcomes = map_isolated(f"{MODULE}:double", [{"x": x} for x in (3, 4, 5)], timeout=60)
    assert [outcome.value for outcome in outcomes] == [6, 8, 10]
    assert all(outcome.ok for outcome in outcomes)


def test_every_way_to_fail_is_a_refusal_and_the_rest_runs() -> None:
    ways = ["fine", "raise", "abort", "fine", "poison", "kill", "fine"]
    outcomes = map_isolated(f"{MODULE}:misbehave", [{"how": way} for way in ways], timeout=120, max_crashes=5)
    assert [outcome.ok for outcome in outcomes] == [way == "fine" for way in ways]
    refusals = dict(zip(ways, (outcome.refusal for outcome in outcomes), strict=True))
    assert refusals["raise"] == "ValueError: the code under test said no"
    assert refusals["abort"].startswith("killed by SIGABRT")
    assert "smem_size <= limit" in refusals["abort"]  # what it said last is kept
    assert refusals["poison"].startswith("poisoned the CUDA context")
    assert "illegal memory access" in refusals["poison"]
    assert refusals["kill"].startswith("killed by SIGSEGV")


def test_a_context_that_dies_after_the_answer_is_no_answer() -> None:
    (outcome,) = map_isolated(f"{MODULE}:misbehave", [{"how": "poison late"}], timeout=60)
    assert not outcome.ok
    assert "failed after the call returned" in outcome.refusal


def test_a_hang_is_ended_and_said() -> None:
    outcomes = map_isolated(
        f"{MODULE}:misbehave", [{"how": "hang"}, {"how": "fine"}], timeout=60, case_timeout=4, max_crashes=2
    )
    assert "timed out" in outcomes[0].refusal
    assert outcomes[1].value == "survived fine"


def test_after_too_many_crashes_the_rest_is_refused_unrun() -> None:
    cases = [{"how": "exit"}, {"how": "fine"}]
    first, second = map_isolated(f"{MODULE}:misbehave", cases, timeout=60, max_crashes=1)
    assert first.refusal.startswith("exited with status 3")
    assert second.refusal == "not run: crashed 1 times before"


def test_the_time_box_refuses_what_was_not_reached() -> None:
    outcomes = map_isolated(f"{MODULE}:misbehave", [{"how": "hang"}, {"how": "fine"}], timeout=1.0)
    assert "timed out" in outcomes[0].refusal
    assert "time box" in outcomes[1].refusal


@pytest.mark.parametrize("target", ["math:nothing", "math", "math:pi"])
def test_a_wrong_target_is_the_callers_error(target: str) -> None:
    with pytest.raises(ValueError, match="module:function"):
        map_isolated(target, [{}], timeout=1)
