"""Choose chains from scores: every unit runs with the coarsest scales that its score allows. Nothing is measured here.

Both `loka.tune` and `report.plan()` use this. A linear whose predicted harm under the chain's scales exceeds the limits
(`Limits`) leaves the chain, which is split there; the linear gets finer scales if those pass. The limits differ:

    loka.tune       swaps in and measures what passes, so its forward limit only filters out hopeless cases
    report.plan()   measures nothing more, so every GEMM must be within its share of the margin

Gradient GEMMs cannot be swapped in without training, so their score decides in both cases. Converting a lost share of a
step's progress into a share of the loss is an assumption (docs/concepts/score.md), and the sum over GEMMs is not
bounded: only a paired training run would show it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec

from loka.dispatch.margin import share_of_margin
from loka.dispatch.recipe import RECIPES, choice_of
from loka.records import GEMMS, Alarm, Gemm, Interval, LinkPlan, SitePlan, UnitEvidence, UnitPlan

CHAIN = "chain"  # used as a recipe name: the linear as measured inside a chain that is already placed
# Multiples of the margin beyond which a prediction is not worth a swap. If the weights keep training, a swap that went
# well by luck does not last and only the predicted size carries over. Frozen weights stay as measured: of 254 forward
# products beyond 5 times the margin, 102 were within it when swapped in (predictor.json).
HOPELESS, HOPELESS_FROZEN = 5.0, 50.0
# the second keeps the weight gradient in 16-bit precision: where only that one fails, two of three GEMMs still gain
FINER = ("rowwise", "rowwise_with_gw_hp", "blockwise")
_NO_GRADIENT = "no gradient reached it, as under torch.no_grad or where the loss is 0"


@dataclass
class SiteLook:
    """What was observed at one linear.

    Args:
        name, k, n: the linear's name, inputs and outputs.
        rows: rows of its largest call.
        harm: predicted relative change of the loss by GEMM and recipe.
        alarms: columns of the input whose mean is large compared with their spread.
        refusal: why it cannot run in low precision at all.
        calls: calls per step.
        step_rows: rows of all calls of a step together, if counted. Calls may differ in size, e.g. a tower applied to a
            query and to its items.
    """

    name: str
    k: int
    n: int
    rows: int = 0
    harm: dict[tuple[Gemm, str], Interval] = field(default_factory=dict)
    alarms: list[Alarm] = field(default_factory=list)
    refusal: str | None = None
    calls: int = 1
    step_rows: float | None = None

    @property
    def flops(self) -> float:
        """FLOPs of its three GEMMs in a step."""
        rows = self.rows * self.calls if self.step_rows is None else self.step_rows
        return 6.0 * rows * self.k * self.n

    def total_harm(self, recipe: str, *, training: bool) -> Interval | None:
        """Combine the predicted changes of the loss over the forward GEMM and, in training, both gradient GEMMs.

        None if the forward GEMM was not scored.
        """
        if ("fprop", recipe) not in self.harm:
            return None
        gemms: tuple[Gemm, ...] = GEMMS if training else ("fprop",)
        return add_in_squares([self.harm[gemm, recipe] for gemm in gemms if (gemm, recipe) in self.harm])


def add_in_squares(parts: list[Interval]) -> Interval:
    """Combine changes caused by independent errors: the root of the summed squares of each end of the intervals."""
    return Interval(**{end: sum(getattr(part, end) ** 2 for part in parts) ** 0.5 for end in ("value", "low", "high")})


@dataclass
class Looked:
    """Everything that was observed about a model.

    Args:
        sites: observations by linear name.
        units: the chains that were found.
        alone: linears in no chain, with the reason.
        loss: mean over the batches.
        by_themselves: linears of `alone` that no chain can contain but that can run in low precision on their own.
    """

    sites: dict[str, SiteLook]
    units: list[UnitPlan]
    alone: dict[str, str]
    loss: float = math.nan
    by_themselves: Sequence[str] = ()

    @cached_property
    def flops(self) -> float:
        """GEMM FLOPs of all linears in a step; they are looked at before this exists, so the sum does not change."""
        return sum(site.flops for site in self.sites.values()) or 1.0

    def share_of(self, *names: str) -> float:
        """Return the share of linears, by name, in the GEMM FLOPs of all linears."""
        return sum(self.sites[name].flops for name in names) / self.flops


@dataclass(frozen=True)
class Limits:
    """Limits on the predicted change of the loss.

    Args:
        forward: largest predicted relative change allowed for one forward GEMM.
        backward: largest one allowed for one gradient GEMM.
        forward_is, backward_is: descriptions of these limits, for the reason given when a linear exceeds one.
        upper: whether the upper end of a prediction must be within the limit, as in Probe's verdict. If False its value
            is enough, since a measurement follows.
        margin: the margin the limits derive from, used to suggest a larger one; None to suggest nothing.
        unscored: why a linear that was called may have no prediction.
    """

    forward: float
    backward: float
    forward_is: str
    backward_is: str
    upper: bool = False
    margin: float | None = None
    unscored: str = "no gradient reached it, or the loss is not known; hint: probe.step(loss)"

    def judged(self, harm: Interval) -> float:
        """Return the end of a prediction that must be within the limits: its upper end, or its value.

        Args:
            harm: predicted relative change of the loss.
        """
        return harm.high if self.upper else harm.value

    def hint(self, seen: float, limit: float) -> str:
        """Suggest the smallest margin that would allow a value; an empty string if that is over ten times the margin
        set.

        Args:
            seen: the value that exceeds the limit.
            limit: the limit under the current margin.
        """
        if self.margin is None or seen > 10 * limit:
            return ""
        return f"; hint: margin={_round_up(self.margin * seen / limit):g} would try it"

    @classmethod
    def before_swapping(cls, margin: float, *, training: bool) -> "Limits":
        """Return limits for callers that measure what passes: only hopeless forward GEMMs are refused, and each
        gradient GEMM may cost the whole margin.

        Args:
            margin: margin of the whole model.
            training: whether the weights keep training, so that a swap now does not tell the whole effect.
        """
        text, times = f"the margin of {margin:.3%}", HOPELESS if training else HOPELESS_FROZEN
        return cls(times * margin, margin, f"{times:g} times {text}", text, margin=margin, unscored=_NO_GRADIENT)

    @classmethod
    def to_place(cls, margin: float, units: int) -> "Limits":
        """Return limits for callers that place what passes unmeasured: each GEMM may cost margin / sqrt(units)."""
        share = share_of_margin(margin, units)
        text = f"{share:.4%}, its share of the margin"
        return cls(share, share, text, text, upper=True)


@dataclass(frozen=True)
class Offer:
    """A proposal to run a unit in low precision, made before anything is measured by swapping it in.

    Args:
        unit: a chain, or a single linear.
        way: "chain", or the recipe of a single linear.
        harm: predicted relative change of the loss.
        flops_share: its share of the GEMM FLOPs of all linears.
        reason: why it is offered.
    """

    unit: UnitPlan
    way: str
    harm: Interval | None
    flops_share: float
    reason: str

    @property
    def name(self) -> str:
        """The name of its first linear."""
        return self.unit.name


@dataclass(frozen=True)
class Chosen:
    """All offers, and why the other linears stay in high precision."""

    offers: list[Offer]
    kept: dict[str, str]


def make_offers(looked: Looked, *, limits: Limits, training: bool) -> Chosen:
    """Offer every unit with the coarsest scales that its score allows, and give a reason for every linear kept out."""
    kept = dict(looked.alone)
    offers: list[Offer] = []
    for unit in looked.units:
        unsafe = {}
        for name in unit.linears:
            site = looked.sites[name]
            if why := _refuse(site, _recipe_of_site(site, unit, training), limits, training):
                unsafe[name] = why
        offers += [_offer_chain(part, looked, training) for part in split_unit(unit, set(unsafe))]
        for name, why in unsafe.items():
            offer = _offer_finer(name, looked, limits, why.partition("; hint: margin=")[0], training)
            if offer is None:
                kept[name] = why
            else:
                offers.append(offer)
    for name in looked.by_themselves:
        offer = _offer_finer(name, looked, limits, looked.alone[name], training)
        if offer is not None:
            del kept[name]
            offers.append(offer)
    return Chosen(offers, kept)


def _offer_chain(unit: UnitPlan, looked: Looked, training: bool) -> Offer:
    sites = [looked.sites[name] for name in unit.linears]
    harms = [site.total_harm(_recipe_of_site(site, unit, training), training=training) for site in sites]
    known = [harm for harm in harms if harm is not None]
    harm = add_in_squares(known) if known else None
    return Offer(unit, "chain", harm, looked.share_of(*unit.linears), _explain(harm))


def part_of(offer: Offer, unit: UnitPlan, looked: Looked, *, training: bool) -> Offer:
    """Make an offer from a part of an offered chain (see `split_unit`)."""
    made = _offer_chain(unit, looked, training)
    return replace(made, reason=f"{made.reason}; a part of the chain {offer.name}")


def take_apart(offer: Offer, recipe: str, looked: Looked, *, why: str, training: bool) -> list[Offer]:
    """Split an offered chain into one offer per linear. `why` is added to their reasons."""
    return [_offer_single(name, recipe, looked, why, training) for name in offer.unit.linears]


def _offer_single(name: str, recipe: str, looked: Looked, why: str, training: bool) -> Offer:
    site = looked.sites[name]
    harm = site.total_harm(recipe, training=training)
    return Offer(single(site), recipe, harm, looked.share_of(name), f"{recipe}: {_explain(harm)}; {why}")


def _recipe_of_site(site: SiteLook, unit: UnitPlan, training: bool) -> str:
    """Return the scored recipe that stands for a unit's scales: CHAIN if it was measured inside a running chain."""
    if ("fprop", CHAIN) in site.harm:
        return CHAIN
    if unit.scales in ("delayed", "calibrated"):
        return "delayed" if training else "static"
    return "tensorwise" if training or len(unit.links) > 1 else "rowwise"


def _refuse(site: SiteLook, recipe: str, limits: Limits, training: bool) -> str | None:
    """Return why a linear is not offered with a recipe, or None."""
    if site.refusal:
        return site.refusal
    cause = f"; {site.alarms[0].text}; {site.alarms[0].help}" if site.alarms else ""
    forward = site.harm.get(("fprop", recipe))
    if forward is None:
        return f"its effect on the loss was not predicted: {limits.unscored}"
    way = f"{recipe} scales" if recipe in ("delayed", "static") else recipe
    if (seen := limits.judged(forward)) > limits.forward:
        return f"{way}: predicted change of the loss {seen:.3%}, more than {limits.forward_is}{cause or limits.hint(seen, limits.forward)}"
    for gemm in GEMMS[1:] if training else ():
        backward = site.harm.get((gemm, recipe))
        if backward is not None and (seen := limits.judged(backward)) > limits.backward:
            return (
                f"{way}: rounding in {gemm} may change the loss by {seen:.4%}, more than "
                f"{limits.backward_is}{limits.hint(seen, limits.backward)}"
            )
    return None


def _round_up(value: float) -> float:
    """Round up to two significant digits."""
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(round(value / step, 6)) * step:.2g}")


def _explain(harm: Interval | None) -> str:
    return "not scored; swapping decides" if harm is None else f"predicted change of the loss {harm.value:.4%}"


def _offer_finer(name: str, looked: Looked, limits: Limits, why: str, training: bool) -> Offer | None:
    """Offer a linear on its own with finer scales, or return None if those are not within the limits either."""
    site = looked.sites[name]
    if site.refusal:
        return None
    for recipe in FINER:
        if _refuse(site, recipe, limits, training) is None:
            return _offer_single(name, recipe, looked, f"not in a chain ({why})", training)
    return None


def single(site: SiteLook) -> UnitPlan:
    """Return a unit that contains one linear."""
    return UnitPlan(
        name=site.name, links=[LinkPlan(linear=site.name, k=site.k, n=site.n)], scales="dynamic", gradient="tensor"
    )


def split_unit(unit: UnitPlan, out: set[str]) -> Iterator[UnitPlan]:
    """Split a chain at the linears that leave it. Yields the remaining parts in order, each a chain of its own.

    A part's last link ends as `LinkPlan.as_last` describes: a layer or RMS norm after it stays outside the chain.
    """
    if not out:
        yield unit
        return
    links, bounded = [], unit.bounded_input
    for link in [*unit.links, None]:
        if link is not None and link.linear not in out:
            links.append(link)
            continue
        if links:
            links[-1] = links[-1].as_last()
            scales = unit.scales if len(links) > 1 or unit.scales == "calibrated" else "dynamic"
            names = {part.linear for part in links}
            magnitudes = {name: value for name, value in unit.magnitudes.items() if name in names}
            yield msgspec.structs.replace(
                unit,
                name=links[0].linear,
                links=links,
                scales=scales,
                bounded_input=bounded,
                magnitudes=magnitudes,
                around=None,
            )
        links, bounded = [], link is not None and link.norm == "block"


def to_plan_parts(
    offers: list[Offer],
    looked: Looked,
    evidence: Mapping[str, UnitEvidence],
    kept: Mapping[str, str],
    *,
    training: bool,
) -> tuple[list[UnitPlan], list[SitePlan]]:
    """Turn accepted offers into the units of a plan, and one site plan for every observed linear.

    `evidence` are measurements by offer name, `kept` the reasons why linears stay in high precision, by linear name.
    """
    units = [
        msgspec.structs.replace(o.unit, evidence=evidence.get(o.name), reason=o.reason)
        for o in offers
        if o.way == "chain"
    ]
    recipes = {o.name: o for o in offers if o.way != "chain"}
    chained = {name for unit in units for name in unit.linears}
    sites = []
    for name, site in looked.sites.items():
        choices = []
        for gemm in GEMMS if training else GEMMS[:1]:
            way = RECIPES[recipes[name].way].operands(gemm) if name in recipes else None
            reason = "in a chain" if name in chained else kept.get(name, "not taken")
            reason = recipes[name].reason if name in recipes else reason
            choices.append(choice_of(gemm, way, reason))
        sites.append(
            SitePlan(
                site=name, m=max(site.rows, 1), k=site.k, n=site.n, flops_share=looked.share_of(name), choices=choices
            )
        )
    return units, sites
