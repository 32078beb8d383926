"""Choose chains: per unit the coarsest way that the score lets through. Nothing is measured here. `loka.tune` and `report.plan()` both choose with it.

A linear stays out of its chain where what the chain's scales cost it exceeds the limits (`Limits`): the chain is split there, and that linear is given finer scales where these pass. `loka.tune`
swaps in and measures what is left, so its limit forward only sorts out what is hopeless; a plan from a report measures nothing more, so there every GEMM must be within its share of the margin.
Gradients cannot be swapped in without training, so there the score decides: how a share of a step's progress becomes a share of the loss is an assumption (docs/concepts/score.md), and the sum
over GEMMs is not bounded by it: a paired run of training is what would show it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from loka.dispatch.recipe import RECIPES, choice_of
from loka.records import GEMMS, Alarm, Gemm, Interval, LinkPlan, SitePlan, UnitEvidence, UnitPlan

CHAIN = "chain"  # as a recipe: the linear as it runs in a chain that is placed already
# Times the margin: a prediction beyond it is not worth a swap. Weights that train on lose what luck a swap showed, and what carries over is the predicted size; frozen ones are what was
# measured, and of 254 forward products beyond 5 times the margin 102 were within it when they were swapped in (predictor.json).
HOPELESS, HOPELESS_FROZEN = 5.0, 50.0
# the second keeps the weight gradient in 16 bits: where only that fails, two of three GEMMs still gain
FINER = ("rowwise", "rowwise_with_gw_hp", "blockwise")
_NO_GRADIENT = "no gradient reached it, as under torch.no_grad or where the loss is 0"


@dataclass
class SiteLook:
    """What was seen at one linear.

    Args:
        name, k, n: the linear.
        rows: of a call, the largest.
        harm: predicted relative change of the loss by GEMM and recipe.
        alarms: columns of the input whose mean hides what varies.
        refusal: why it cannot run in low precision at all.
        calls: of it in a step.
        step_rows: of all calls of a step together, where they were counted: calls may differ, as those of a tower for a query and for its items do.
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
        """Predicted relative change of the loss, forward and, in training, of both gradient GEMMs: independent errors add in squares. None where the forward GEMM was not scored."""
        gemms: tuple[Gemm, ...] = GEMMS if training else ("fprop",)
        parts = [self.harm[gemm, recipe] for gemm in gemms if (gemm, recipe) in self.harm]
        if ("fprop", recipe) not in self.harm:
            return None
        return add_in_squares(parts)


def add_in_squares(parts: list[Interval]) -> Interval:
    """The change of several independent errors together: the root of the summed squares, end by end."""
    return Interval(**{end: sum(getattr(part, end) ** 2 for part in parts) ** 0.5 for end in ("value", "low", "high")})


@dataclass
class Looked:
    """Everything that was seen.

    Args:
        sites: by linear.
        units: the chains.
        alone: why the other linears are in none.
        loss: mean over the batches.
        by_themselves: those of `alone` that no chain can hold, and that can run one by one.
    """

    sites: dict[str, SiteLook]
    units: list[UnitPlan]
    alone: dict[str, str]
    loss: float = math.nan
    by_themselves: Sequence[str] = ()


@dataclass(frozen=True)
class Limits:
    """What the score lets through.

    Args:
        forward: relative change of the loss that one forward GEMM may be predicted to make.
        backward: what a gradient GEMM may be worth.
        forward_is, backward_is: where they come from, for what is said of a linear that exceeds one.
        upper: whether the upper end of a prediction must be within them, as Probe's own verdict wants it, or its middle is enough, since a swap follows.
        margin: that they were made from, where a larger one would let more be tried; None where it would not.
        unscored: why nothing is predicted of a linear that was called.
    """

    forward: float
    backward: float
    forward_is: str
    backward_is: str
    upper: bool = False
    margin: float | None = None
    unscored: str = "no gradient reached it, or the loss is not known; hint: probe.step(loss)"

    def judged(self, harm: Interval) -> float:
        """The end of a prediction that must be within the limits.

        Args:
            harm: predicted relative change of the loss.

        Returns:
            Its upper end, or its middle.
        """
        return harm.high if self.upper else harm.value

    def hint(self, seen: float, limit: float) -> str:
        """The least margin at which something would be tried that exceeds a limit; nothing where that is more than ten times the one that was asked for.

        Args:
            seen: what exceeds it.
            limit: of this margin.

        Returns:
            Words to append, or none.
        """
        if self.margin is None or seen > 10 * limit:
            return ""
        return f"; hint: margin={_round_up(self.margin * seen / limit):g} would try it"

    @classmethod
    def before_swapping(cls, margin: float, *, training: bool) -> "Limits":
        """For whoever swaps in and measures what is left: forward only what is hopeless is refused, gradients may be worth the margin.

        Args:
            margin: of the whole model.
            training: whether the weights train on, so that what a swap shows of them now is not all that counts.

        Returns:
            The limits.
        """
        text, times = f"the margin of {margin:.3%}", HOPELESS if training else HOPELESS_FROZEN
        return cls(times * margin, margin, f"{times:g} times {text}", text, margin=margin, unscored=_NO_GRADIENT)

    @classmethod
    def to_place(cls, margin: float, units: int) -> "Limits":
        """For whoever places what passes: errors of independent units add in squares, so each may cost margin / sqrt(units)."""
        share = margin / math.sqrt(max(units, 1))
        text = f"{share:.4%}, its share of the margin"
        return cls(share, share, text, text, upper=True)


@dataclass(frozen=True)
class Offer:
    """A unit as it could run, with what is known about it before anything is swapped.

    Args:
        unit: the chain, or one linear with what follows it.
        way: "chain", or the recipe of a single linear.
        harm: predicted relative change of the loss.
        flops_share: of the GEMM FLOPs of all linears.
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
    """Offers that may be taken, and why the other linears stay in high precision."""

    offers: list[Offer]
    kept: dict[str, str]


def make_offers(looked: Looked, *, limits: Limits, training: bool) -> Chosen:
    """Every unit in the coarsest way that the score lets through, and why the rest is kept."""
    total = sum(site.flops for site in looked.sites.values()) or 1.0
    kept = dict(looked.alone)
    offers: list[Offer] = []
    for unit in looked.units:
        unsafe = {}
        for name in unit.linears:
            if why := _refuse(looked.sites[name], _recipe_at(looked.sites[name], unit, training), limits, training):
                unsafe[name] = why
        offers += [_offer(part, looked, total, training) for part in split_unit(unit, set(unsafe))]
        for name, why in unsafe.items():
            offer = _finer(looked.sites[name], limits, total, why.partition("; hint: margin=")[0], training)
            if offer is None:
                kept[name] = why
            else:
                offers.append(offer)
    for name in looked.by_themselves:
        offer = _finer(looked.sites[name], limits, total, looked.alone[name], training)
        if offer is not None:
            del kept[name]
            offers.append(offer)
    return Chosen(offers, kept)


def _offer(unit: UnitPlan, looked: Looked, total: float, training: bool) -> Offer:
    sites = [looked.sites[name] for name in unit.linears]
    harms = [site.total_harm(_recipe_at(site, unit, training), training=training) for site in sites]
    known = [harm for harm in harms if harm is not None]
    harm = add_in_squares(known) if known else None
    flops = sum(looked.sites[name].flops for name in unit.linears) / total
    return Offer(unit, "chain", harm, flops, _explain(harm))


def part_of(offer: Offer, unit: UnitPlan, looked: Looked, *, training: bool) -> Offer:
    """A part of a chain that was offered, as an offer of its own.

    Args:
        offer: the whole chain.
        unit: what is left of it (`split_unit`).
        looked: what was seen of its linears.
        training: whether gradients count.

    Returns:
        The offer of the part.
    """
    made = _offer(unit, looked, sum(site.flops for site in looked.sites.values()) or 1.0, training)
    return replace(made, reason=f"{made.reason}; a part of the chain {offer.name}")


def take_apart(offer: Offer, recipe: str, looked: Looked, *, why: str, training: bool) -> list[Offer]:
    """The linears of a chain that was offered, each by itself.

    Args:
        offer: the chain.
        recipe: that they run.
        looked: what is known of them.
        why: they are better so.
        training: whether gradients count.

    Returns:
        One offer a linear.
    """
    total = sum(site.flops for site in looked.sites.values()) or 1.0
    sites = [looked.sites[name] for name in offer.unit.linears]
    harms = [site.total_harm(recipe, training=training) for site in sites]
    return [Offer(single(site), recipe, harm, site.flops / total, f"{recipe}: {_explain(harm)}; {why}") for site, harm in zip(sites, harms, strict=True)]  # fmt: skip


def _recipe_of(unit: UnitPlan, training: bool) -> str:
    """Which scored recipe a unit's scales are."""
    if unit.scales in ("delayed", "calibrated"):
        return "delayed" if training else "static"
    if len(unit.links) > 1:
        return "tensorwise"
    return "tensorwise" if training else "rowwise"


def _recipe_at(site: SiteLook, unit: UnitPlan, training: bool) -> str:
    """The same for one of its linears: what was measured in a chain that runs, where one does."""
    return CHAIN if ("fprop", CHAIN) in site.harm else _recipe_of(unit, training)


def _refuse(site: SiteLook, recipe: str, limits: Limits, training: bool) -> str | None:
    """Why a linear is not tried under a recipe, or None."""
    if site.refusal:
        return site.refusal
    cause = f"; {site.alarms[0].text}; {site.alarms[0].help}" if site.alarms else ""
    forward = site.harm.get(("fprop", recipe))
    if forward is None:
        return f"nothing predicts what its error does: {limits.unscored}"
    way = f"{recipe} scales" if recipe in ("delayed", "static") else recipe
    if (seen := limits.judged(forward)) > limits.forward:
        return f"{way}: predicted change of the loss {seen:.3%}, more than {limits.forward_is}{cause or limits.hint(seen, limits.forward)}"
    for gemm in GEMMS[1:] if training else ():
        backward = site.harm.get((gemm, recipe))
        if backward is not None and (seen := limits.judged(backward)) > limits.backward:
            return f"{way}: what {gemm} loses is worth {seen:.4%} of the loss, more than {limits.backward_is}{limits.hint(seen, limits.backward)}"
    return None


def _round_up(value: float) -> float:
    """To two digits."""
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(round(value / step, 6)) * step:.2g}")


def _explain(harm: Interval | None) -> str:
    return "not scored; swapping decides" if harm is None else f"predicted change of the loss {harm.value:.4%}"


def _finer(site: SiteLook, limits: Limits, total: float, why: str, training: bool) -> Offer | None:
    """The same linear alone with finer scales, where these are safe."""
    if site.refusal:
        return None
    for recipe in FINER:
        if _refuse(site, recipe, limits, training) is None:
            harm = site.total_harm(recipe, training=training)
            return Offer(single(site), recipe, harm, site.flops / total, f"{recipe}: {_explain(harm)}; {why}")
    return None


def single(site: SiteLook) -> UnitPlan:
    """A linear as a unit of its own."""
    return UnitPlan(
        name=site.name, links=[LinkPlan(linear=site.name, k=site.k, n=site.n)], scales="dynamic", gradient="tensor"
    )


def split_unit(unit: UnitPlan, out: set[str]) -> Iterator[UnitPlan]:
    """What is left of a chain when some of its linears leave it: its parts in order, each a chain of its own, its last linear without a norm behind it."""
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
            yield msgspec.structs.replace(unit, name=links[0].linear, links=links, scales=scales, bounded_input=bounded, magnitudes=magnitudes, around=None)  # fmt: skip
        links, bounded = [], link is not None and link.norm == "block"


def to_plan_parts(offers: list[Offer], looked: Looked, evidence: Mapping[str, UnitEvidence], kept: Mapping[str, str], *, training: bool) -> tuple[list[UnitPlan], list[SitePlan]]:  # fmt: skip
    """The chains of a plan, and a site plan for every linear that was seen: in a chain, under a recipe, or kept.

    Args:
        offers: what the plan takes.
        looked: what was seen of every linear.
        evidence: what was measured, by offer.
        kept: why a linear stays in high precision, by linear.
        training: whether the plan has gradient GEMMs.

    Returns:
        The units, and one site plan a linear.
    """
    total = sum(site.flops for site in looked.sites.values()) or 1.0
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
            reason = recipes[name].reason if name in recipes else "in a chain" if name in chained else kept.get(name, "not taken")  # fmt: skip
            choices.append(choice_of(gemm, way, reason))
        sites.append(
            SitePlan(
                site=name, m=max(site.rows, 1), k=site.k, n=site.n, flops_share=site.flops / total, choices=choices
            )
        )
    return units, sites
