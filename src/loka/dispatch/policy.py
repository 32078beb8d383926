"""Policy: from evidence to a plan. For every GEMM, the fastest candidate that is accurate enough.

A candidate is accurate enough when the *upper* end of its error's interval is under the limit: guarded MERE in fprop, relative L2 in the
gradient GEMMs. It is fast enough when the *lower* end of its speed-up's interval exceeds `min_speedup`. High precision is always a
candidate and wins whenever nothing passes both.

Without measured speed nothing can be called fast, so there are two kinds of plan:

    min_speedup = 1.05      a candidate without a measured speed-up is refused; on a machine that measured none, nothing is converted
    min_speedup = None      accuracy only, labelled so: the first recipe in PREFERENCE that is accurate enough, since coarser scales
                            are cheaper to compute (one amax for the tensor, one per row, one per block of 128)

`overrides` maps wildcards over site names to a recipe or to "high"; the first that matches decides, and the plan says that it was told.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from loka.dispatch.recipe import RECIPES, Recipe, recipe_named
from loka.records import Candidate, Choice, Gemm, Interval, Plan, ProbeReport, Site, SitePlan

PREFERENCE = ("tensorwise", "rowwise_with_gw_hp", "rowwise", "blockwise")
HIGH = "high"


@dataclass(frozen=True)
class Policy:
    """What is asked of a plan."""

    max_error: float = 0.2
    max_gradient_error: float = 0.1
    min_speedup: float | None = 1.05
    target: str | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_error", "max_gradient_error"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}, expected a positive number")
        if self.min_speedup is not None and not self.min_speedup > 0:
            raise ValueError(f"min_speedup={self.min_speedup}, expected a positive number, or None for accuracy only")
        if self.min_speedup is None and self.target is not None:
            raise ValueError(f"target={self.target!r} needs min_speedup: a plan for accuracy only is for no device")
        for pattern, choice in self.overrides.items():
            if choice != HIGH and choice not in RECIPES:
                raise ValueError(f"override {pattern!r}: {choice!r} is not {HIGH!r} or one of {', '.join(RECIPES)}")

    def limit(self, gemm: Gemm) -> float:
        """The error allowed in one GEMM."""
        return self.max_error if gemm == "fprop" else self.max_gradient_error


def make_plan(report: ProbeReport, policy: Policy) -> Plan:
    """Choose for every GEMM of every site."""
    _check_target(report, policy)
    unmatched = [p for p in policy.overrides if not any(fnmatchcase(site.name, p) for site in report.sites)]
    if unmatched:
        raise ValueError(
            f"overrides match no site: {', '.join(unmatched)}; sites are {', '.join(s.name for s in report.sites)}"
        )
    return Plan(
        model=report.model,
        recipe="auto",
        target=policy.target or (report.environment.device if policy.min_speedup is not None else None),
        max_error=policy.max_error,
        max_gradient_error=policy.max_gradient_error,
        min_speedup=policy.min_speedup,
        flops_of=report.flops_of,
        sites=[_plan_site(site, policy) for site in report.sites],
        environment=report.environment,
        notes=_take_notes(report, policy),
    )


def uniform_plan(report: ProbeReport, recipe: str, *, backend: str = "reference") -> Plan:
    """One recipe at every site whatever the evidence says: what "just turn FP8 on" does, for comparison."""
    chosen = recipe_named(recipe)
    return Plan(
        model=report.model,
        recipe=recipe,
        target=None,
        max_error=report.max_mere,
        max_gradient_error=report.max_gradient_error,
        min_speedup=None,
        flops_of=report.flops_of,
        sites=[
            _site_plan(site, [_told(site, gemm, chosen, backend, f"{recipe} everywhere") for gemm in site.gemms])
            for site in report.sites
        ],
        environment=report.environment,
        notes=[f"{recipe} at every site, whatever its error"],
    )


def _check_target(report: ProbeReport, policy: Policy) -> None:
    here = report.environment.device
    if policy.target is not None and policy.target != here:
        raise ValueError(
            f"a plan for {policy.target!r} needs times measured there; this report was made on {here!r}. "
            "Run Probe on the target, or plan for accuracy only (min_speedup=None)"
        )


def _take_notes(report: ProbeReport, policy: Policy) -> list[str]:
    if policy.min_speedup is None:
        return ["made for accuracy only: no speed was considered"]
    if not any(c.speedup for site in report.sites for c in site.candidates):
        return [
            f"nothing is converted: a speed-up over {policy.min_speedup:g} is asked for and none was measured on "
            f"{report.environment.device}; plan with min_speedup=None for accuracy only, or probe on the target"
        ]
    return []


def _site_plan(site: Site, choices: list[Choice]) -> SitePlan:
    return SitePlan(site=site.name, m=site.m, k=site.k, n=site.n, flops_share=site.flops_share, choices=choices)


def _plan_site(site: Site, policy: Policy) -> SitePlan:
    for pattern, override in policy.overrides.items():
        if fnmatchcase(site.name, pattern):
            why = f"override {pattern!r}: {override}"
            if override == HIGH:
                return _site_plan(site, [_high(gemm, why, []) for gemm in site.gemms])
            recipe = recipe_named(override)
            return _site_plan(site, [_told(site, gemm, recipe, None, why) for gemm in site.gemms])
    return _site_plan(site, [_choose(site, gemm, policy) for gemm in site.gemms])


def _high(gemm: Gemm, reason: str, refusals: list[str]) -> Choice:
    return Choice(gemm=gemm, backend=HIGH, a=None, b=None, reason=reason, refusals=refusals)


def _told(site: Site, gemm: Gemm, recipe: Recipe, backend: str | None, reason: str) -> Choice:
    """A choice that was not left to the evidence: on the given backend, or on the fastest one that was evaluated."""
    operands = recipe.operands(gemm)
    if operands is None:
        return _high(gemm, f"{reason}; {recipe.name} keeps {gemm} in high precision", [])
    able = [c for c in site.candidates if c.gemm == gemm and c.recipe == recipe.name and c.refusal is None]
    able = sorted((c for c in able if backend in (None, c.backend)), key=_rank_by_time)
    if not able and backend is None:
        raise ValueError(
            f"{site.name} {gemm}: {reason}, but no backend was evaluated with {recipe.name}; probe with it"
        )
    error = error_of(able[0]) if able else None
    return Choice(
        gemm=gemm,
        backend=backend or able[0].backend,
        a=str(operands.a),
        b=str(operands.b),
        reason=reason,
        fast_accum=operands.fast_accum,
        expected_error=None if error is None else error.value,
    )


def error_of(candidate: Candidate) -> Interval | None:
    """The error a candidate is judged by: MERE in fprop, relative L2 in the gradient GEMMs."""
    return candidate.mere if candidate.gemm == "fprop" else candidate.relative_l2


def _choose(site: Site, gemm: Gemm, policy: Policy) -> Choice:
    passing: list[Candidate] = []
    refusals: list[str] = []
    for candidate in site.candidates:
        if candidate.gemm == gemm:
            refusal = _refuse(candidate, policy)
            if refusal is None:
                passing.append(candidate)
            else:
                refusals.append(f"{candidate.recipe} on {candidate.backend}: {refusal}")
    if not passing:
        return _high(gemm, "; ".join(refusals) or "no candidate was evaluated", refusals)
    best = min(passing, key=_rank_by_preference if policy.min_speedup is None else _rank_by_time)
    operands = recipe_named(best.recipe).operands(gemm)
    error = error_of(best)
    assert error is not None  # _refuse refuses what was not measured
    return Choice(
        gemm=gemm,
        backend=best.backend,
        a=best.a,
        b=best.b,
        reason=_explain(best, error, policy),
        fast_accum=operands.fast_accum if operands else False,
        expected_error=error.value,
        expected_speedup=best.speedup.value if best.speedup else None,
        refusals=refusals,
    )


def _refuse(candidate: Candidate, policy: Policy) -> str | None:
    """Why a candidate is out, or None."""
    if candidate.refusal is not None:
        return candidate.refusal
    error, limit = error_of(candidate), policy.limit(candidate.gemm)
    if error is None:
        return "error not measured"
    if error.high > limit:
        return f"error up to {error.high:.3g} exceeds {limit:g}"
    if policy.min_speedup is None:
        return None
    if candidate.speedup is None:
        return "speed not measured"
    if candidate.speedup.low <= policy.min_speedup:
        return f"speed-up of at least {candidate.speedup.low:.3g} does not exceed {policy.min_speedup:g}"
    return None


def _rank_by_preference(candidate: Candidate) -> tuple[int, float]:
    place = PREFERENCE.index(candidate.recipe) if candidate.recipe in PREFERENCE else len(PREFERENCE)
    error = error_of(candidate)
    return place, error.high if error else float("inf")


def _rank_by_time(candidate: Candidate) -> tuple[float, float]:
    speedup = candidate.speedup.value if candidate.speedup else 0.0
    return -speedup, _rank_by_preference(candidate)[1]


def _explain(best: Candidate, error: Interval, policy: Policy) -> str:
    reason = f"{best.recipe}: error at most {error.high:.3g}, limit {policy.limit(best.gemm):g}"
    if best.speedup is None:
        return f"{reason}; the cheapest recipe that passes, speed not measured"
    return f"{reason}; {best.speedup.value:.2f}x, the fastest that passes"
