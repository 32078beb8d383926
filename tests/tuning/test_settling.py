"""What leaves for the sake of speed changes what the rest does to the metric, and the other way round: units are dropped until both hold of the same ones."""

from types import SimpleNamespace
from typing import Any

import pytest

from loka.dispatch.choosing import Chosen, Looked, Offer, SiteLook, single
from loka.placing.judging import Judge
from loka.records import Interval
from loka.tuning import metric, session, whole_step
from loka.tuning.call import Call, Selection
from loka.tuning.gradients import describe
from loka.tuning.whole_step import StepTimes

COST = {
    "a": 0.0001,
    "b": 0.00015,
    "c": -0.0002,
    "d": 0.00001,
    "e": 0.00012,
    "f": 0.0001,
    "g": 0.00011,
    "h": 0.00018,
}  # of the metric, which add up; the margin is 0.0002
WIDTH = 0.00003


def make(names: str = "abc", left: float = 60.0) -> tuple[Any, Selection]:
    sites = {name: SiteLook(name, 64, 64, rows=8) for name in names}
    offers = [Offer(single(site), "rowwise", None, 0.3, "safe") for site in sites.values()]
    looked = Looked(sites, [], {})
    call = SimpleNamespace(margin=0.0002, training=True, left=left, budget=60.0, notes=[], cuda_graph=True)
    call.margin_for = lambda change: Call.margin_for(call, change)  # type: ignore[arg-type]
    call.is_within = lambda change, used: Call.is_within(call, change, used)  # type: ignore[arg-type]
    selection = Selection(looked, Chosen(list(offers), {}), None, None, [], 0.0002)  # type: ignore[arg-type]
    selection.alone = {name: Interval(value=COST[name], low=COST[name] - WIDTH, high=COST[name] + WIDTH) for name in names}  # fmt: skip
    return call, selection


def names(selection: Selection) -> str:
    return "".join(sorted(offer.name for offer in selection.offers))


def replace_swap(monkeypatch: pytest.MonkeyPatch, swap: Any) -> None:
    """Answer for units alone and for all together."""
    monkeypatch.setattr(metric, "swap", swap)
    monkeypatch.setattr(metric, "swap_all", swap)


@pytest.fixture(autouse=True)
def swapped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Swapping adds up what units cost; which sets were asked for."""
    asked: list[str] = []

    def swap(call: Any, selection: Selection, offers: list[Offer]) -> Interval:
        asked.append("".join(offer.name for offer in offers))
        total = sum(COST[offer.name] for offer in offers)
        return Interval(value=total, low=total - WIDTH, high=total + WIDTH)

    replace_swap(monkeypatch, swap)
    return asked


def settle(call: Any, selection: Selection, slow: set[str], monkeypatch: pytest.MonkeyPatch) -> tuple[StepTimes, list[str]]:  # fmt: skip
    """Settle where units of some names make the step slower, one of which leaves in every round."""
    timed: list[str] = []

    def verify_speed(call: Any, selection: Selection, original: Any) -> StepTimes:
        while found := [offer for offer in selection.offers if offer.name in slow]:
            selection.drop(found[0], "slower")
        timed.append(names(selection))
        return StepTimes(note=timed[-1])

    monkeypatch.setattr(whole_step, "verify_speed", verify_speed)
    mine = session.Session.__new__(session.Session)
    mine.call, mine.original = call, {}
    mine._verified = {describe(offer) for offer in selection.offers}  # their gradients and kernels are other tests'
    mine._sound, mine._judge = set(mine._verified), Judge("cpu")
    return mine._settle(selection), timed


def test_nothing_leaves_where_both_hold(monkeypatch: pytest.MonkeyPatch, swapped: list[str]) -> None:
    call, selection = make()
    step, timed = settle(call, selection, set(), monkeypatch)
    assert (names(selection), timed, swapped, step.note) == ("abc", ["abc"], [], "abc")


def test_what_is_left_when_one_is_too_slow_is_held_to_the_margin_again(monkeypatch: pytest.MonkeyPatch, swapped: list[str]) -> None:  # fmt: skip
    """Without `c`, which makes up for them, `a` and `b` exceed the margin: the costlier one leaves, the other stays, and its step is what is reported."""
    call, selection = make()
    step, timed = settle(call, selection, {"c"}, monkeypatch)
    assert (names(selection), timed, step.note) == ("a", ["ab", "a"], "a")
    assert swapped == ["ab", "a"]
    assert selection.change is not None
    assert selection.change.value == pytest.approx(COST["a"])
    assert "moved the metric by more than" in selection.chosen.kept["b"]
    assert selection.chosen.kept["c"] == "slower"


def test_without_time_to_try_again_nothing_is_taken_that_was_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    call, selection = make(left=-1.0)
    step, timed = settle(call, selection, {"c"}, monkeypatch)
    assert (names(selection), timed) == ("", ["ab", ""])
    assert step.note is not None
    assert step.note.startswith("the budget of 60 s ran out")
    assert selection.change is None
    assert "budget" in selection.chosen.kept["a"]


def test_no_margin_is_used_that_is_coarser_than_one_that_was_resolved() -> None:
    call, selection = make("ab")
    metric.hold_margin(call, selection, coarsest=0.00005)
    assert selection.unresolved is None
    assert names(selection) == ""
    assert selection.used == 0.00005


def test_a_unit_does_not_pass_for_being_noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    """With b in, data resolve 0.05 % only, and show more than the margin that was asked for without being sure of it: b leaves, and the rest is held to that margin."""
    call, selection = make("ab")
    noisy, quiet = Interval(value=3e-4, low=-2e-4, high=8e-4), Interval(value=1e-5, low=-5e-5, high=7e-5)
    replace_swap(monkeypatch, lambda call, selection, offers: noisy if "b" in "".join(o.name for o in offers) else quiet)  # fmt: skip
    selection.alone = {"a": quiet, "b": noisy}
    metric.hold_margin(call, selection)
    assert names(selection) == "a"
    assert selection.used == call.margin
    assert "moved the metric by more than 0.020%" in selection.chosen.kept["b"]


def test_what_was_measured_of_a_chain_is_not_said_of_its_part() -> None:
    _, selection = make("ab")
    whole = selection.offers[0]
    selection.speeds["a"] = selection.estimates["a"] = Interval(value=1.5, low=1.4, high=1.6)
    selection.replace(whole, [Offer(whole.unit, "chain", None, 0.1, "a part")])
    assert "a" not in {**selection.speeds, **selection.estimates, **selection.alone}
    assert "b" in selection.alone


def test_the_note_on_a_coarse_margin_is_of_what_is_in_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    call, selection = make("ab")
    selection.base = SimpleNamespace(step=0.0, per_example=True)  # type: ignore[assignment]
    wide = Interval(value=0.0, low=-0.0005, high=0.0005)
    replace_swap(monkeypatch, lambda *given: wide)
    metric.hold_margin(call, selection)
    metric.note_margin(call, selection)
    assert "judged at 0.1%" in call.notes[0]
    replace_swap(monkeypatch, lambda *given: Interval(value=0.0, low=-1e-5, high=1e-5))
    metric.hold_margin(call, selection, selection.used)
    metric.note_margin(call, selection)
    assert len(call.notes) == 1


def with_flops(selection: Selection, **rows: int) -> None:
    for name, count in rows.items():
        selection.looked.sites[name].rows = count


def test_what_leaves_costs_much_for_the_flops_it_saves() -> None:
    """`b` costs more than `a` and is most of the model: without `a` it is within the margin."""
    call, selection = make("ab")
    with_flops(selection, a=1, b=8)
    metric.hold_margin(call, selection)
    assert names(selection) == "b"


def test_a_trifle_does_not_leave_for_what_others_cost() -> None:
    """Of the three `d` costs most for its FLOPs, and a fiftieth of what is too much."""
    call, selection = make("abd")
    with_flops(selection, a=8, b=4, d=1)
    metric.hold_margin(call, selection)
    assert names(selection) == "ad"


def test_what_left_is_tried_again_when_it_was_not_the_one(swapped: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cost nothing alone and much together: when the second has left, the first may come back."""
    call, selection = make("efg")
    with_flops(selection, e=1, f=1, g=1)
    costs = {"efg": 0.0004, "fg": 0.0003, "ef": 0.0001}

    def swap(call: Any, selection: Selection, offers: list[Offer]) -> Interval:
        asked = "".join(sorted(offer.name for offer in offers))
        swapped.append(asked)
        value = costs.get(asked, 0.0001)
        return Interval(value=value, low=value - WIDTH, high=value + WIDTH)

    def swap_all(call: Any, selection: Selection, offers: list[Offer]) -> Interval:
        found = swap(call, selection, offers)
        selection.swapped = swapped[-1]  # type: ignore[assignment]
        return found

    monkeypatch.setattr(metric, "swap", swap)
    monkeypatch.setattr(metric, "swap_all", swap_all)
    metric.hold_margin(call, selection)
    assert (names(selection), "e" in selection.chosen.kept) == ("ef", False)
    assert selection.change is not None
    assert selection.change.value == 0.0001
    assert selection.swapped == "ef"  # type: ignore[comparison-overlap]
    assert [row.name for row in session._describe(selection) if row.way != "high"] == ["f", "e"]


def test_what_is_tried_again_and_fails_leaves_no_trace(swapped: list[str]) -> None:
    call, selection = make("abh")
    with_flops(selection, a=8, b=8, h=8)
    metric.hold_margin(call, selection)
    assert names(selection) == "a"
    assert swapped[-1] == "ah"  # tried, too much
    assert selection.change is not None
    assert selection.change.value == pytest.approx(COST["a"])
    assert {"b", "h"} == set(selection.chosen.kept)


def time_steps(selection: Selection, gains: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A step of 100 us that every unit makes shorter, or longer, by so many; which sets were timed."""
    timed: list[str] = []

    def time_converted(call: Any, selection: Selection, base: Any) -> Any:
        timed.append(names(selection))
        took = 100.0 - sum(gains[offer.name] for offer in selection.offers)
        run = SimpleNamespace(host_microseconds=1.0)
        return {"bf16": run, "loka": run}, {"bf16": [100.0] * 3, "loka": [took] * 3}

    monkeypatch.setattr(whole_step, "_time_converted", time_converted)
    return timed


def verify_speed(left: float, speeds: dict[str, float], gains: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> tuple[StepTimes, Selection, list[str]]:  # fmt: skip
    call, selection = make("".join(speeds), left)
    call.untimed = None
    selection.speeds = {name: Interval(value=v, low=v, high=v) for name, v in speeds.items()}
    timed = time_steps(selection, gains, monkeypatch)
    run: Any = SimpleNamespace(host_microseconds=1.0)
    return whole_step.verify_speed(call, selection, {"bf16": run}), selection, timed


SPEEDS = {"a": 1.5, "b": 1.05, "c": 1.04, "d": 1.03}


def test_one_that_pays_stays_where_many_that_do_not_make_the_step_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    step, selection, timed = verify_speed(60.0, SPEEDS, {"a": 20, "b": -30, "c": -20, "d": -20}, monkeypatch)
    assert timed == ["abcd", "ab", "a"]
    assert names(selection) == "a"
    assert step.speedup is not None
    assert step.speedup.value == pytest.approx(1.25)
    assert selection.chosen.kept == dict.fromkeys(
        "bcd", "the whole step was 0.67x as fast as 16-bit with it, and 1.25x without it"
    )


def test_units_that_gain_little_alone_leave_where_the_step_is_faster_without(monkeypatch: pytest.MonkeyPatch) -> None:
    step, selection, timed = verify_speed(60.0, SPEEDS, {"a": 30, "b": -2, "c": -2, "d": -2}, monkeypatch)
    assert (timed, names(selection)) == (["abcd", "a"], "a")
    assert step.medians["loka"] == 70.0
    step, selection, timed = verify_speed(60.0, SPEEDS, {"a": 30, "b": 2, "c": 2, "d": 2}, monkeypatch)
    assert (timed, names(selection), selection.chosen.kept) == (["abcd", "a"], "abcd", {})
    assert step.medians["loka"] == 64.0


def test_without_time_what_was_faster_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    _, selection, timed = verify_speed(10.0, SPEEDS, {"a": 30, "b": -2, "c": -2, "d": -2}, monkeypatch)
    assert (timed, names(selection)) == (["abcd"], "abcd")


def test_nothing_stays_that_makes_no_step_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    step, selection, timed = verify_speed(60.0, SPEEDS, dict.fromkeys("abcd", -1.0), monkeypatch)
    assert (timed, names(selection)) == (["abcd", "ab", "a"], "")
    assert set(selection.chosen.kept) == set("abcd")
    assert (
        step.note
        == "the whole step was not faster in FP8 than in compiled 16-bit (0.99x at best): nothing is converted"
    )


def test_what_left_after_the_paired_run_is_named_whenever_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training dropped a; then the metric of what is left dropped b, and the time of the step c."""
    call, selection = make("abcd")
    started = selection.offers
    selection.drop(selection.offers[0], "the paired run")

    def drop_first(*given: Any) -> StepTimes:
        selection.drop(selection.offers[0], "later")
        return StepTimes()

    monkeypatch.setattr(metric, "hold_margin", drop_first)
    monkeypatch.setattr(metric, "note_margin", lambda call, selection: None)
    monkeypatch.setattr(session.Session, "_settle", drop_first)
    tuning = object.__new__(session.Session)
    tuning.call = call
    tuning._verify_step(selection, started, Interval(value=0.0, low=0.0, high=0.0))
    assert call.notes == ["the paired training run also included b, c, which were dropped later"]
