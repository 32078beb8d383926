"""Policy: from evidence to a plan. For every GEMM, the fastest candidate that is accurate enough.

A candidate is accurate enough by what its error does to the loss (`Candidate.harm`, see docs/concepts/score.md): at most its share of the margin, margin / sqrt(units). A forward GEMM that was
swapped in and measured on the metric is judged by that instead, by the same rule as in the report (`loka.dispatch.margin.allow`): what is called vetoed there is in no plan. Where nothing in the model has a score
(a loop without gradients) the error of the product counts, which says little about the loss: the upper end of guarded MERE in fprop, of relative L2 in the gradient GEMMs. Where others have one, a candidate without (a frozen layer that no gradient
reaches, a recipe that was not scored while the model trained) is in no plan that was not told so: a margin that holds for some of the model holds for none of it. It is fast enough when the *lower* end of its speed-up's interval exceeds `min_speedup`. High precision is always a
candidate: it wins whenever nothing passes both, and it wins ties, so nothing that may be slower than bf16 is ever chosen for its speed.

Without measured speed nothing can be called fast, so there are three kinds of plan:

    min_speedup = 1.05                         speeds are Probe's own, of the machine it ran on; a candidate without one is refused
    min_speedup = 1.05, target = "NVIDIA H200" speeds are database rows of that machine (`speed`), labelled so
    min_speedup = None                         accuracy only, labelled so: the first recipe in PREFERENCE that is accurate enough, finer
                                               scales first: where no speed is known, nothing is gained by the coarser ones

`recipe` keeps to one recipe where "auto" compares all. `overrides` maps wildcards over site names to a recipe or to "high"; the first that
matches decides, and the plan says that it was told. `max_metric_change` sets a budget for the whole model (`budget`).
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
from loka.records import GEMMS, Candidate, Choice, Gemm, Plan, ProbeReport, Site, SitePlan

PREFERENCE = ("rowwise", "blockwise", "rowwise_with_gw_hp", "tensorwise")
HIGH = "high"
AUTO = "auto"


@dataclass(frozen=True)
class Policy:
    """What a plan is made under: the errors that are allowed, the speed-up that is wanted, the device it is for, and choices by name.

    Args:
        max_error: largest MERE of a forward product, where there is no score.
        max_gradient_error: largest relative L2 of a gradient, likewise.
        min_speedup: over bf16, quantisation included; None for accuracy only.
        target: device the speeds are for; None: where Probe ran.
        overrides: recipe, "high" or "auto" by pattern of site names.
        recipe: one for all, or "auto".
        weights: which database rows: weights quantised in every call ("dynamic"), or before ("cached").
        row_factor: rows of a call on the target over those where Probe ran.
        max_metric_change: budget of the end metric, relative, e.g. 0.001.
        margin: relative change of the loss that counts as none.
        chains: linears in FP8 from one to the next; None: where no speed is asked for, since none of a chain is known here.

    Example:
        >>> make_plan(report.record, Policy(min_speedup=None))
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
        """The error allowed in one GEMM."""
        return self.max_error if gemm == "fprop" else self.max_gradient_error


def make_plan(
    report: ProbeReport, policy: Policy, *, database: Database | None = None, verify: Verify | None = None
) -> Plan:
    """Choose for every GEMM of every site.

    Args:
        report: what Probe found.
        policy: what is asked.
        database: rows for `policy.target`; None takes those that ship with the package.
        verify: measures a budgeted plan as a whole; the budget is tightened until what it measures is within the bound.

    Returns:
        The plan, every choice with its reason.

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
    sites, chains, told = place_chains(
        report,
        [_plan_site(site, policy, speeds, units, scored=_scored_gemms(report)) for site in report.sites],
        margin=policy.margin,
        units=units,
        wanted=policy.chains,
        refusal=_refuse_chains(policy),
        told={s.name: text for s in report.sites if (text := _overridden(s, policy))},
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
        notes=[*notes, *_take_notes(report, policy, speeds), *_tell_unseen(report), *told],
        weights=policy.weights if isinstance(speeds, DatabaseSpeeds) else None,
        max_metric_change=policy.max_metric_change,
    )
    return plan if policy.max_metric_change is None else spend(report, plan, policy.max_metric_change, verify)


def _refuse_chains(policy: Policy) -> str | None:
    """Why what is asked leaves no room for chains."""
    if policy.recipe != AUTO:
        return f"{policy.recipe} was asked for at every linear"
    if policy.max_metric_change is not None:
        return "a budget of the metric is spent linear by linear"
    if policy.min_speedup is not None and policy.chains is None:
        return f"a speed-up over {policy.min_speedup:g} is asked for, and a report has no time of a chain; hint: loka.tune times them; chains=True places them untimed"
    return None


def _overridden(site: Site, policy: Policy) -> str | None:
    """What an override says about a site, where it is not left to the evidence."""
    for pattern, override in policy.overrides.items():
        if fnmatchcase(site.name, pattern):
            return None if override == AUTO else f"override {pattern!r}: {override}"
    return None


def _find_speeds(report: ProbeReport, policy: Policy, database: Database | None) -> tuple[Speeds, list[str]]:
    """Probe's own times for the machine it ran on; the database's for any other, and for the same where one is given."""
    here = report.environment.device
    if policy.target is None or (policy.target == here and database is None):
        if database is not None:
            raise ValueError(
                f"the database is asked for a machine elsewhere: set target; this report was made on {here!r}"
            )
        if policy.row_factor != 1:
            raise ValueError(
                "row_factor scales the rows of a target elsewhere; times measured here are of the rows seen here"
            )
        return ProbeSpeeds(here), []
    database = shipped_database() if database is None else database
    machine, notes = choose_machine(database, policy.target, report)
    if policy.row_factor != 1:
        notes.append(f"for {policy.row_factor:g} times the rows per call that Probe saw")
    return DatabaseSpeeds(database, machine, policy.weights, policy.row_factor), notes


def _take_notes(report: ProbeReport, policy: Policy, speeds: Speeds) -> list[str]:
    if policy.min_speedup is None:
        return ["made for accuracy only: no speed was considered"]
    timed = any(c.speedup for site in report.sites for gemm in site.gemms for c in speeds.options(site, gemm))
    if timed:
        return []
    if isinstance(speeds, DatabaseSpeeds):
        return [
            f"nothing is converted: the database has no row of {policy.target} for any GEMM of this model; tune there"
        ]
    return [
        f"nothing is converted: a speed-up over {policy.min_speedup:g} is asked for and none was measured on "
        f"{report.environment.device}; plan for accuracy only (min_speedup=None, on the command line --accuracy-only), or for a target with database rows"
    ]


def _tell_unseen(report: ProbeReport) -> list[str]:
    """Sites without evidence: a share of the probed FLOPs does not count them."""
    unseen = [site.name for site in report.sites if not site.gemms and site.kept is None]
    if not unseen:
        return []
    names = ", ".join(unseen[:6]) + (f" and {len(unseen) - 6} more" if len(unseen) > 6 else "")
    return [
        f"not judged, and kept in high precision: {names}; no sampled step called them ({report.sampled_steps} of {report.steps} steps "
        "were sampled); hint: probe more steps, or with a smaller every="
    ]


def _site_plan(site: Site, choices: list[Choice]) -> SitePlan:
    return SitePlan(site=site.name, m=site.m, k=site.k, n=site.n, flops_share=site.flops_share, choices=choices)


def _scored_gemms(report: ProbeReport) -> frozenset[Gemm]:
    """GEMMs of which something in the model says what errors do to the loss; gradients are scored without a known loss too."""
    return frozenset(c.gemm for site in report.sites for c in site.candidates if c.harm is not None)


def _plan_site(
    site: Site, policy: Policy, speeds: Speeds, units: int = 1, *, scored: frozenset[Gemm] = frozenset()
) -> SitePlan:
    if site.kept is not None and not site.gemms:  # nothing was measured that an override could choose
        return _site_plan(site, [choice_of(gemm, None, site.kept) for gemm in GEMMS])
    for pattern, override in policy.overrides.items():
        if fnmatchcase(site.name, pattern):
            why = f"override {pattern!r}: {override}"
            if override == HIGH:
                return _site_plan(site, [choice_of(gemm, None, why) for gemm in site.gemms])
            if override == AUTO:
                policy = replace(policy, recipe=AUTO)
                break
            recipe = recipe_named(override)
            return _site_plan(site, [_told(site, gemm, recipe, why, speeds) for gemm in site.gemms])
    if site.kept is not None:
        return _site_plan(site, [choice_of(gemm, None, site.kept) for gemm in site.gemms])
    return _site_plan(
        site,
        [
            choose(list(speeds.options(site, gemm)), gemm, policy, site, units, scored=gemm in scored)
            for gemm in site.gemms
        ],
    )


def _told(site: Site, gemm: Gemm, recipe: Recipe, reason: str, speeds: Speeds) -> Choice:
    """A choice that was not left to the evidence: on the fastest backend that was evaluated."""
    if recipe.operands(gemm) is None:
        return choice_of(gemm, None, f"{reason}; {recipe.name} keeps {gemm} in high precision")
    options = [c for c in speeds.options(site, gemm) if c.recipe == recipe.name and c.refusal is None]
    if not options:
        raise ValueError(
            f"{site.name} {gemm}: {reason}, but no backend was evaluated with {recipe.name}; probe with it"
        )
    return _choice(min(options, key=_rank_by_time), reason, [])


def choose(
    options: Sequence[Candidate],
    gemm: Gemm,
    policy: Policy,
    site: Site | None = None,
    units: int = 1,
    *,
    scored: bool = False,
) -> Choice:
    """The choice for one GEMM among its options; high precision where none passes.

    Args:
        options: candidates with their speeds.
        gemm: which one.
        policy: what is asked.
        site: where it is, for what was measured by swapping it in.
        units: that share the margin.
        scored: other candidates of the model for the same GEMM have a score, so one without is judged by no error of its product.

    Returns:
        What runs, why, and what was refused.
    """
    passing: list[Candidate] = []
    refusals: list[str] = []
    alone = [c for c in options if c.recipe not in GIVEN]
    for candidate in (c for c in alone if policy.recipe in (AUTO, c.recipe)):
        refusal = _refuse(candidate, policy, site, units, scored)
        if refusal is None:
            passing.append(candidate)
        else:
            refusals.append(f"{candidate.recipe} on {candidate.backend}: {refusal}")
    if not passing:
        kept = policy.recipe != AUTO and recipe_named(policy.recipe).operands(gemm) is None
        nothing = f"{policy.recipe} keeps {gemm} in high precision" if kept else "no candidate was evaluated"
        return choice_of(gemm, None, "; ".join(refusals) or nothing, refusals=refusals)
    best = min(passing, key=_rank_by_preference if policy.min_speedup is None else _rank_by_time)
    return _choice(best, _explain(best, policy, site), refusals)


def _choice(candidate: Candidate, reason: str, refusals: list[str]) -> Choice:
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
    """Why a candidate is out, or None."""
    if candidate.refusal is not None:
        return candidate.refusal
    if scored and policy.recipe == AUTO and candidate.harm is None and not _was_swapped(candidate, site):
        why = site.unscored if site is not None and site.unscored else f"{candidate.recipe} was not scored"
        return f"nothing says what its error does to the loss, as it is known of others: {why}; hint: loka.tune swaps it in and measures"
    if (refusal := _refuse_by_harm(candidate, policy, site, units)) is not None:
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


def _was_swapped(candidate: Candidate, site: Site | None) -> bool:
    """Whether the metric was measured with this very recipe in the forward GEMM."""
    if site is None or site.metric_change is None:
        return False
    return candidate.gemm == "fprop" and site.metric_recipe == candidate.recipe


def _refuse_by_harm(candidate: Candidate, policy: Policy, site: Site | None, units: int) -> str | None:
    """Why a candidate is not accurate enough, or None: by the metric where it was swapped in, by the score, by the error where there is neither."""
    harm, margin = candidate.harm, policy.margin
    if _was_swapped(candidate, site):
        assert site is not None
        assert site.metric_change is not None
        judged = allow(site.metric_change, margin=margin, units=units)
        if not judged.within:
            return f"swapped in alone it moved the metric by {judged.text}"
        if harm is None or harm.value <= HOPELESS * margin:
            return None
    if harm is not None:
        share = share_of_margin(margin, units)
        if harm.high > share:  # the end that Probe's verdict goes by: what it calls unsafe is in no plan
            return f"predicted change of the loss up to {harm.high:.4%} exceeds {share:.4%}, its share of the margin"
        if policy.limit(candidate.gemm) >= Policy().limit(candidate.gemm):
            return None  # a limit of the error that is tighter than the default is a request of its own, see below
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


def _explain(candidate: Candidate, policy: Policy, site: Site | None) -> str:
    error = candidate.error
    if _was_swapped(candidate, site):
        assert site is not None
        assert site.metric_change is not None
        reason = f"{candidate.recipe}: swapped in alone it moved the metric by at most {site.metric_change.high:+.4%}, margin {policy.margin:.3%}"
    elif candidate.harm is not None:
        reason = (
            f"{candidate.recipe}: predicted change of the loss {candidate.harm.value:.4%}, margin {policy.margin:.3%}"
        )
    else:
        assert error is not None  # _refuse refuses what was not measured
        reason = f"{candidate.recipe}: error at most {error.high:.3g}, limit {policy.limit(candidate.gemm):g}; what it does to the loss was not measured"
    if policy.min_speedup is None or candidate.speedup is None:
        return f"{reason}; the finest recipe that passes, speed not considered"
    return f"{reason}; {candidate.speedup.value:.2f}x, the fastest that passes"
