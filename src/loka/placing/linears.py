"""Resolve a plan, or a recipe, to the linears of a model.

Sites are matched by module, not by name. A module registered under two names is one module, and a plan may use either
name; a plan that uses both with different settings is rejected. The FLOPs share counts every bound module once.

The backends that a plan names are used as named. One that cannot run on the model's device is a problem, and so is
`reference` on a GPU: a plan made on a CPU for accuracy alone names nothing else, and would unexpectedly run as slow
emulation. If the caller gives a backend, the plan's precisions run on it instead: `auto` picks among this device's
kernels, `reference` asks for emulation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import nn

from loka.dispatch import check, recipe_named, way_of
from loka.kernels.registry import BACKENDS
from loka.lowp.auto import is_emulation
from loka.lowp.binding import LinearBinding, LinearOptions
from loka.lowp.chain import chains_of
from loka.lowp.linear import refuse
from loka.nn.grouped import GroupedLinear
from loka.nn.wrapping import named_sites
from loka.records import FlopsOf, KernelBucket, Plan, SitePlan, UnitPlan
from loka.units import refuse_unit
from loka.units.discovery import PROTECTED

ModuleFilter = Callable[[nn.Module, str], bool]
_EMULATION_HINT = (
    "hint: probe and plan on this machine; or plan for it from measured rows (`loka plan --target`); or "
    "convert(..., backend='auto') to run the plan's precisions on this device's kernels, backend='reference' for "
    "emulation on purpose"
)


@dataclass
class Bound:
    """What a conversion does to the linears of a model. Names are the first of each module in the model.

    Args:
        bindings: linears to convert one by one, and how.
        units: chains to place.
        kept: linears that stay, and why.
        rows: rows per call of linears, if known.
        share: low-precision share of the GEMM FLOPs, if known.
        flops_of: what it is a share of: of the "model", or of the "sites" that were probed.
        notes: for the record.
    """

    bindings: dict[str, LinearBinding] = field(default_factory=dict)
    units: list[UnitPlan] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    share: float | None = None
    flops_of: FlopsOf | None = None
    notes: list[str] = field(default_factory=list)


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Linear | GroupedLinear]]:
    """Yield every linear and grouped linear once, under its first name in the unwrapped model."""
    for name, module in named_sites(model, once=True):
        if isinstance(module, nn.Linear | GroupedLinear):
            yield name, module


def spoken_for(model: nn.Module) -> dict[str, str]:
    """Return the linears that must not be bound, and why: in a chain, or marked by mods.protect_intermediates."""
    reasons = {n: "protected by a mod" for n, m in named_sites(model) if getattr(m, PROTECTED, False)}
    for _, chain in chains_of(model):
        reasons |= {link.linear: f"runs in FP8 in the chain {chain.name}" for link in chain.links}
    return reasons


def bind_by_plan(model: nn.Module, plan: Plan, backend: str | None, options: LinearOptions) -> Bound:
    """Return what the plan converts. Raise a ValueError with every reason if the plan does not fit the model."""
    chained = {name: unit.name for unit in plan.units for name in unit.linears}
    early = _decided_twice(model, plan, chained)
    early += [problem for unit in plan.units for problem in refuse_unit(model, unit)]
    bound = Bound(units=fit_units(plan.units, backend), flops_of=plan.flops_of)
    share = sum(site.flops_share for site in plan.sites if site.site in chained)
    plan = msgspec.structs.replace(plan, sites=[site for site in plan.sites if site.site not in chained], units=[])
    problems = check(plan if backend is None else _checkable(plan, backend), model, modules=dict(named_sites(model)))
    problems += early
    planned = _sites_by_module(model, plan, backend, problems)
    taken, emulated = spoken_for(model), False
    for name, module in candidates(model):
        site = planned.get(name)
        if name in chained:
            continue
        if site is None:
            bound.kept[name] = "not in the plan"
        elif not site.quantized:
            bound.kept[name] = _reason_kept(site)
        elif reason := taken.get(name) or refuse(module):
            problems.append(f"{name}: {reason}")
        else:
            device = next(module.parameters()).device
            if backend is None and (slow := _emulated_gemms(site, device)):
                emulated = True
                problems.append(
                    f"{site.site} {', '.join(slow)}: the plan names reference, which is emulation on {device}"
                )
            try:
                bound.bindings[name] = options.apply(_bind(site, backend))
                bound.rows[name] = site.m
            except ValueError as error:
                problems.append(f"{name}: {error}")
    if problems:
        hint = f"\n{_EMULATION_HINT}" if emulated else ""
        raise ValueError(
            f"the plan for {plan.model} does not fit this model:\n  " + "\n  ".join(dict.fromkeys(problems)) + hint
        )
    bound.share = min(share + sum(planned[name].low_precision_share for name in bound.bindings), 1.0)
    if backend is not None:
        bound.notes.append(_describe_override(plan, backend))
    return bound


def bind_by_recipe(
    model: nn.Module, name: str, keep: ModuleFilter | None, backend: str, options: LinearOptions
) -> Bound:
    """Return every linear that a recipe can convert and `keep`, if given, does not exclude.

    Args:
        model: the model.
        name: of the recipe.
        keep: called with a module and its name; False excludes it.
        backend: that runs the GEMMs.
        options: other settings of converted linears.
    """
    recipe = recipe_named(name)
    named = (recipe.fprop, recipe.dgrad, recipe.wgrad)
    fprop, dgrad, wgrad = (None if way is None else way.on(backend) for way in named)
    binding = options.apply(LinearBinding(fprop, dgrad, wgrad))
    bound, taken = Bound(), spoken_for(model)
    for site, module in candidates(model):
        if keep is not None and not keep(module, site):
            bound.kept[site] = "excluded by module_filter_fn"
        elif isinstance(module, GroupedLinear):
            bound.kept[site] = "grouped GEMMs have no backward in low precision"
        elif reason := taken.get(site) or refuse(module):
            bound.kept[site] = reason
        else:
            bound.bindings[site] = binding
    return bound


def fit_units(units: Sequence[UnitPlan], backend: str | None) -> list[UnitPlan]:
    """Return the units as they will run: on `backend` if one is given, otherwise on the plan's backends."""
    if backend is None:
        return list(units)
    ops = [op for op in ("fused_linear", "scaled_mm", "quantize") if backend in BACKENDS[op]]
    if units and not ops and backend != "auto":
        known = sorted({name for op in ("fused_linear", "scaled_mm", "quantize") for name in BACKENDS[op]})
        raise ValueError(f"the kernels of a chain have no backend {backend!r}; backends are auto, {', '.join(known)}")
    kernels = [KernelBucket(rows=2**31, kernels=dict.fromkeys(ops, backend))] if ops else []  # none: auto
    return [msgspec.structs.replace(unit, kernels=kernels) for unit in units]


def _decided_twice(model: nn.Module, plan: Plan, chained: Mapping[str, str]) -> list[str]:
    """List modules that are in a chain under one name and have a low-precision choice under another.

    `Plan` itself rejects two decisions under one name.
    """
    modules = dict(named_sites(model))
    inside = {id(modules[name]): name for name in chained if name in modules}
    return [
        f"{site.site}: is the same module as {name}, which is in the chain {chained[name]}; expected one decision per module"
        for site in plan.sites
        if site.quantized and (name := inside.get(id(modules.get(site.site)))) is not None
    ]


def _sites_by_module(model: nn.Module, plan: Plan, backend: str | None, problems: list[str]) -> dict[str, SitePlan]:
    """Return the plan's sites by the first name of their module. Two names of one module must agree on what runs."""
    modules = dict(named_sites(model))
    first = {id(module): name for name, module in reversed(modules.items())}
    found: dict[str, SitePlan] = {}
    for site in plan.sites:
        if site.site not in modules:  # reported by `check`
            continue
        before = found.setdefault(first[id(modules[site.site])], site)
        if before.site != site.site and _what_runs(before, backend) != _what_runs(site, backend):
            problems.append(
                f"{before.site} and {site.site}: one module under two names, and the plan has different settings for them"
            )
    return found


def _what_runs(site: SitePlan, backend: str | None) -> dict[str, tuple[object, ...]]:
    return {c.gemm: (c.a, c.b, backend or c.backend, c.fast_accum) for c in site.quantized}


def _emulated_gemms(site: SitePlan, device: torch.device) -> list[str]:
    return [c.gemm for c in site.quantized if is_emulation(c.backend, device)]


def _bind(site: SitePlan, backend: str | None) -> LinearBinding:
    ways = {
        choice.gemm: way if backend is None else way.on(backend) for choice in site.choices if (way := way_of(choice))
    }
    return LinearBinding(ways.get("fprop"), ways.get("dgrad"), ways.get("wgrad"))


def _checkable(plan: Plan, backend: str) -> Plan:
    """Return the plan with its backends replaced, for `check`, which does not know `auto`.

    `auto` is checked as `reference`, its last resort, which always fits.
    """
    named = "reference" if backend == "auto" else backend
    change = msgspec.structs.replace
    return change(
        plan, sites=[change(s, choices=[change(c, backend=named) if c.quantized else c for c in s.choices]) for s in plan.sites]
    )  # fmt: skip


def _describe_override(plan: Plan, backend: str) -> str:
    named = ", ".join(sorted({c.backend for s in plan.sites for c in s.quantized})) or "none"
    speeds = "" if plan.min_speedup is None else "; the plan's speed-ups were not measured with these kernels"
    return f"backend {backend!r} replaces the plan's own backends ({named}){speeds}"


def _reason_kept(site: SitePlan) -> str:
    """Return why no GEMM of a site is converted; a reason that all GEMMs share is given once."""
    reasons = {choice.reason for choice in site.choices}
    if len(reasons) == 1:
        return reasons.pop()
    return "; ".join(f"{c.gemm}: {c.reason}" for c in site.choices) or "no sampled step of the probe called it"
