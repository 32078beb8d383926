"""A metric budget: the fastest set of sites whose measured effects on the end metric stay within a bound.

Each site has a saving and an effect: the upper end of the relative change of the end metric with that site alone in low
precision (`Site.metric_change`; a loss, so more is worse). Effects are summed. An upper end below zero counts as zero,
since an improvement by rounding noise must not pay for other sites. Choosing sites is a knapsack:

    maximize  sum of savings    subject to    sum of effects <= bound

solved exactly by keeping, site by site, the Pareto front of (effect, saving) pairs. If the front grows beyond
`MAX_STATES`, effects are rounded *up* to a grid of bound / 10 000, which can only make the answer more conservative.

The sum is an assumption: errors of several sites may cancel or amplify each other. So the set is a proposal until it is
measured jointly (`verify`), and the plan says which of the two it is. A set that exceeds the bound when measured
together is replaced by a smaller one: first the bound on the sum is tightened. Then, since sites that cost nothing
alone may cost something together, those are dropped too, half of them at a time, largest upper end first. The empty set
changes nothing and is the last resort.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from loka.dispatch.recipe import choice_of
from loka.records import Interval, Plan, ProbeReport, Site, SitePlan

Verify = Callable[[Plan], Interval]  # measures the relative change of the end metric with a whole plan applied

MAX_STATES = 20_000
GRID = 10_000
MAX_ROUNDS = 12  # joint measurements; in the second half only sites that cost nothing alone are left


@dataclass(frozen=True)
class Item:
    """One site: its effect on the end metric and its saving, in any unit that is the same for all sites."""

    name: str
    effect: float
    saving: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.effect) and math.isfinite(self.saving)):
            raise ValueError(f"{self.name}: effect {self.effect} and saving {self.saving} must be finite")


def choose_items(items: Sequence[Item], bound: float) -> list[str]:
    """Return the names of the items with the largest total saving whose effects sum to at most the bound."""
    if not (math.isfinite(bound) and bound >= 0):
        raise ValueError(f"the bound of the metric's change is {bound}, expected 0 or more")
    free = {item.name for item in items if item.effect <= 0 and item.saving > 0}
    costly = [item for item in items if item.effect > 0 and item.saving > 0]
    chosen = free | _solve(costly, bound)
    return [item.name for item in items if item.name in chosen]


def _solve(items: Sequence[Item], bound: float) -> set[str]:
    """Solve the knapsack over Pareto states (effect, saving, names), sorted by effect and thus by saving."""
    states: list[tuple[float, float, tuple[str, ...]]] = [(0.0, 0.0, ())]
    step = bound / GRID
    for item in sorted(items, key=lambda i: i.effect / i.saving):
        coarse = len(states) > MAX_STATES and step > 0
        effect = math.ceil(item.effect / step) * step if coarse else item.effect
        added = [(e + effect, s + item.saving, (*names, item.name)) for e, s, names in states if e + effect <= bound]
        states = _pareto_front(sorted([*states, *added], key=lambda state: (state[0], -state[1])))
        if coarse:
            states = _pareto_front([(math.ceil(e / step) * step, s, names) for e, s, names in states])
            states = [state for state in states if state[0] <= bound]
    return set(states[-1][2])


def _pareto_front(ordered: list[tuple[float, float, tuple[str, ...]]]) -> list[tuple[float, float, tuple[str, ...]]]:
    kept: list[tuple[float, float, tuple[str, ...]]] = []
    for state in ordered:
        if not kept or state[1] > kept[-1][1]:
            if kept and kept[-1][0] == state[0]:
                kept.pop()
            kept.append(state)
    return kept


@dataclass(frozen=True)
class Spent:
    """The result of a search."""

    chosen: frozenset[str]  # sites that may run in low precision, including those fixed by the caller
    first: frozenset[str]  # the set chosen by single effects alone
    change: Interval | None  # of the end metric with all chosen sites together; None if not measured
    notes: list[str]  # the sets that were given up, and what was measured


def search(
    items: Sequence[Item],
    bound: float,
    measure: Callable[[frozenset[str]], Interval] | None,
    *,
    told: Mapping[str, float] | None = None,
    suspicion: Mapping[str, float] | None = None,
) -> Spent:
    """Find the items with the largest total saving that stay within a bound on the end metric; empty if there are none.

    `measure` measures the change with a set of items together; None proposes a set by its sum alone. `told` items are
    always chosen; if they alone exceed the bound, ValueError. `suspicion` holds the upper ends of the effects, negative
    ones included: the highest are dropped first once only items that cost nothing alone are left.
    """
    told, suspicion = told or {}, suspicion or {}
    effects = {**{item.name: item.effect for item in items}, **told}
    fixed = sum(told.values())
    limit, notes = bound - fixed, list[str]()
    left = list(items)
    first = frozenset((*choose_items(left, limit), *told))
    if measure is None:
        note = f"{_describe_sum(effects, first, bound)}; not measured together: verify before trusting it"
        return Spent(first, first, None, [note])
    for number in range(MAX_ROUNDS):
        chosen = frozenset((*choose_items(left, limit), *told))
        if not chosen:
            break
        joint = measure(chosen)
        seen = f"measured together: {joint:+.3%}"
        if joint.high <= bound:
            return Spent(chosen, first, joint, [*notes, f"{_describe_sum(effects, chosen, bound)}; {seen}"])
        notes.append(f"a set of {len(chosen)} sites was given up: {seen}, beyond {bound:.3%}")
        if chosen == told.keys():
            raise ValueError(
                f"the sites overrides convert do not stay within {bound:.3%} when measured together: "
                + "; ".join(notes)
            )
        spent = sum(effects[name] for name in chosen) - fixed
        if number == MAX_ROUNDS - 2:
            left = []  # the last measurement is for `told` alone
        elif spent > 0:
            limit = spent * min(0.5, bound / joint.high) if number < MAX_ROUNDS // 2 else 0.0
        else:
            left = _drop_suspects([item for item in left if item.name in chosen], suspicion)
    none = Interval(value=0.0, low=0.0, high=0.0)
    return Spent(
        frozenset(),
        first,
        none,
        [*notes, f"nothing is converted: no set that was measured together stays within {bound:.3%}"],
    )


def _drop_suspects(items: list[Item], suspicion: Mapping[str, float]) -> list[Item]:
    """Keep half of the sites, those with the lowest suspicion. Sites with only gradients quantized are kept longest."""
    ranked = sorted(items, key=lambda item: (suspicion.get(item.name, -math.inf), -item.saving))
    return ranked[: len(ranked) // 2]


def _describe_sum(effects: Mapping[str, float], chosen: frozenset[str], bound: float) -> str:
    total = sum(effects[name] for name in chosen)
    return f"effects measured one site at a time sum to at most {total:.3%} of the end metric, bound {bound:.3%}"


def spend(report: ProbeReport, plan: Plan, bound: float, verify: Verify | None = None) -> Plan:
    """Keep the fastest sites of a plan within a budget; the others return to high precision, with the reason.

    Sites converted by an override stay and use up the budget first. Only the forward product reaches the metric of a
    trained model, so a site that quantizes gradients alone costs nothing here.
    """
    evidence = {site.name: site for site in report.sites}
    told = [s for s in plan.sites if any(c.reason.startswith("override ") for c in s.quantized)]
    free = [site for site in plan.sites if site.quantized and site not in told]
    effects = {site.site: _effect(evidence[site.site], site) for site in (*told, *free)}
    unknown = [site.site for site in told if effects[site.site] is None]
    if unknown:
        raise ValueError(
            f"overrides convert sites whose effect on the end metric was not measured: {', '.join(unknown)}"
        )
    paid = {site.site: effects[site.site] or 0.0 for site in told}
    if sum(paid.values()) > bound:
        raise ValueError(
            f"the sites overrides convert may change the end metric by {sum(paid.values()):.3%}, beyond the bound of {bound:.3%}"
        )
    items = [
        Item(site.site, effect, _saving(evidence[site.site], site, by_time=plan.min_speedup is not None))
        for site in free
        if (effect := effects[site.site]) is not None
    ]
    by_effect = frozenset((*choose_items(items, bound - sum(paid.values())), *paid))

    def measure(chosen: frozenset[str]) -> Interval:
        assert verify is not None
        return verify(_restrict(plan, Spent(chosen, by_effect, None, []), effects, bound))

    changes = {site.site: evidence[site.site].metric_change for site in free if _reaches_metric(site)}
    suspicion = {name: change.high for name, change in changes.items() if change is not None}
    spent = search(items, bound, None if verify is None else measure, told=paid, suspicion=suspicion)
    return _restrict(plan, spent, effects, bound)


def _restrict(plan: Plan, spent: Spent, effects: Mapping[str, float | None], bound: float) -> Plan:
    """Return the plan with only the chosen sites converted; the others return to high precision, with the reason."""

    def explain(name: str) -> str:
        effect = effects[name]
        if effect is None:
            return "its effect on the end metric was not measured, and a bound is set"
        if name in spent.first:
            return f"sites measured together, this one among them, went beyond the bound of {bound:.3%}"
        return f"it may change the end metric by {effect:.3%}; the bound of {bound:.3%} is better spent on other sites"

    sites = [
        site if site.site in spent.chosen or site.site not in effects else _revert(site, explain(site.site))
        for site in plan.sites
    ]
    total = sum(effects.get(name) or 0.0 for name in spent.chosen)
    return msgspec.structs.replace(plan, sites=sites, expected_metric_change=total, notes=[*plan.notes, *spent.notes])


def _reaches_metric(planned: SitePlan) -> bool:
    """Check whether a site's forward product is quantized. Gradients do not affect a trained model's output."""
    return any(c.gemm == "fprop" for c in planned.quantized)


def _effect(site: Site, planned: SitePlan) -> float | None:
    """Return the largest expected change of the end metric by converting a site; None if not measured."""
    if not _reaches_metric(planned):
        return 0.0
    return None if site.metric_change is None else max(0.0, site.metric_change.high)


def _saving(site: Site, planned: SitePlan, *, by_time: bool) -> float:
    """Return the saved microseconds over all calls if times are known, else the share of GEMM FLOPs."""
    if not by_time:
        return planned.low_precision_share
    return site.calls * sum(
        c.expected_microseconds * (c.expected_speedup - 1)
        for c in planned.quantized
        if c.expected_microseconds is not None and c.expected_speedup is not None
    )


def _revert(site: SitePlan, why: str) -> SitePlan:
    choices = [
        choice_of(c.gemm, None, why, refusals=[*c.refusals, f"{c.a} @ {c.b} on {c.backend}: {why}"])
        if c.quantized
        else c
        for c in site.choices
    ]
    return msgspec.structs.replace(site, choices=choices)
