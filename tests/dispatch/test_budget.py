"""A budget is spent on the sites that save most, exactly, and a joint measurement has the last word."""

import itertools
import random
from typing import Any

import msgspec
import pytest

from loka.dispatch import Policy, make_plan
from loka.dispatch import budget as budget_module
from loka.dispatch.budget import Item, choose_items
from loka.records import Interval, Plan

from .evidence import candidate, report, site
from .measured import interval


def brute_force(items: list[Item], bound: float) -> float:
    best = 0.0
    for size in range(len(items) + 1):
        for some in itertools.combinations(items, size):
            if sum(max(0.0, i.effect) for i in some) <= bound + 1e-12:
                best = max(best, sum(i.saving for i in some))
    return best


def some_items(seed: int, count: int = 9) -> list[Item]:
    dice = random.Random(seed)
    return [
        Item(str(i), dice.choice([-0.1, 0.0, dice.random()]), dice.choice([0.0, dice.random()])) for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(25))
def test_the_choice_is_the_best_there_is(seed: int) -> None:
    items = some_items(seed)
    bound = random.Random(seed + 100).choice([0.0, 0.3, 1.0, 2.0])
    chosen = [item for item in items if item.name in choose_items(items, bound)]
    assert sum(max(0.0, i.effect) for i in chosen) <= bound + 1e-12
    assert sum(i.saving for i in chosen) == pytest.approx(brute_force(items, bound))


def test_many_sites_stay_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "MAX_STATES", 50)  # the coarse grid
    monkeypatch.setattr(budget_module, "GRID", 200)
    for seed in range(10):
        items = some_items(seed, 12)
        chosen = [item for item in items if item.name in choose_items(items, 1.0)]
        assert sum(max(0.0, i.effect) for i in chosen) <= 1.0 + 1e-12
        assert sum(i.saving for i in chosen) >= 0.9 * brute_force(items, 1.0)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        choose_items([], -1.0)
    with pytest.raises(ValueError, match="must be finite"):
        Item("a", float("nan"), 1.0)


def measured(name: str, effect: float | None, speedup: float = 1.5, microseconds: float = 10.0) -> Any:
    timed = msgspec.structs.replace(candidate(speedup=speedup), microseconds=interval(microseconds))
    made = site(name, timed)
    change = None if effect is None else Interval(value=effect / 2, low=-effect, high=effect)
    return msgspec.structs.replace(made, metric_change=change)


def plan(*sites: Any, bound: float = 0.001, verify: Any = None, **changes: Any) -> Plan:
    return make_plan(report(*sites), Policy(**{"max_metric_change": bound, **changes}), verify=verify)


def converted(made: Plan) -> list[str]:
    return [s.site for s in made.sites if s.choices[0].quantized]


def test_the_fastest_set_within_the_bound_is_taken() -> None:
    sites = [measured("a", 0.0009, microseconds=10.0), measured("b", 0.0005, microseconds=8.0), measured("c", 0.0005, microseconds=8.0)]  # fmt: skip
    made = plan(*sites)
    assert converted(made) == ["b", "c"]
    assert made.expected_metric_change == pytest.approx(0.001)
    assert made.max_metric_change == 0.001
    assert "better spent on other sites" in made.sites[0].choices[0].reason
    assert any("not measured together" in note for note in made.notes)


def test_a_site_whose_effect_is_unknown_stays() -> None:
    made = plan(measured("a", None), measured("b", 0.0001))
    assert converted(made) == ["b"]
    assert "was not measured" in made.sites[0].choices[0].reason


def test_without_times_the_flops_decide() -> None:
    sites = [msgspec.structs.replace(measured(n, 0.0006), flops_share=f) for n, f in (("a", 0.2), ("b", 0.5))]
    assert converted(plan(*sites, min_speedup=None)) == ["b"]


def test_gradients_alone_cost_no_budget() -> None:
    only = msgspec.structs.replace(
        measured("a", 0.5), candidates=[candidate(gemm="wgrad", speedup=1.5)], gemms=["wgrad"]
    )
    assert converted(plan(only, min_speedup=None)) == ["a"]


def test_overrides_are_paid_for_first() -> None:
    sites = [measured("a", 0.0008, 1.1), measured("b", 0.0005, 2.0)]
    assert converted(plan(*sites)) == ["b"]
    assert converted(plan(*sites, overrides={"a": "tensorwise"})) == ["a"]
    with pytest.raises(ValueError, match=r"beyond the bound of 0\.050%"):
        plan(*sites, bound=0.0005, overrides={"a": "tensorwise"})
    with pytest.raises(ValueError, match="was not measured: c"):
        plan(*sites, measured("c", None), overrides={"c": "tensorwise"})


def test_a_joint_measurement_has_the_last_word() -> None:
    seen: list[list[str]] = []

    def verify(made: Plan) -> Interval:
        seen.append(converted(made))
        worst = 0.002 if len(converted(made)) > 1 else 0.0005
        return Interval(value=worst / 2, low=0.0, high=worst)

    made = plan(measured("a", 0.0004, 1.5), measured("b", 0.0004, 2.0), verify=verify)
    assert seen == [["a", "b"], ["b"]]
    assert converted(made) == ["b"]
    assert any("a set of 2 sites was given up" in note for note in made.notes)
    assert any("measured together: +0.025%" in note for note in made.notes)


def harmless(name: str, high: float, **more: Any) -> Any:
    """A site that seems to do no harm alone: its upper end is not above zero."""
    return msgspec.structs.replace(measured(name, 0.0, **more), metric_change=Interval(value=high - 2e-5, low=high - 4e-5, high=high))  # fmt: skip


@pytest.mark.parametrize("count", [3, 9])
def test_sites_without_harm_alone_are_given_up_when_they_harm_together(count: int) -> None:
    seen: list[int] = []

    def verify(made: Plan) -> Interval:
        seen.append(len(converted(made)))
        worst = 0.002 if seen[-1] > 1 else 0.0005
        return Interval(value=worst / 2, low=0.0, high=worst)

    made = plan(*(harmless(str(i), -1e-6 * (i + 1)) for i in range(count)), verify=verify)
    assert converted(made) == [str(count - 1)]  # the furthest from harm
    assert seen[-1] == 1
    assert "measured together, this one among them" in made.sites[0].choices[0].reason


def test_costly_sites_go_before_those_without_harm() -> None:
    seen: list[list[str]] = []

    def verify(made: Plan) -> Interval:
        seen.append(converted(made))
        worst = 0.002 if len(seen[-1]) > 1 else 0.0005
        return Interval(value=worst / 2, low=0.0, high=worst)

    made = plan(measured("a", 1e-5), harmless("b", -1e-6), harmless("c", -2e-6), verify=verify)
    assert seen == [["a", "b", "c"], ["b", "c"], ["c"]]
    assert converted(made) == ["c"]
    assert made.expected_metric_change == 0.0


@pytest.mark.parametrize("effects", [[4e-4], [-1e-6], [1e-5 * i for i in range(30)], [-1e-6] * 40])
def test_a_bound_that_cannot_be_met_converts_nothing(effects: list[float]) -> None:
    sites = [measured(str(i), e) if e > 0 else harmless(str(i), e) for i, e in enumerate(effects)]
    rounds: list[int] = []

    def verify(made: Plan) -> Interval:
        rounds.append(len(converted(made)))
        return Interval(value=0.1, low=0.1, high=0.1)

    made = plan(*sites, verify=verify)
    assert converted(made) == []
    assert made.expected_metric_change == 0.0
    assert 0 not in rounds  # the empty set needs no measurement
    assert len(rounds) <= budget_module.MAX_ROUNDS
    assert rounds == sorted(set(rounds), reverse=True)  # smaller every time
    assert "nothing is converted: no set that was measured together stays within 0.100%" in made.notes


def test_what_was_told_is_measured_too() -> None:
    sites = [measured("a", 0.0004), *(harmless(f"b{i}", -1e-6) for i in range(40))]

    def verify(made: Plan) -> Interval:
        worst = 0.0001 if converted(made) == ["a"] else 0.1
        return Interval(value=worst, low=worst, high=worst)

    told = {"a": "tensorwise"}
    assert converted(plan(*sites, verify=verify, overrides=told)) == ["a"]
    with pytest.raises(ValueError, match=r"overrides convert do not stay within 0\.100%"):
        plan(*sites, verify=lambda _: Interval(value=0.1, low=0.1, high=0.1), overrides=told)


def test_what_cannot_be_asked_of_a_budget_raises() -> None:
    with pytest.raises(ValueError, match="set max_metric_change"):
        make_plan(report(measured("a", 0.0)), Policy(), verify=lambda _: interval(0.0))
    with pytest.raises(ValueError, match="expected 0 or more"):
        Policy(max_metric_change=-0.1)
