"""A plan without measurements: every chain in FP8, as a baseline or where FP8 is wanted regardless."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from loka import mods as mods_room
from loka.dispatch.choosing import Looked, Offer, SiteLook, single, to_plan_parts
from loka.measure.device import environment_of
from loka.nn.wrapping import named_sites, unwrap
from loka.records import Plan, SitePlan
from loka.records.unit import GradientScales, UnitPlan
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

    Args:
        model: a model that is not converted. It is run on the example and left unchanged.
        example: one input; a tuple is *args, a dict **kwargs.
        mods: mods to apply first, in their string form: "no_bias", "block_norm", "hard_swish".
        serving: plan for inference: dropout is ignored, and scales come from the example.
        linears: also take standalone linears at least this wide; 0 takes none. Those that no chain can hold, because
            they are called several times, run with the `rowwise` recipe.
        gradient: how gradients are scaled; None picks per chain, see `loka.units.discover`.

    Returns:
        A plan whose notes say that nothing was measured.

    Example:
        >>> loka.convert(model, loka.placing.plan_everything(model, batch))
    """
    inner = unwrap(model)
    if mods:
        mods_room.apply(inner, [mods_room.parse(text) for text in mods], example=example)
    try:
        found = discover(inner, example, serving=serving, linears=linears, gradient=gradient)
        units, sites = _parts(inner, found, linears, serving)
        if serving:
            with undisturbed(inner), measuring(inner, units) as seen, torch.no_grad():
                inner.eval()  # as in serving: no dropout, no batch statistics updated
                call_model(inner, example)
            units = seen.units(headroom=1.0)
    finally:
        if mods:
            mods_room.revert(inner)
    return Plan(
        model=type(inner).__name__,
        recipe="auto",
        target=None,
        max_error=1.0,
        max_gradient_error=1.0,
        min_speedup=None,
        flops_of="sites",
        sites=sites,
        mods=list(mods),
        units=units,
        environment=environment_of(inner),
        notes=["made without measurements: every chain in FP8, whatever its error or speed"],
    )


def _parts(model: nn.Module, found: Discovered, least: int, serving: bool) -> tuple[list[UnitPlan], list[SitePlan]]:
    """Return the units, and the sites: wide linears that no chain can hold run by a recipe, the others say why not."""
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
    looked = Looked(sites, found.units, found.alone)
    return to_plan_parts(offers, looked, {}, found.alone, training=not serving)
