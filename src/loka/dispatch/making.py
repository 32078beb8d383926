"""Make a plan from the report of a probe: the choice for every GEMM of every site, chains, a budget, and notes.

The rules of a single choice are in `loka.dispatch.policy`.
"""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from loka.dispatch.budget import Verify, spend
from loka.dispatch.chains import place_chains
from loka.dispatch.database import Database
from loka.dispatch.policy import AUTO, HIGH, Policy, choose, make_choice, rank_by_time, refuse
from loka.dispatch.recipe import Recipe, choice_of, recipe_named
from loka.dispatch.speed import DatabaseSpeeds, ProbeSpeeds, Speeds, choose_machine, shipped_database
from loka.records import GEMMS, Candidate, Choice, Gemm, Plan, ProbeReport, Site, SitePlan
from loka.records.prose import name_some


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
        f"{report.environment.device}; plan for accuracy only (min_speedup=None, on the command line --accuracy-only), "
        "or for a target with database rows"
    ]


def _say_empty(
    options: Sequence[tuple[Site, Gemm, list[Candidate]]], policy: Policy, units: int, scored: set[Gemm]
) -> str:
    """Say how many GEMMs fail which requirement, where all of them do."""
    lenient = replace(policy, min_speedup=None, target=None)
    accurate = [
        [c for c in found if refuse(c, lenient, site, units, gemm in scored) is None] for site, gemm, found in options
    ]
    passing = [found for found in accurate if found]
    untimed = sum(not any(c.speedup for c in found) for found in passing)
    there = "" if policy.target is None else f" on {policy.target}"
    hint = "loka explain PLAN SITE, or plan.explain(SITE), says more"
    if untimed and policy.target is not None:
        hint = "loka db tune measures their shapes on that device, --row-factor plans for larger batches"
    return (
        f"nothing is converted: of {len(accurate)} GEMMs, no recipe is accurate enough for "
        f"{len(accurate) - len(passing)}; what is accurate enough was not timed at its shape{there} for {untimed}, and "
        f"is not faster than bf16 by {policy.min_speedup:g} for {len(passing) - untimed}; hint: {hint}"
    )


def _unseen_notes(report: ProbeReport) -> list[str]:
    """List sites that no sampled step called. They are missing from shares of the probed FLOPs."""
    unseen = [site.name for site in report.sites if not site.gemms and site.kept is None]
    if not unseen:
        return []
    return [
        f"not judged, and kept in high precision: {name_some(unseen, 6)}; no sampled step called them "
        f"({report.sampled_steps} of {report.steps} steps were sampled); hint: probe more steps, or with a smaller every="
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
    return make_choice(min(options, key=rank_by_time), reason, [])
