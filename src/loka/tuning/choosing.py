"""Choose: per unit the fastest way that is safe. Nothing is measured here.

Forward, the score only sorts out what is hopeless: a linear whose predicted change of the loss exceeds five times the margin is not tried, everything else is swapped in and measured
(`verifying`), which decides. Gradients cannot be swapped in without training, so there the score decides: what one GEMM's rounding is worth may not exceed the margin. How a share of a step's
progress becomes a share of the loss is an assumption (docs/concepts/score.md), and the sum over GEMMs is not bounded by it: a paired run of training is what would show it. A chain with one refused linear is split there, and that linear is given finer scales where these pass. A unit is fast where the lower end of its measured speed-up exceeds 1;
where nothing could be timed it is kept for accuracy alone, and the plan says so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec

from loka.dispatch import RECIPES, Operands
from loka.dispatch.policy import HOPELESS
from loka.records import GEMMS, Choice, Interval, SitePlan, UnitEvidence, UnitPlan
from loka.tuning.looking import Looked, SiteLook, add_in_squares

__all__ = ["Chosen", "Offer", "make_offers", "split_unit"]

FINER = ("rowwise", "blockwise")


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
        """Of its first linear."""
        return self.unit.name


@dataclass(frozen=True)
class Chosen:
    """Offers that may be taken, and why the other linears stay in high precision."""

    offers: list[Offer]
    kept: dict[str, str]


def make_offers(looked: Looked, *, margin: float, training: bool) -> Chosen:
    """Every unit in the coarsest way that the score lets through.

    Args:
        looked: what was seen.
        margin: relative change of the loss that the whole model may have.
        training: gradients count too.

    Returns:
        What may be taken, and why the rest is kept.
    """
    total = sum(site.flops for site in looked.sites.values()) or 1.0
    kept = dict(looked.alone)
    offers: list[Offer] = []
    for unit in looked.units:
        unsafe = {}
        for name in unit.linears:
            if why := _refuse(looked.sites[name], _recipe_of(unit, training), margin, training):
                unsafe[name] = why
        offers += [_offer(part, looked, total, training) for part in split_unit(unit, set(unsafe))]
        for name, why in unsafe.items():
            offer = _finer(looked.sites[name], margin, total, why, training)
            if offer is None:
                kept[name] = why
            else:
                offers.append(offer)
    return Chosen(offers, kept)


def _offer(unit: UnitPlan, looked: Looked, total: float, training: bool) -> Offer:
    recipe = _recipe_of(unit, training)
    harms = [looked.sites[name].total_harm(recipe, training=training) for name in unit.linears]
    known = [harm for harm in harms if harm is not None]
    harm = add_in_squares(known) if known else None
    flops = sum(looked.sites[name].flops for name in unit.linears) / total
    return Offer(unit, "chain", harm, flops, _explain(harm))


def part_of(offer: Offer, unit: UnitPlan, looked: Looked, *, training: bool) -> Offer:
    """A part of a chain that was offered, as an offer of its own.

    Args:
        offer: the chain.
        unit: the part, from `split_unit`.
        looked: what was seen.
        training: gradients count too.

    Returns:
        The offer.
    """
    made = _offer(unit, looked, sum(site.flops for site in looked.sites.values()) or 1.0, training)
    return replace(made, reason=f"{made.reason}; a part of the chain {offer.name}")


def predicted_harm(site: SiteLook, *, training: bool) -> float:
    """What one scale for the tensor is predicted to cost at a linear.

    Args:
        site: what was seen there.
        training: gradients count too.

    Returns:
        A relative change of the loss; 0 where nothing is known.
    """
    harm = site.total_harm("delayed" if training else "static", training=training)
    return 0.0 if harm is None else harm.value


def _recipe_of(unit: UnitPlan, training: bool) -> str:
    """Which scored recipe a unit's scales are."""
    if unit.scales in ("delayed", "calibrated"):
        return "delayed" if training else "static"
    if len(unit.links) > 1:
        return "tensorwise"
    return "tensorwise" if training else "rowwise"


def _refuse(site: SiteLook, recipe: str, margin: float, training: bool) -> str | None:
    """Why a linear is not tried under a recipe, or None."""
    if site.refusal:
        return site.refusal
    cause = f"; {site.alarms[0].text}; {site.alarms[0].help}" if site.alarms else ""
    forward = site.harm.get(("fprop", recipe))
    if forward is None:
        return "no gradient reached it, so nothing predicts what its error does"
    if forward.value > HOPELESS * margin:
        return f"{recipe}: predicted change of the loss {forward.value:.3%}, more than {HOPELESS:g} times the margin of {margin:.3%}{cause}"
    for gemm in GEMMS[1:] if training else ():
        backward = site.harm.get((gemm, recipe))
        if backward is not None and backward.value > margin:
            return f"{recipe}: what {gemm} loses is worth {backward.value:.4%} of the loss, more than the margin of {margin:.3%}"
    return None


def _explain(harm: Interval | None) -> str:
    return "not scored; swapping decides" if harm is None else f"predicted change of the loss {harm.value:.4%}"


def _finer(site: SiteLook, margin: float, total: float, why: str, training: bool) -> Offer | None:
    """The same linear alone with finer scales, where these are safe."""
    if site.refusal:
        return None
    for recipe in FINER:
        if _refuse(site, recipe, margin, training) is None:
            harm = site.total_harm(recipe, training=training)
            return Offer(single(site), recipe, harm, site.flops / total, f"{recipe}: {_explain(harm)}; {why}")
    return None


def single(site: SiteLook) -> UnitPlan:
    """A linear as a unit of its own."""
    from loka.records import LinkPlan

    return UnitPlan(
        name=site.name, links=[LinkPlan(linear=site.name, k=site.k, n=site.n)], scales="dynamic", gradient="tensor"
    )


def split_unit(unit: UnitPlan, out: set[str]) -> Iterator[UnitPlan]:
    """What is left of a chain when some of its linears stay in high precision.

    Args:
        unit: the chain.
        out: linears that leave it.

    Returns:
        Its parts, in order; each a chain of its own, its last linear without a norm behind it.
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
            if links[-1].norm in ("layer", "rms"):
                links[-1] = msgspec.structs.replace(
                    links[-1], norm="none", norm_site=None, activation="none", passed=[], functions=[]
                )
            scales = unit.scales if len(links) > 1 else "dynamic"
            names = {part.linear for part in links}
            magnitudes = {name: value for name, value in unit.magnitudes.items() if name in names}
            yield msgspec.structs.replace(unit, name=links[0].linear, links=links, scales=scales, bounded_input=bounded, magnitudes=magnitudes, around=None)  # fmt: skip
        links, bounded = [], link is not None and link.norm == "block"


def to_plan_parts(offers: list[Offer], looked: Looked, evidence: Mapping[str, UnitEvidence], kept: Mapping[str, str], *, training: bool) -> tuple[list[UnitPlan], list[SitePlan]]:  # fmt: skip
    """The units and single linears of a plan.

    Args:
        offers: what is taken.
        looked: what was seen.
        evidence: what was measured, by unit.
        kept: why other linears stay.
        training: whether gradient GEMMs run.

    Returns:
        Chains, and a site plan for every linear that was seen: in a chain, under a recipe, or kept.
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
            operands: Operands | None = None
            if name in recipes:
                operands = RECIPES[recipes[name].way].operands(gemm)
            reason = recipes[name].reason if name in recipes else "in a chain" if name in chained else kept.get(name, "not taken")  # fmt: skip
            choices.append(
                Choice(
                    gemm=gemm, backend="high" if operands is None else "auto", a=None if operands is None else str(operands.a),
                    b=None if operands is None else str(operands.b), reason=reason, fast_accum=operands is not None and operands.fast_accum,
                )
            )  # fmt: skip
        sites.append(
            SitePlan(
                site=name, m=max(site.rows, 1), k=site.k, n=site.n, flops_share=site.flops / total, choices=choices
            )
        )
    return units, sites
