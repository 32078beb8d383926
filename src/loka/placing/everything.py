"""A plan without measurements: every chain in FP8, as a baseline or where FP8 is wanted regardless.

Its kernels are judged nevertheless (`loka.placing.judging`): a unit that runs a wrong one stays in 16 bits.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import nn

from loka import mods as mods_room
from loka.dispatch.choosing import Looked, Offer, SiteLook, single, to_plan_parts
from loka.measure.device import device_of
from loka.measure.kernel_calls import KernelCall
from loka.nn.wrapping import named_sites, unwrap
from loka.placing.judging import Judge, find_planned, plan_unmeasured
from loka.records import Plan
from loka.records.unit import GradientScales
from loka.units import Discovered, discover, measuring
from loka.units.example import call_model
from loka.units.undisturbed import undisturbed


def plan_everything(
    model: nn.Module,
    example: Any,
    *,
    mods: Sequence[str] = (),
    serving: bool = False,
    linears: int = 0,
    gradient: GradientScales | None = None,
) -> Plan:
    """Return a plan that runs every chain in FP8, whatever its error or speed; the plan form of `loka.mods.Fuse`.

    A chain or linear of which a kernel fails the conformance gate stays in 16 bits, with the reason in its sites.

    Args:
        model: a model that is not converted. It is run on the example and left unchanged.
        example: one input; a tuple is *args, a dict **kwargs.
        mods: mods to apply first, in their string form: "no_bias", "block_norm", "hard_swish".
        serving: plan for inference: dropout is ignored, and scales come from the example.
        linears: also take standalone linears at least this wide; 0 takes none. Those that no chain can hold, because
            they are called several times or narrower than 64, run with the `rowwise` recipe.
        gradient: how gradients are scaled; None picks per chain, see `loka.units.discover`.

    Returns:
        A plan whose notes say that nothing was measured, and which kernels could not be judged.

    Example:
        >>> loka.convert(model, loka.placing.plan_everything(model, batch))
    """
    inner = unwrap(model)
    if mods:
        mods_room.apply(inner, [mods_room.parse(text) for text in mods], example=example)
    try:
        found = discover(inner, example, serving=serving, linears=linears, gradient=gradient)
        if serving:
            with undisturbed(inner), measuring(inner, found.units) as seen, torch.no_grad():
                inner.eval()  # as in serving: no dropout, no batch statistics updated
                call_model(inner, example)
            found = replace(found, units=seen.units(headroom=1.0))
        looked, offers = _look(inner, found, linears)
        judge = Judge(device_of(inner))

        def make(offers: list[Offer], kept: dict[str, str]) -> Plan:
            units, sites = to_plan_parts(offers, looked, {}, looked.alone | kept, training=not serving)
            return plan_unmeasured(inner, units=units, sites=sites)

        def find(names: Collection[str]) -> list[KernelCall]:
            plan = make([offer for offer in offers if offer.name in names], {})
            return find_planned(inner, plan, example, training=not serving)

        wrong = judge.refuse([offer.name for offer in offers], find)
    finally:
        if mods:
            mods_room.revert(inner)
    kept = {name: wrong[offer.name] for offer in offers if offer.name in wrong for name in offer.unit.linears}
    plan = make([offer for offer in offers if offer.name not in wrong], kept)
    notes = ["made without measurements: every chain in FP8, whatever its error or speed", *judge.notes]
    return msgspec.structs.replace(plan, mods=list(mods), notes=notes)


def _look(model: nn.Module, found: Discovered, least: int) -> tuple[Looked, list[Offer]]:
    """Return the linears, and what to place: the chains, and by a recipe the wide linears that no chain can hold."""
    sites = {}
    for name, module in named_sites(model, once=True):
        if isinstance(module, nn.Linear):
            rows = found.rows.get(name, [0])
            sites[name] = SiteLook(
                name, module.in_features, module.out_features, rows=max(rows), calls=len(rows), step_rows=sum(rows)
            )
    wide = [sites[name] for name in found.by_themselves if 0 < least <= min(sites[name].k, sites[name].n)]
    offers = [Offer(unit, "chain", None, 0.0, unit.reason) for unit in found.units]
    offers += [Offer(single(site), "rowwise", None, 0.0, found.alone[site.name]) for site in wide]
    return Looked(sites, found.units, found.alone), offers
