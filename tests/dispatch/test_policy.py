"""The policy takes the fastest that is accurate enough, on the worse end of every interval, and says why."""

import msgspec
import pytest

from loka.dispatch import Policy, make_plan
from loka.records import Choice, Plan

from .evidence import candidate, report, site

ACCURACY = Policy(min_speedup=None)


def choice(plan: Plan, gemm: str = "fprop", number: int = 0) -> Choice:
    (found,) = [c for c in plan.sites[number].choices if c.gemm == gemm]
    return found


def test_accuracy_only_takes_the_finest_recipe_that_passes() -> None:
    """Where no speed is known nothing is gained by coarser scales."""
    evidence = report(site("a", candidate(recipe="tensorwise", error=0.15), candidate(recipe="rowwise", error=0.16)))
    plan = make_plan(evidence, ACCURACY)
    assert choice(plan).a == "e4m3:row"
    assert choice(plan).expected_error == 0.16
    assert "the finest recipe that passes" in choice(plan).reason
    assert plan.target is None
    assert "accuracy only" in plan.notes[0]


def test_the_upper_end_of_the_error_decides() -> None:
    close = candidate(recipe="tensorwise", error=0.195, half=0.01)
    plan = make_plan(report(site("a", close, candidate(recipe="rowwise", error=0.1))), ACCURACY)
    assert choice(plan).a == "e4m3:row"
    assert choice(plan).refusals == ["tensorwise on reference: error up to 0.205 exceeds 0.2"]


def test_gradients_have_their_own_limit() -> None:
    found = [candidate(gemm=gemm, error=0.12) for gemm in ("fprop", "dgrad", "wgrad")]
    plan = make_plan(report(site("a", *found)), ACCURACY)
    assert [c.quantized for c in plan.sites[0].choices] == [True, False, False]


def test_without_measured_speed_nothing_is_converted_and_the_plan_says_why() -> None:
    plan = make_plan(report(site("a", candidate())), Policy(min_speedup=1.05))
    assert not choice(plan).quantized
    assert "speed not measured" in choice(plan).reason
    assert "nothing is converted" in plan.notes[0]
    assert plan.target == "test device"


def test_an_empty_plan_says_how_many_gemms_fail_which_requirement() -> None:
    evidence = report(
        site("a", candidate(error=0.5, speedup=1.6)), site("b", candidate()), site("c", candidate(speedup=1.01))
    )
    plan = make_plan(evidence, Policy(min_speedup=1.05))
    assert (
        "of 3 GEMMs, no recipe is accurate enough for 1; what is accurate enough was not timed at its shape for 1, and is "
        "not faster than bf16 by 1.05 for 1" in plan.notes[0]
    )


def test_backends_that_are_refused_for_one_reason_share_a_line() -> None:
    slow = [msgspec.structs.replace(candidate(error=0.5), backend=name) for name in ("torch", "triton")]
    refusals = choice(make_plan(report(site("a", *slow)), ACCURACY)).refusals
    assert refusals == ["tensorwise on torch, triton: error up to 0.51 exceeds 0.2"]


def test_the_fastest_accurate_candidate_wins() -> None:
    evidence = report(
        site("a", candidate(recipe="tensorwise", speedup=1.4), candidate(recipe="rowwise", speedup=1.6)),
        site("b", candidate(recipe="tensorwise", speedup=1.4), candidate(recipe="rowwise", speedup=1.6, error=0.5)),
    )
    plan = make_plan(evidence, Policy(min_speedup=1.05))
    assert [choice(plan, number=i).a for i in (0, 1)] == ["e4m3:row", "e4m3:tensor"]
    assert choice(plan).expected_speedup == 1.6


def test_the_lower_end_of_the_speedup_decides() -> None:
    plan = make_plan(report(site("a", candidate(speedup=1.055))), Policy(min_speedup=1.05))
    assert not choice(plan).quantized


def test_a_refused_candidate_keeps_its_reason() -> None:
    plan = make_plan(report(site("a", candidate(refusal="no such GPU"))), ACCURACY)
    assert not choice(plan).quantized
    assert "no such GPU" in choice(plan).reason


def test_overrides_decide_first_and_are_named() -> None:
    evidence = report(
        site("head.last", candidate(recipe="tensorwise"), candidate(recipe="rowwise")),
        site("body.0", candidate(recipe="tensorwise", error=0.9), candidate(recipe="rowwise")),
    )
    plan = make_plan(evidence, Policy(min_speedup=None, overrides={"head.*": "high", "*.0": "tensorwise"}))
    assert not choice(plan, number=0).quantized
    assert "override 'head.*'" in choice(plan, number=0).reason
    assert choice(plan, number=1).a == "e4m3:tensor"
    assert choice(plan, number=1).expected_error == 0.9


def test_overrides_that_cannot_be_honoured_raise() -> None:
    evidence = report(site("a", candidate()))
    with pytest.raises(ValueError, match="match no site: b"):
        make_plan(evidence, Policy(min_speedup=None, overrides={"b": "high"}))
    with pytest.raises(ValueError, match="'fast' is not"):
        Policy(overrides={"a": "fast"})
    with pytest.raises(ValueError, match="no backend was evaluated with rowwise"):
        make_plan(evidence, Policy(min_speedup=None, overrides={"a": "rowwise"}))


def test_a_target_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="measured there"):
        make_plan(report(site("a", candidate())), Policy(min_speedup=1.05, target="H200"))
    with pytest.raises(ValueError, match="needs min_speedup"):
        Policy(min_speedup=None, target="H200")


@pytest.mark.parametrize("options", [{"max_error": 0.0}, {"max_gradient_error": -1.0}, {"min_speedup": 0.0}])
def test_nonsense_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        Policy(**options)  # type: ignore[arg-type]


def test_shares_count_the_gemms_in_low_precision() -> None:
    evidence = report(
        site("a", candidate(), candidate(gemm="wgrad", error=0.5), share=0.6), site("b", candidate(), share=0.3)
    )
    assert make_plan(evidence, ACCURACY).low_precision_share == pytest.approx(0.6 / 2 + 0.3)


def test_bf16_wins_ties_even_where_slower_would_be_accepted() -> None:
    plan = make_plan(report(site("a", candidate(speedup=1.005))), Policy(min_speedup=0.5))
    assert not choice(plan).quantized
    assert "bf16, which wins ties" in choice(plan).reason
    assert choice(make_plan(report(site("a", candidate(speedup=1.02))), Policy(min_speedup=0.5))).quantized


def test_a_speed_says_where_it_was_measured() -> None:
    plan = make_plan(report(site("a", candidate(speedup=1.5))), Policy(min_speedup=1.05))
    assert choice(plan).speed_source == "Probe on test device"
    assert choice(make_plan(report(site("a", candidate())), ACCURACY)).speed_source is None


def test_one_recipe_is_kept_to_where_asked() -> None:
    found = [candidate(recipe=r, gemm=g, error=e) for g in ("fprop", "wgrad") for r, e in (("tensorwise", 0.01), ("rowwise", 0.05))]  # type: ignore[arg-type]  # fmt: skip
    plan = make_plan(report(site("a", *found)), Policy(min_speedup=None, recipe="rowwise"))
    assert [c.a for c in plan.sites[0].choices] == ["e4m3:row"] * 2
    assert plan.recipe == "rowwise"
    kept = make_plan(report(site("a", *found)), Policy(min_speedup=None, recipe="rowwise_with_gw_hp"))
    assert "keeps wgrad in high precision" in choice(kept, "wgrad").reason
    back = Policy(min_speedup=None, recipe="tensorwise", overrides={"a": "auto"})
    assert choice(make_plan(report(site("a", *found)), back)).a == "e4m3:row"
    with pytest.raises(ValueError, match="no recipe 'fp8'"):
        Policy(recipe="fp8")


def test_sites_without_evidence_are_named() -> None:
    """A share of the probed FLOPs does not count them, so the plan must."""
    unseen = [msgspec.structs.replace(site(f"late.{i}"), gemms=[], calls=0) for i in range(8)]
    plan = make_plan(report(site("seen", candidate()), *unseen), Policy(min_speedup=None))
    (note,) = (note for note in plan.notes if note.startswith("not judged"))
    assert "late.5 and 2 more; no sampled step called them" in note
    assert not any(note.startswith("not judged") for note in make_plan(report(site("seen", candidate())), Policy(min_speedup=None)).notes)  # fmt: skip
