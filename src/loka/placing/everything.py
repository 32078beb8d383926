"""A plan without evidence: every chain in FP8, for comparison and for those who know what they want."""

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
    """Every chain of a model in FP8, whatever its error and its speed: what `loka.mods.Fuse` places, as a plan.

    Args:
        model: not converted; it is run on the example and left as it was.
        example: one input; a tuple is *args, a dict **kwargs.
        mods: rewrites to apply first, as spelled: "no_bias", "block_norm", "hard_swish".
        serving: for inference: dropout has no effect, scales come from the example.
        linears: linears that stand alone are taken from this width on; 0 takes none. Those that are called several times run under the recipe `rowwise`.
        gradient: scales of the gradients; None is what the norms allow.

    Returns:
        A plan that says in its notes that nothing was measured.

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
                inner.eval()  # what is served has no dropout, and counts no batches
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
        notes=["made without evidence: every chain in FP8, whatever its error and its speed"],
    )


def _parts(model: nn.Module, found: Discovered, least: int, serving: bool) -> tuple[list[UnitPlan], list[SitePlan]]:
    """The chains, the linears that no chain can hold under a recipe from a width on, and why the others stay."""
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
