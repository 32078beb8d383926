"""What a plan binds in a model: site by site, by module and not by name.

A module under two names is one module, and a plan may call it by either; two names with two opinions are refused. The share of the FLOPs is counted over what is bound, every
module once.

A plan names backends, and these run: one that cannot run on the model's device is a problem, and so is `reference` on a GPU. A plan made on a CPU for accuracy only names nothing else, and
on a GPU it would be emulation: right, slow, and expected by nobody. Given a backend, the plan's precisions run there instead, `auto` for what this device has, `reference` for emulation on purpose.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import torch
from torch import nn

from loka.dispatch import check, way_of
from loka.lowp.auto import is_emulation
from loka.lowp.binding import LinearBinding, LinearOptions
from loka.lowp.chain import chains_of
from loka.lowp.linear import refuse
from loka.nn.grouped import GroupedLinear
from loka.nn.wrapping import named_sites
from loka.records import Plan, SitePlan
from loka.units.discovery import PROTECTED

_EMULATION_HINT = (
    "hint: probe and plan on this machine; or plan for it from measured rows (`loka plan --target`); or convert(..., backend='auto') to run the plan's precisions on this "
    "device's kernels, backend='reference' for emulation on purpose"
)


@dataclass
class Bound:
    """Bindings by a site's first name in the model, and what stays as it is."""

    bindings: dict[str, LinearBinding] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)  # site -> why
    rows: dict[str, int] = field(default_factory=dict)  # site -> rows of a call, where known
    share: float | None = None  # of the FLOPs, where known
    notes: list[str] = field(default_factory=list)


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Linear | GroupedLinear]]:
    """Every module a reader would expect to be converted, each once, under its first name in the plain model."""
    for name, module in named_sites(model, once=True):
        if isinstance(module, nn.Linear | GroupedLinear):
            yield name, module


def spoken_for(model: nn.Module) -> dict[str, str]:
    """Linears that something else has decided about: run in a chain, or marked by mods.protect_intermediates."""
    reasons = {n: "protected by a mod" for n, m in named_sites(model) if getattr(m, PROTECTED, False)}
    for _, chain in chains_of(model):
        reasons |= {link.linear: f"runs in FP8 in the chain {chain.name}" for link in chain.links}
    return reasons


def bind_by_plan(model: nn.Module, plan: Plan, backend: str | None, options: LinearOptions) -> Bound:
    """What to convert; raises where the plan does not fit, with every reason."""
    chained = {name: unit.name for unit in plan.units for name in unit.linears}
    share = sum(site.flops_share for site in plan.sites if site.site in chained)
    plan = msgspec.structs.replace(plan, sites=[site for site in plan.sites if site.site not in chained], units=[])
    problems = check(plan if backend is None else _checkable(plan, backend), model, modules=dict(named_sites(model)))
    planned = _by_module(model, plan, backend, problems)
    bound, taken = Bound(), spoken_for(model)
    emulated = False
    for name, module in candidates(model):
        site = planned.get(name)
        if name in chained:
            continue
        if site is None:
            bound.kept[name] = "not in the plan"
        elif not any(choice.quantized for choice in site.choices):
            bound.kept[name] = _say_why(site)
        elif reason := taken.get(name) or refuse(module):
            problems.append(f"{name}: {reason}")
        else:
            device = next(module.parameters()).device
            if backend is None and (slow := _emulated(site, device)):
                emulated = True
                problems.append(f"{site.site} {', '.join(slow)}: the plan names reference, which is emulation on {device}")  # fmt: skip
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
        bound.notes.append(_tell_override(plan, backend))
    return bound


def _by_module(model: nn.Module, plan: Plan, backend: str | None, problems: list[str]) -> dict[str, SitePlan]:
    """The plan's sites by the first name of their modules; a site that is called by two names must be of one opinion."""
    modules = dict(named_sites(model))
    first = {id(module): name for name, module in reversed(modules.items())}
    found: dict[str, SitePlan] = {}
    for site in plan.sites:
        if site.site not in modules:  # `check` has said so
            continue
        before = found.setdefault(first[id(modules[site.site])], site)
        if before.site != site.site and _what_runs(before, backend) != _what_runs(site, backend):
            problems.append(f"{before.site} and {site.site}: one module under two names, and the plan wants two things of it")  # fmt: skip
    return found


def _what_runs(site: SitePlan, backend: str | None) -> dict[str, tuple[object, ...]]:
    return {c.gemm: (c.a, c.b, backend or c.backend, c.fast_accum) for c in site.choices if c.quantized}


def _emulated(site: SitePlan, device: torch.device) -> list[str]:
    return [c.gemm for c in site.choices if c.quantized and is_emulation(c.backend, device)]


def _bind(site: SitePlan, backend: str | None) -> LinearBinding:
    ways = {
        choice.gemm: way if backend is None else way.on(backend) for choice in site.choices if (way := way_of(choice))
    }
    return LinearBinding(ways.get("fprop"), ways.get("dgrad"), ways.get("wgrad"))


def _checkable(plan: Plan, backend: str) -> Plan:
    """The plan as it will run; `check` knows no auto, which ends with the reference and so always fits."""
    named = "reference" if backend == "auto" else backend
    change = msgspec.structs.replace
    return change(
        plan, sites=[change(s, choices=[change(c, backend=named) if c.quantized else c for c in s.choices]) for s in plan.sites]
    )  # fmt: skip


def _tell_override(plan: Plan, backend: str) -> str:
    named = ", ".join(sorted({c.backend for s in plan.sites for c in s.choices if c.quantized})) or "none"
    speeds = "" if plan.min_speedup is None else "; the plan's speed-ups are not of these kernels"
    return f"backend {backend!r} was asked for beside the plan, which names {named}{speeds}"


def _say_why(site: SitePlan) -> str:
    """Why no GEMM of a site is converted; once, where all have one reason."""
    reasons = {choice.reason for choice in site.choices}
    if len(reasons) == 1:
        return reasons.pop()
    return "; ".join(f"{c.gemm}: {c.reason}" for c in site.choices) or "no sampled step of the probe called it"
