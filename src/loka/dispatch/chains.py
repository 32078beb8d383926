"""Chains of a plan that is made from a report: the units that were found, judged by what Probe measured at their linears.

The same choice as `loka.tune` makes (`loka.dispatch.choosing`), with the limit of whoever places without measuring again: every GEMM of every linear within its share of the margin. A linear
that exceeds it, that an override or a measured change of the metric speaks against, or that must stay as it is, leaves its chain, which splits there; alone it is planned like any other linear.
"""

from collections.abc import Mapping, Sequence

import msgspec

from loka.dispatch.choosing import CHAIN, Limits, Looked, SiteLook, make_offers
from loka.dispatch.margin import allow
from loka.dispatch.recipe import choice_of
from loka.records import GEMMS, ProbeReport, Site, SitePlan, UnitEvidence, UnitPlan

# candidates whose scales are given beforehand: of chains, not of linears that stand alone
GIVEN = ("static", "delayed", CHAIN)


def place_chains(
    report: ProbeReport,
    sites: Sequence[SitePlan],
    *,
    margin: float,
    units: int,
    wanted: bool | None,
    refusal: str | None,
    told: Mapping[str, str],
) -> tuple[list[SitePlan], list[UnitPlan], list[str]]:
    """Put linears of a plan into chains.

    Args:
        report: the evidence, with the units that were found.
        sites: every linear as it was planned alone.
        margin: relative change of the loss that the whole model may have.
        units: that share it.
        wanted: chains were asked for, forbidden, or (None) are left to the evidence.
        refusal: why what was asked leaves no room for chains.
        told: sites that an override decides, with what it says.

    Returns:
        The sites, those in chains in high precision when taken alone; the chains; notes.

    Raises:
        ValueError: chains were asked for and there can be none.
    """
    if wanted is False:
        return list(sites), [], []
    why = refusal or (None if report.chains else report.no_chains or "the report has no chains")
    if why is not None:
        if wanted:
            raise ValueError(f"chains=True: {why}")
        return list(sites), [], [f"no chains: {why}"]
    looked = Looked(
        {site.name: _look_of(site, margin, units, told) for site in report.sites}, _known(report), report.alone
    )
    training = any(gemm != "fprop" for site in report.sites for gemm in site.gemms)
    chosen = make_offers(looked, limits=Limits.to_place(margin, units), training=training)
    placed = [
        msgspec.structs.replace(offer.unit, evidence=UnitEvidence(harm=offer.harm), reason=offer.reason)
        for offer in chosen.offers
        if offer.way == "chain"
        and len(offer.unit.links) > 1  # one linear gains nothing from it here, and alone may have finer scales
    ]
    inside = {name: unit.name for unit in placed for name in unit.linears}
    refused = {offer.name: offer.reason for offer in chosen.offers if offer.way != "chain"} | chosen.kept
    out = {name: refused[name] for unit in looked.units for name in unit.linears if name in refused}
    notes = ["the speed of its chains was not measured"] if placed else []
    if wanted and not placed:
        raise ValueError("chains=True, and every linear of every chain is refused: " + "; ".join(f"{n}: {w}" for n, w in out.items()))  # fmt: skip
    return [_in_chain(site, inside, out) for site in sites], placed, notes


def _known(report: ProbeReport) -> list[UnitPlan]:
    """Units all of whose linears were probed."""
    names = {site.name for site in report.sites}
    return [unit for unit in report.chains if names.issuperset(unit.linears)]


def _look_of(site: Site, margin: float, units: int, told: Mapping[str, str]) -> SiteLook:
    harm = {(c.gemm, c.recipe): c.harm for c in site.candidates if c.harm is not None and c.refusal is None}
    change = site.metric_change
    refusal = site.kept or site.off or told.get(site.name)
    if refusal is None and change is not None and not (judged := allow(change, margin=margin, units=units)).within:
        refusal = f"swapped in alone it moved the metric by {judged.text}"
    return SiteLook(site.name, site.k, site.n, site.m, harm, site.alarms, refusal)


def _in_chain(site: SitePlan, inside: Mapping[str, str], out: Mapping[str, str]) -> SitePlan:
    """A site as the plan lists it: its chain runs it, or what kept it out of one is beside what it runs alone."""
    if site.site in inside:
        gemms = [choice.gemm for choice in site.choices] or list(GEMMS)
        reason = f"in the chain {inside[site.site]}"
        return msgspec.structs.replace(site, choices=[choice_of(gemm, None, reason) for gemm in gemms])
    if site.site not in out or not site.choices:
        return site
    first = site.choices[0]
    refused = [*first.refusals, f"in a chain: {out[site.site]}"]
    return msgspec.structs.replace(site, choices=[msgspec.structs.replace(first, refusals=refused), *site.choices[1:]])
