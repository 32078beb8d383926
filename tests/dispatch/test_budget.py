"""A budget is spent on the sites that save most, exactly, and a joint measurement has the last word."""

import itertools
import random
from typing import Any

import msgspec
import pytest

from loka.dispatch import Policy, make_plan
from loka.dispatch import budget as budget_module
from loka.dispatch.budget import Item, Spent, choose_items, search
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


def plan(*sites: Any, bound: float = 0.001, **changes: Any) -> Plan:
    return make_plan(report(*sites), Policy(**{"max_metric_change": bound, **changes}))


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


def searched(effects: dict[str, float], measure: Any, **savings: float) -> Spent:
    """A search over items with these upper ends, all saving the same where nothing else is said."""
    items = [Item(name, max(0.0, effect), savings.get(name, 1.0)) for name, effect in effects.items()]
    return search(items, 0.001, measure, suspicion=effects)


def too_much_beyond_one(seen: list[list[str]]) -> Any:
    def measure(chosen: frozenset[str]) -> Interval:
        seen.append(sorted(chosen))
        worst = 0.002 if len(chosen) > 1 else 0.0005
        return Interval(value=worst / 2, low=0.0, high=worst)

    return measure


def test_a_joint_measurement_has_the_last_word() -> None:
    seen: list[list[str]] = []
    found = searched({"a": 0.0004, "b": 0.0004}, too_much_beyond_one(seen), b=2.0)
    assert seen == [["a", "b"], ["b"]]
    assert found.chosen == {"b"}
    assert any("a set of 2 sites was given up" in note for note in found.notes)
    assert any("measured together: +0.025%" in note for note in found.notes)


@pytest.mark.parametrize("count", [3, 9])
def test_sites_without_harm_alone_are_given_up_when_they_harm_together(count: int) -> None:
    seen: list[list[str]] = []
    found = searched({str(i): -1e-6 * (i + 1) for i in range(count)}, too_much_beyond_one(seen))
    assert found.chosen == {str(count - 1)}  # the furthest from harm
    assert len(seen[-1]) == 1


def test_costly_sites_go_before_those_without_harm() -> None:
    seen: list[list[str]] = []
    found = searched({"a": 1e-5, "b": -1e-6, "c": -2e-6}, too_much_beyond_one(seen))
    assert seen == [["a", "b", "c"], ["b", "c"], ["c"]]
    assert found.chosen == {"c"}


@pytest.mark.parametrize("effects", [[4e-4], [-1e-6], [1e-5 * i for i in range(30)], [-1e-6] * 40])
def test_a_bound_that_cannot_be_met_converts_nothing(effects: list[float]) -> None:
    rounds: list[int] = []

    def measure(chosen: frozenset[str]) -> Interval:
        rounds.append(len(chosen))
        return Interval(value=0.1, low=0.1, high=0.1)

    found = searched({str(i): effect for i, effect in enumerate(effects)}, measure)
    assert found.chosen == frozenset()
    assert 0 not in rounds  # the empty set needs no measurement
    assert len(rounds) <= budget_module.MAX_ROUNDS
    assert rounds == sorted(set(rounds), reverse=True)  # smaller every time
    assert "nothing is converted: no set that was measured together stays within 0.100%" in found.notes


def test_what_cannot_be_asked_of_a_budget_raises() -> None:
    with pytest.raises(ValueError, match="expected 0 or more"):
        Policy(max_metric_change=-0.1)
