"""A plan goes by what an error does to the loss: the score, and before it what swapping a site in did to the metric. The error of the product only counts where there is neither."""

import math

import msgspec
import pytest

from loka.dispatch import Policy, make_plan
from loka.records import Candidate, Choice, Interval, Plan, Site

from .evidence import candidate, interval, report, site

ACCURACY = Policy(min_speedup=None, margin=0.001)


def scored(harm: float, recipe: str = "tensorwise", gemm: str = "fprop", error: float = 0.01) -> Candidate:
    made = candidate(gemm=gemm, recipe=recipe, error=error)  # type: ignore[arg-type]
    return msgspec.structs.replace(made, harm=Interval(value=harm, low=harm, high=harm))


def swapped(where: Site, change: Interval, recipe: str | None = "tensorwise") -> Site:
    return msgspec.structs.replace(where, metric_change=change, metric_recipe=recipe)


def plan_of(*sites: Site, policy: Policy = ACCURACY) -> Plan:
    return make_plan(report(*sites), policy)


def first(plan: Plan, gemm: str = "fprop") -> Choice:
    return next(c for c in plan.sites[0].choices if c.gemm == gemm)


def test_the_score_overrules_the_error_both_ways() -> None:
    """A product that looks accurate and ruins the loss is refused; one that looks bad and does nothing is taken."""
    fatal = plan_of(site("a", scored(0.5, error=0.001)))
    assert not first(fatal).quantized
    assert "predicted change of the loss up to 50.0000% exceeds 0.1000%" in first(fatal).reason
    harmless = plan_of(site("a", scored(1e-5, error=0.9)))
    assert first(harmless).quantized
    assert "predicted change of the loss 0.0010%, margin 0.100%" in first(harmless).reason


def test_the_upper_end_of_a_prediction_decides() -> None:
    """As in Probe's own verdict: what it calls unsafe is in no plan."""
    for high, taken in ((0.00099, True), (0.00101, False)):
        wide = msgspec.structs.replace(scored(0.0001), harm=Interval(value=0.0001, low=0.0, high=high))
        assert first(plan_of(site("a", wide))).quantized == taken


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_units_share_the_margin_in_squares(gemm: str) -> None:
    """Four independent sites may each cost half of the margin."""
    four = [
        site(name, scored(harm, gemm=gemm)) for name, harm in zip("abcd", [0.00049, 0.00051, 0.0, 0.001], strict=True)
    ]
    taken = [s.choices[0].quantized for s in plan_of(*four).sites]
    assert taken == [True, False, True, False]
    alone = plan_of(site("a", scored(0.00099, gemm=gemm)))
    assert alone.sites[0].choices[0].quantized


def test_finer_scales_are_tried_where_coarse_ones_cost_too_much() -> None:
    plan = plan_of(
        site("a", scored(0.002, "tensorwise"), scored(0.0002, "rowwise")), policy=Policy(min_speedup=None, margin=0.001)
    )
    assert first(plan).a == "e4m3:row"
    assert len(first(plan).refusals) == 1


@pytest.mark.parametrize("error", [0.0, 0.01])
def test_a_measured_change_vetoes_whatever_is_predicted(error: float) -> None:
    """The record had +200 % for a site of the lowest error; it stays in high precision."""
    for made in (scored(1e-6, error=error), candidate(error=error)):
        plan = plan_of(swapped(site("a", made), Interval(value=2.0, low=1.5, high=2.5)))
        assert not first(plan).quantized
        assert "moved the metric by +200.0000% [+150.0000%, +250.0000%], allowed 0.1000%" in first(plan).reason


def test_the_upper_end_of_the_measured_change_decides() -> None:
    for high, taken in ((0.0009, True), (0.0011, False), (math.inf, False)):
        change = Interval(value=0.0, low=-0.001, high=high)
        assert first(plan_of(swapped(site("a", candidate()), change))).quantized is taken, high


def test_what_the_report_vetoes_is_in_no_plan() -> None:
    """One of nine units has a third of the margin, measured as predicted, and a change for the better counts like one for the worse."""
    for change, taken in (((-0.0003, 0.0003), True), ((0.0001, 0.0005), False), ((-0.0005, -0.0001), False)):
        moved = swapped(site("a", candidate()), Interval(value=sum(change) / 2, low=change[0], high=change[1]))
        others = [site(name, candidate()) for name in "bcdefghi"]
        plan = plan_of(moved, *others)
        assert first(plan).quantized is taken, change


def test_a_measured_change_within_the_margin_excuses_a_prediction_but_not_a_hopeless_one() -> None:
    good = interval(0.0, 0.0002)
    taken = plan_of(swapped(site("a", scored(0.004)), good))
    assert first(taken).quantized
    assert "swapped in alone it moved the metric by +0.0000% [-0.0200%, +0.0200%], allowed" in first(taken).reason
    assert "overrides the predicted change of the loss, up to 0.4" in first(taken).reason
    hopeless = plan_of(swapped(site("a", scored(0.006)), good))
    assert not first(hopeless).quantized
    assert "predicted" in first(hopeless).reason


def test_a_measured_change_is_of_its_recipe_and_of_the_forward_gemm() -> None:
    both = site("a", scored(1e-5, "tensorwise"), scored(1e-5, "rowwise"), scored(1e-5, gemm="wgrad"))
    plan = plan_of(swapped(both, interval(2.0)))
    assert first(plan).a == "e4m3:row"
    assert first(plan, "wgrad").quantized


def test_an_infinite_score_is_no_permission() -> None:
    assert not first(plan_of(site("a", scored(math.inf)))).quantized


def test_kept_sites_are_kept_unless_told_otherwise() -> None:
    kept = msgspec.structs.replace(site("a", scored(1e-6)), kept="it is a prediction layer")
    plan = plan_of(kept)
    assert not first(plan).quantized
    assert first(plan).reason == "it is a prediction layer"
    told = plan_of(kept, policy=Policy(min_speedup=None, overrides={"a": "tensorwise"}))
    assert first(told).quantized
    assert "override" in first(told).reason


def test_without_a_score_the_plan_says_that_little_is_known() -> None:
    assert "what it does to the loss was not measured" in first(plan_of(site("a", candidate()))).reason


def test_what_has_no_score_is_in_no_plan_of_a_model_that_has_one() -> None:
    """A frozen layer that no gradient reaches, or a recipe nobody scored: its error says nothing about the loss, and the margin is for the whole model."""
    frozen = msgspec.structs.replace(site("a", candidate(error=0.01)), unscored="no gradient was seen")
    plan = plan_of(frozen, site("b", scored(1e-5)))
    assert [s.choices[0].quantized for s in plan.sites] == [False, True]
    assert "it has no score, while other sites of the model do: no gradient was seen" in first(plan).reason
    unasked = plan_of(site("a", scored(0.5), candidate(recipe="rowwise", error=0.01)))
    assert not first(unasked).quantized
    assert "rowwise was not scored" in first(unasked).reason
    told = plan_of(site("a", scored(0.5), candidate(recipe="rowwise", error=0.01)), policy=Policy(min_speedup=None, margin=0.001, recipe="rowwise"))  # fmt: skip
    assert first(told).quantized, "who asks for a recipe by name is told, not refused"
    assert "what it does to the loss was not measured" in first(told).reason
    measured = plan_of(swapped(frozen, interval(0.0, 0.0002)), site("b", scored(1e-5)))
    assert first(measured).quantized
    assert first(plan_of(frozen)).quantized, "where nothing has a score, errors are all there is"
