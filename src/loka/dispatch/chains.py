"""Place chains in a plan made from a report: the units that were found, judged by what Probe measured at their linears.

The choice is the one `loka.tune` makes (`loka.dispatch.choosing`), but nothing is measured afterwards, so every GEMM of
every linear must be within its share of the margin. A linear that is not, that an override or a measured metric change
rules out, or that must not be converted, leaves its chain, which is split there. It is then planned like any other
linear. So are all linears of a chain that runs a kernel which failed the conformance gate.
"""

from collections.abc import Mapping, Sequence

import msgspec

from loka.dispatch.choosing import CHAIN, Limits, Looked, SiteLook, make_offers
from loka.dispatch.margin import allow
from loka.dispatch.recipe import choice_of
from loka.records import GEMMS, ProbeReport, Site, SitePlan, UnitEvidence, UnitPlan

# recipes whose scales are known before the call: for chains only, not for single linears
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
    """Move linears of a plan into chains. Returns the sites (those in chains in high precision), the chains, and notes.

    `wanted`: True requires chains, and raises ValueError if none can be placed, False forbids them, None places those
    that the evidence supports. `units` share the margin. `refusal` says why the policy rules out chains.
    """
    if wanted is False:
        return list(sites), [], []
    why = refusal or (None if report.chains else report.no_chains or "the report has no chains")
    if why is not None:
        if wanted:
            raise ValueError(f"chains=True: {why}")
        return list(sites), [], [f"no chains: {why}"]
    wrong = {n: why for unit in report.chains if (why := report.wrong_chains.get(unit.name)) for n in unit.linears}
    looks = {site.name: _make_look(site, margin, units, {**wrong, **told}) for site in report.sites}
    probed = [unit for unit in report.chains if looks.keys() >= set(unit.linears)]
    looked = Looked(looks, probed, report.alone)
    training = any(gemm != "fprop" for site in report.sites for gemm in site.gemms)
    chosen = make_offers(looked, limits=Limits.to_place(margin, units), training=training)
    placed = [
        msgspec.structs.replace(offer.unit, evidence=UnitEvidence(harm=offer.harm), reason=offer.reason)
        for offer in chosen.offers
        if offer.way == "chain"
        and len(offer.unit.links) > 1  # a chain of one linear gains nothing; on its own it may have finer scales
    ]
    inside = {name: unit.name for unit in placed for name in unit.linears}
    refused = {offer.name: offer.reason for offer in chosen.offers if offer.way != "chain"} | chosen.kept
    out = {name: refused[name] for unit in looked.units for name in unit.linears if name in refused}
    notes = ["the speed of its chains was not measured"] if placed else []
    if wanted and not placed:
        raise ValueError(
            "chains=True, and every linear of every chain is refused: " + "; ".join(f"{n}: {w}" for n, w in out.items())
        )
    return [_note_chain(site, inside, out) for site in sites], placed, notes


def _make_look(site: Site, margin: float, units: int, told: Mapping[str, str]) -> SiteLook:
    harm = {(c.gemm, c.recipe): c.harm for c in site.candidates if c.harm is not None and c.refusal is None}
    change = site.metric_change
    refusal = site.kept or site.off or told.get(site.name)
    if refusal is None and change is not None and not (judged := allow(change, margin=margin, units=units)).within:
        refusal = f"swapped in alone it moved the metric by {judged.text}"
    return SiteLook(site.name, site.k, site.n, site.m, harm, site.alarms, refusal)


def _note_chain(site: SitePlan, inside: Mapping[str, str], out: Mapping[str, str]) -> SitePlan:
    """Return a site as the plan lists it: run by its chain, or on its own with the reason why it is in no chain."""
    if site.site in inside:
        gemms = [choice.gemm for choice in site.choices] or list(GEMMS)
        reason = f"in the chain {inside[site.site]}"
        return msgspec.structs.replace(site, choices=[choice_of(gemm, None, reason) for gemm in gemms])
    if site.site not in out or not site.choices:
        return site
    first = site.choices[0]
    refused = [*first.refusals, f"in a chain: {out[site.site]}"]
    return msgspec.structs.replace(site, choices=[msgspec.structs.replace(first, refusals=refused), *site.choices[1:]])
