"""Turn a probe report into a plan: for every GEMM, choose the fastest candidate that is accurate enough.

Accurate enough, by the first of these that is available:

    metric   the change of the metric measured with this recipe swapped in (fprop only), judged by the same rule as in
             the report (`loka.dispatch.margin.allow`): what the report vetoes is never planned. A prediction beyond
             HOPELESS times the margin must pass the score as well
    score    the predicted change of the loss (`Candidate.harm`, see docs/concepts/score.md), at most this GEMM's share
             of the margin, margin / sqrt(units)
    error    of the product, if nothing in the model has a score (a loop without gradients): the upper end of guarded
             MERE in fprop, of relative L2 in the gradient GEMMs. It says little about the loss

Where other sites have a score, a candidate without one (a frozen layer that no gradient reaches, a recipe that was not
scored during training) is planned only if `recipe` or an override names it: a margin must cover the whole model.

Fast enough: the *lower* end of the speed-up's interval exceeds `min_speedup`. High precision is always a candidate. It
is chosen if no other candidate passes both tests, and it wins ties, so nothing that may be slower than bf16 is chosen
for speed.

Speed must be measured, so there are three kinds of plan:

    min_speedup = 1.05                         Probe's own times, of the machine it ran on; untimed candidates are
                                               refused
    min_speedup = 1.05, target = "NVIDIA H200" times from database rows of that machine (`speed`), and labelled as such
    min_speedup = None                         accuracy only, and labelled as such: the first recipe in PREFERENCE that
                                               is accurate enough. Finer scales come first: with no known speed, coarser
                                               ones gain nothing

`recipe` restricts the choice to one recipe; "auto" compares all. `overrides` maps wildcards over site names to a recipe
or to "high"; the first match decides, and the plan records it. `max_metric_change` sets a budget for the whole model
(`budget`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import get_args

from loka.dispatch.budget import Verify, spend
from loka.dispatch.chains import GIVEN, place_chains
from loka.dispatch.choosing import HOPELESS
from loka.dispatch.database import Database
from loka.dispatch.margin import MARGIN, allow, share_of_margin
from loka.dispatch.recipe import RECIPES, Recipe, choice_of, recipe_named, way_of
from loka.dispatch.speed import DatabaseSpeeds, ProbeSpeeds, Speeds, choose_machine, shipped_database
from loka.measure.site import Weights
from loka.records import GEMMS, Candidate, Choice, Gemm, Interval, Plan, ProbeReport, Site, SitePlan
from loka.records.prose import name_some

PREFERENCE = ("rowwise", "blockwise", "rowwise_with_gw_hp", "tensorwise")
HIGH = "high"
AUTO = "auto"


@dataclass(frozen=True)
class Policy:
    """The requirements for a plan: error limits, required speed-up, target device and overrides by site name.

    Args:
        max_error: largest allowed MERE of a forward product, where there is no score.
        max_gradient_error: largest allowed relative L2 error of a gradient, where there is no score.
        min_speedup: required speed-up over bf16, quantization included; None for accuracy only.
        target: device the speed-ups are for; None for the device Probe ran on.
        overrides: maps patterns of site names to a recipe, "high" or "auto".
        recipe: one recipe for all sites, or "auto".
        weights: which database rows to use: weights quantized in every call ("dynamic") or once ("cached").
        row_factor: rows per call on the target divided by rows per call where Probe ran.
        max_metric_change: budget for the relative change of the end metric, e.g. 0.001.
        margin: relative change of the loss that counts as no change.
        chains: whether to keep activations in FP8 from one linear to the next. None does so only if `min_speedup` is
            None, since a report has no times of chains.

    Example:
        >>> plan = loka.dispatch.make_plan(report.record, loka.Policy(min_speedup=None))
    """

    max_error: float = 0.2
    max_gradient_error: float = 0.1
    min_speedup: float | None = 1.05
    target: str | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    recipe: str = AUTO
    weights: Weights = "dynamic"
    row_factor: float = 1.0
    max_metric_change: float | None = None
    margin: float = MARGIN
    chains: bool | None = None

    def __post_init__(self) -> None:
        for name in ("max_error", "max_gradient_error", "row_factor", "margin"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}, expected a positive number")
        if self.min_speedup is not None and not self.min_speedup > 0:
            raise ValueError(f"min_speedup={self.min_speedup}, expected a positive number, or None for accuracy only")
        if self.min_speedup is None and self.target is not None:
            raise ValueError(f"target={self.target!r} needs min_speedup: a plan for accuracy only is for no device")
        if self.max_metric_change is not None and not self.max_metric_change >= 0:
            raise ValueError(f"max_metric_change={self.max_metric_change}, expected 0 or more, e.g. 0.001 for 0.1 %")
        if self.recipe != AUTO:
            recipe_named(self.recipe)
        if self.weights not in get_args(Weights):
            raise ValueError(f"weights={self.weights!r}, expected one of {', '.join(get_args(Weights))}")
        for pattern, choice in self.overrides.items():
            if choice not in (HIGH, AUTO) and choice not in RECIPES:
                known = ", ".join((HIGH, AUTO, *RECIPES))
                raise ValueError(f"override {pattern!r}: {choice!r} is not one of {known}")

    def limit(self, gemm: Gemm) -> float:
        """Return the error limit of one GEMM."""
        return self.max_error if gemm == "fprop" else self.max_gradient_error


def make_plan(
    report: ProbeReport, policy: Policy, *, database: Database | None = None, verify: Verify | None = None
) -> Plan:
    """Choose a backend and precision for every GEMM of every site.

    Args:
        report: the evidence collected by Probe.
        policy: the requirements.
        database: times for `policy.target`; None uses the rows that ship with the package.
        verify: measures the relative metric change of a whole plan. Needs `max_metric_change`: the set of converted
            sites is reduced until the measured change is within it.

    Returns:
        The plan, with a reason for every choice.

    Example:
        >>> make_plan(report.record, Policy(min_speedup=None)).low_precision_share
    """
    if verify is not None and policy.max_metric_change is None:
        raise ValueError("verify measures a budget: set max_metric_change")
    speeds, notes = _find_speeds(report, policy, database)
    unmatched = [p for p in policy.overrides if not any(fnmatchcase(site.name, p) for site in report.sites)]
    if unmatched:
        raise ValueError(
            f"overrides match no site: {', '.join(unmatched)}; sites are {', '.join(s.name for s in report.sites)}"
        )
    units = report.units or len(report.sites)
    # kinds of GEMMs that are scored at some site: gradient GEMMs are scored even if the loss is unknown
    scored = {c.gemm for site in report.sites for c in site.candidates if c.harm is not None}
    found = {site.name: _find_override(site, policy) for site in report.sites}
    sites, chains, told = place_chains(
        report,
        [_plan_site(site, policy, speeds, units, scored=scored) for site in report.sites],
        margin=policy.margin,
        units=units,
        wanted=policy.chains,
        refusal=_refuse_chains(policy),
        told={name: text for name, (override, text) in found.items() if override not in (None, AUTO)},
    )
    plan = Plan(
        model=report.model,
        recipe=policy.recipe,
        target=policy.target or (report.environment.device if policy.min_speedup is not None else None),
        max_error=policy.max_error,
        max_gradient_error=policy.max_gradient_error,
        min_speedup=policy.min_speedup,
        flops_of=report.flops_of,
        sites=sites,
        units=chains,
        margin=policy.margin,
        environment=report.environment,
        notes=[
            *notes,
            *_speed_notes(report, policy, speeds, scored, empty=not chains and not any(s.quantized for s in sites)),
            *_unseen_notes(report),
            *told,
        ],
        weights=policy.weights if isinstance(speeds, DatabaseSpeeds) else None,
        max_metric_change=policy.max_metric_change,
    )
    return plan if policy.max_metric_change is None else spend(report, plan, policy.max_metric_change, verify)


def _refuse_chains(policy: Policy) -> str | None:
    """Return why this policy rules out chains, or None."""
    if policy.recipe != AUTO:
        return f"{policy.recipe} was asked for at every linear"
    if policy.max_metric_change is not None:
        return "a budget of the metric is spent linear by linear"
    if policy.min_speedup is not None and policy.chains is None:
        return (
            f"a speed-up over {policy.min_speedup:g} is asked for, and a report has no time of a chain; hint: "
            "loka.tune times them; chains=True places them untimed"
        )
    return None


def _find_override(site: Site, policy: Policy) -> tuple[str | None, str]:
    """Return what the first matching override asks for, None if there is none, and its description."""
    matching = ((p, override) for p, override in policy.overrides.items() if fnmatchcase(site.name, p))
    pattern, override = next(matching, (None, None))
    return override, f"override {pattern!r}: {override}"


def _find_speeds(report: ProbeReport, policy: Policy, database: Database | None) -> tuple[Speeds, list[str]]:
    """Return Probe's own times for the machine it ran on, or database times for a target, with notes for the plan."""
    here = report.environment.device
    if policy.target is None or (policy.target == here and database is None):
        if database is not None:
            raise ValueError(f"a database is only used for a target: set target; this report was made on {here!r}")
        if policy.row_factor != 1:
            raise ValueError(
                "row_factor scales the rows per call on a target; times measured by Probe are for the rows it saw"
            )
        return ProbeSpeeds(here), []
    database = shipped_database() if database is None else database
    machine, notes = choose_machine(database, policy.target, report)
    if policy.row_factor != 1:
        notes.append(f"for {policy.row_factor:g} times the rows per call that Probe saw")
    return DatabaseSpeeds(database, machine, policy.weights, policy.row_factor), notes


def _speed_notes(report: ProbeReport, policy: Policy, speeds: Speeds, scored: set[Gemm], *, empty: bool) -> list[str]:
    """Say that no speed was considered, or why a plan that asks for speed is empty."""
    if policy.min_speedup is None:
        return ["made for accuracy only: no speed was considered"]
    options = [(site, gemm, list(speeds.options(site, gemm))) for site in report.sites for gemm in site.gemms]
    if any(c.speedup for _, _, found in options for c in found):
        return [_say_empty(options, policy, report.units or len(report.sites), scored)] if empty else []
    if isinstance(speeds, DatabaseSpeeds):
        return [
            f"nothing is converted: the database has no row of {policy.target} for any GEMM of this model; hint: tune on that device"
        ]
    return [
        f"nothing is converted: a speed-up over {policy.min_speedup:g} is asked for and none was measured on "
        f"{report.environment.device}; plan for accuracy only (min_speedup=None, on the command line --accuracy-only), or for a target with database rows"
    ]


def _say_empty(
    options: Sequence[tuple[Site, Gemm, list[Candidate]]], policy: Policy, units: int, scored: set[Gemm]
) -> str:
    """Say how many GEMMs fail which requirement, where all of them do."""
    lenient = replace(policy, min_speedup=None, target=None)
    accurate = [
        [c for c in found if _refuse(c, lenient, site, units, gemm in scored) is None] for site, gemm, found in options
    ]
    passing = [found for found in accurate if found]
    untimed = sum(not any(c.speedup for c in found) for found in passing)
    return (
        f"nothing is converted: of {len(accurate)} GEMMs, {len(accurate) - len(passing)} have no candidate that is accurate enough, {untimed} none that is also timed, "
        f"and {len(passing) - untimed} none that is also faster by {policy.min_speedup:g}; hint: loka explain PLAN SITE, or plan.explain(SITE)"
    )


def _unseen_notes(report: ProbeReport) -> list[str]:
    """List sites that no sampled step called. They are missing from shares of the probed FLOPs."""
    unseen = [site.name for site in report.sites if not site.gemms and site.kept is None]
    if not unseen:
        return []
    return [
        f"not judged, and kept in high precision: {name_some(unseen, 6)}; no sampled step called them ({report.sampled_steps} of {report.steps} steps "
        "were sampled); hint: probe more steps, or with a smaller every="
    ]


def _make_site_plan(site: Site, choices: list[Choice]) -> SitePlan:
    return SitePlan(site=site.name, m=site.m, k=site.k, n=site.n, flops_share=site.flops_share, choices=choices)


def _plan_site(site: Site, policy: Policy, speeds: Speeds, units: int, *, scored: set[Gemm]) -> SitePlan:
    if site.kept is not None and not site.gemms:  # nothing was measured, so an override has nothing to choose from
        return _make_site_plan(site, [choice_of(gemm, None, site.kept) for gemm in GEMMS])
    override, why = _find_override(site, policy)
    if override == HIGH:
        return _make_site_plan(site, [choice_of(gemm, None, why) for gemm in site.gemms])
    if override == AUTO:
        policy = replace(policy, recipe=AUTO)
    elif override is not None:
        recipe = recipe_named(override)
        return _make_site_plan(site, [_choose_overridden(site, gemm, recipe, why, speeds) for gemm in site.gemms])
    if site.kept is not None:
        return _make_site_plan(site, [choice_of(gemm, None, site.kept) for gemm in site.gemms])
    options = {gemm: list(speeds.options(site, gemm)) for gemm in site.gemms}
    choices = [choose(found, gemm, policy, site, units, scored=gemm in scored) for gemm, found in options.items()]
    return _make_site_plan(site, choices)


def _choose_overridden(site: Site, gemm: Gemm, recipe: Recipe, reason: str, speeds: Speeds) -> Choice:
    """Choose the fastest evaluated backend for the recipe that an override asks for."""
    if recipe.operands(gemm) is None:
        return choice_of(gemm, None, f"{reason}; {recipe.name} keeps {gemm} in high precision")
    options = [c for c in speeds.options(site, gemm) if c.recipe == recipe.name and c.refusal is None]
    if not options:
        raise ValueError(
            f"{site.name} {gemm}: {reason}, but no backend was evaluated with {recipe.name}; probe with it"
        )
    return _make_choice(min(options, key=_rank_by_time), reason, [])


def choose(
    options: Sequence[Candidate],
    gemm: Gemm,
    policy: Policy,
    site: Site | None = None,
    units: int = 1,
    *,
    scored: bool = False,
) -> Choice:
    """Choose among the candidates of one GEMM; high precision if none passes. Also returns why others were refused.

    `units` share the margin. If the GEMM is scored elsewhere in the model, candidates without a score are refused.
    """
    passing: list[Candidate] = []
    refused: dict[tuple[str, str], list[str]] = {}  # backends by recipe and reason: many share one
    alone = [c for c in options if c.recipe not in GIVEN]
    for candidate in (c for c in alone if policy.recipe in (AUTO, c.recipe)):
        refusal = _refuse(candidate, policy, site, units, scored)
        if refusal is None:
            passing.append(candidate)
        else:
            refused.setdefault((candidate.recipe, refusal), []).append(candidate.backend)
    refusals = [f"{recipe} on {', '.join(backends)}: {why}" for (recipe, why), backends in refused.items()]
    if not passing:
        kept = policy.recipe != AUTO and recipe_named(policy.recipe).operands(gemm) is None
        nothing = f"{policy.recipe} keeps {gemm} in high precision" if kept else "no candidate was evaluated"
        return choice_of(gemm, None, "; ".join(refusals) or nothing, refusals=refusals)
    best = min(passing, key=_rank_by_preference if policy.min_speedup is None else _rank_by_time)
    return _make_choice(best, _explain(best, policy, site, units), refusals)


def _make_choice(candidate: Candidate, reason: str, refusals: list[str]) -> Choice:
    error, speedup, time = candidate.error, candidate.speedup, candidate.microseconds
    return choice_of(
        candidate.gemm,
        way_of(candidate),
        reason,
        expected_error=None if error is None else error.value,
        expected_speedup=None if speedup is None else speedup.value,
        expected_microseconds=None if time is None else time.value,
        speed_source=candidate.speed_source,
        refusals=refusals,
    )


def _refuse(candidate: Candidate, policy: Policy, site: Site | None, units: int, scored: bool) -> str | None:
    """Return why a candidate is refused, or None."""
    if candidate.refusal is not None:
        return candidate.refusal
    if scored and policy.recipe == AUTO and candidate.harm is None and _swapped_change(candidate, site) is None:
        why = site.unscored if site is not None and site.unscored else f"{candidate.recipe} was not scored"
        return f"it has no score, while other sites of the model do: {why}; hint: loka.tune swaps it in and measures it"
    if (refusal := _refuse_by_accuracy(candidate, policy, site, units)) is not None:
        return refusal
    if policy.min_speedup is None:
        return None
    if candidate.speedup is None:
        note = candidate.speed_note or "not measured"
        return f"speed {note}" if note.startswith("not ") else f"speed not measured ({note})"
    if candidate.speedup.low <= policy.min_speedup:
        return f"speed-up of at least {candidate.speedup.low:.3g} does not exceed {policy.min_speedup:g}"
    if candidate.speedup.low <= 1:
        return f"speed-up of at least {candidate.speedup.low:.3g}: it may be no faster than bf16, which wins ties"
    return None


def _swapped_change(candidate: Candidate, site: Site | None) -> Interval | None:
    """Return the change of the metric measured with this recipe swapped into the forward GEMM, if it was."""
    swapped = site is not None and candidate.gemm == "fprop" and site.metric_recipe == candidate.recipe
    return site.metric_change if site is not None and swapped else None


def _refuse_by_accuracy(candidate: Candidate, policy: Policy, site: Site | None, units: int) -> str | None:
    """Return why a candidate is not accurate enough, or None. The module docstring has the rule."""
    harm, margin = candidate.harm, policy.margin
    if (change := _swapped_change(candidate, site)) is not None:
        judged = allow(change, margin=margin, units=units)
        if not judged.within:
            return f"swapped in alone it moved the metric by {judged.text}"
        # Not HOPELESS_FROZEN, as `tune(target="serve")` uses: a report has a score only where gradients flowed, that
        # is for a model in training, and does not say whether its weights will be frozen later.
        if harm is None or harm.value <= HOPELESS * margin:
            return None
    if harm is not None:
        share = share_of_margin(margin, units)
        if harm.high > share:  # the same end as in Probe's verdict
            return f"predicted change of the loss up to {harm.high:.4%} exceeds {share:.4%}, its share of the margin"
        if policy.limit(candidate.gemm) >= Policy().limit(candidate.gemm):
            return None  # only an error limit tighter than the default applies in addition to the score
    error, limit = candidate.error, policy.limit(candidate.gemm)
    if error is None:
        return "error not measured"
    return f"error up to {error.high:.3g} exceeds {limit:g}" if error.high > limit else None


def _rank_by_preference(candidate: Candidate) -> tuple[int, float]:
    recipe, error = candidate.recipe, candidate.error
    place = PREFERENCE.index(recipe) if recipe in PREFERENCE else len(PREFERENCE)
    return place, error.high if error else float("inf")


def _rank_by_time(candidate: Candidate) -> tuple[float, float]:
    speedup = candidate.speedup.value if candidate.speedup else 0.0
    return -speedup, _rank_by_preference(candidate)[1]


def _explain(candidate: Candidate, policy: Policy, site: Site | None, units: int) -> str:
    error, harm = candidate.error, candidate.harm
    if (change := _swapped_change(candidate, site)) is not None:
        judged = allow(change, margin=policy.margin, units=units)
        reason = f"{candidate.recipe}: swapped in alone it moved the metric by {judged.text}"
        if harm is not None and harm.high > share_of_margin(policy.margin, units):
            reason += f"; this measurement overrides the predicted change of the loss, up to {harm.high:.4%}"
    elif harm is not None:
        reason = f"{candidate.recipe}: predicted change of the loss {harm.value:.4%}, margin {policy.margin:.3%}"
    else:
        assert error is not None  # _refuse rejects candidates without a measured error
        reason = (
            f"{candidate.recipe}: error at most {error.high:.3g}, limit {policy.limit(candidate.gemm):g}; "
            "what it does to the loss was not measured"
        )
    if policy.min_speedup is None or candidate.speedup is None:
        return f"{reason}; the finest recipe that passes, speed not considered"
    return f"{reason}; {candidate.speedup.value:.2f}x, the fastest that passes"
