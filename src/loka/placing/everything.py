"""A plan without evidence: every chain in FP8, for comparison and for those who know what they want."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from loka import mods as mods_room
from loka.dispatch.recipe import RECIPES, choice_of
from loka.nn.wrapping import named_sites, unwrap
from loka.records import GEMMS, Plan, SitePlan, capture_environment
from loka.records.unit import GradientScales
from loka.units import discover, measuring
from loka.units.flow import call_model
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
        units, sites = found.units, _alone(inner, found.repeated, linears, serving)
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
        flops_of="model",
        sites=sites,
        mods=list(mods),
        units=units,
        environment=capture_environment(threads=torch.get_num_threads()),
        notes=["made without evidence: every chain in FP8, whatever its error and its speed"],
    )


def _alone(model: nn.Module, names: Sequence[str], least: int, serving: bool) -> list[SitePlan]:
    """Linears that no chain can hold, under a recipe, from a width on."""
    linears = {name: module for name, module in named_sites(model) if isinstance(module, nn.Linear)}
    wide = [
        (name, linears[name])
        for name in names
        if 0 < least <= min(linears[name].in_features, linears[name].out_features)
    ]
    recipe, why = RECIPES["rowwise"], "it is called several times"
    return [
        SitePlan(
            site=name, m=1, k=linear.in_features, n=linear.out_features, flops_share=0.0,
            choices=[choice_of(gemm, recipe.operands(gemm), why) for gemm in (GEMMS[:1] if serving else GEMMS)],
        )
        for name, linear in wide
    ]  # fmt: skip
