"""What a plan must fulfil, and the choice for one GEMM: the fastest candidate that is accurate enough.

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
from dataclasses import dataclass, field
from typing import get_args

from loka.dispatch.chains import GIVEN
from loka.dispatch.choosing import HOPELESS
from loka.dispatch.margin import MARGIN, allow, share_of_margin
from loka.dispatch.recipe import RECIPES, choice_of, recipe_named, way_of
from loka.measure.site import Weights
from loka.records import Candidate, Choice, Gemm, Interval, Site

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
        refusal = refuse(candidate, policy, site, units, scored)
        if refusal is None:
            passing.append(candidate)
        else:
            refused.setdefault((candidate.recipe, refusal), []).append(candidate.backend)
    refusals = [f"{recipe} on {', '.join(backends)}: {why}" for (recipe, why), backends in refused.items()]
    if not passing:
        kept = policy.recipe != AUTO and recipe_named(policy.recipe).operands(gemm) is None
        nothing = f"{policy.recipe} keeps {gemm} in high precision" if kept else "no candidate was evaluated"
        return choice_of(gemm, None, "; ".join(refusals) or nothing, refusals=refusals)
    best = min(passing, key=_rank_by_preference if policy.min_speedup is None else rank_by_time)
    return make_choice(best, _explain(best, policy, site, units), refusals)


def make_choice(candidate: Candidate, reason: str, refusals: list[str]) -> Choice:
    """Return a plan's choice of a candidate, with its measurements and what was refused beside it."""
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


def refuse(candidate: Candidate, policy: Policy, site: Site | None, units: int, scored: bool) -> str | None:
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


def rank_by_time(candidate: Candidate) -> tuple[float, float]:
    """Return a key that sorts the fastest candidate first, and of equally fast ones the most accurate."""
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
