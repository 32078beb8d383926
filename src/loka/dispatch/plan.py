"""Check whether a plan fits a model. `Plan` itself is a record (`loka.records`); `loka.convert` applies one."""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from loka.dispatch.recipe import way_of
from loka.kernels import registry
from loka.measure.device import name_device
from loka.measure.site import gemm_shape
from loka.records import Plan, SitePlan


def check(plan: Plan, model: nn.Module, *, modules: Mapping[str, nn.Module] | None = None) -> list[str]:
    """List every reason why a plan cannot be applied to a model on its current device. The model is not changed.

    Args:
        plan: a plan made for this model, or for one with the same architecture.
        model: the model to check.
        modules: its modules by the names used in plans, where parts of the model are wrapped
            (`loka.nn.wrapping.named_sites`); None uses `named_modules`.

    Returns:
        One line per problem; empty if the plan fits.

    Example:
        >>> check(plan, model)
        []
    """
    modules = dict(model.named_modules(remove_duplicate=False)) if modules is None else modules
    counts = Counter(site.site for site in plan.sites)
    problems = [f"{name}: the plan names it {count} times" for name, count in counts.items() if count > 1]
    for site in plan.sites:
        module = modules.get(site.site)
        if module is None:
            problems.append(f"{site.site}: the model has no such module")
        elif not isinstance(module, nn.Linear):
            if site.quantized:  # a site kept in high precision may be any module
                problems.append(f"{site.site}: is a {type(module).__name__}, expected an nn.Linear")
        elif (module.in_features, module.out_features) != (site.k, site.n):
            seen = f"K {module.in_features}, N {module.out_features}"
            problems.append(f"{site.site}: the model has {seen}, the plan K {site.k}, N {site.n}")
        else:
            # not `module.weight`: reading a parametrized weight may change it
            problems += _check_choices(site, next(module.parameters()).device)
    return [*_check_target(plan, model), *problems]


def _check_target(plan: Plan, model: nn.Module) -> list[str]:
    """Report devices other than the plan's target. A plan made for accuracy only has no target and fits any device."""
    if plan.target is None or not any(site.quantized for site in plan.sites):
        return []
    devices = {p.device for p in model.parameters() if p.device.type != "meta"}
    here = {name_device(device) for device in devices}
    return [f"the plan is for {plan.target}, the model is on {name}" for name in sorted(here) if name != plan.target]


def _check_choices(site: SitePlan, device: torch.device) -> list[str]:
    problems = []
    counts = Counter(choice.gemm for choice in site.choices)
    problems += [f"{site.site} {gemm}: the plan chooses {n} times" for gemm, n in counts.items() if n > 1]
    for choice in site.choices:
        place = f"{site.site} {choice.gemm}"
        try:
            way = way_of(choice)
            if way is None:
                continue
            call = way.call(*gemm_shape(choice.gemm, site.m, site.k, site.n))
            if choice.backend == "auto":  # resolved when it is placed; the reference backend runs any call
                continue
            verdict = registry.backend("scaled_mm", choice.backend).supports(call, device)
        except ValueError as error:
            problems.append(f"{place}: {error}")
            continue
        if not verdict:
            problems.append(f"{place}: {choice.backend} cannot run {call} on {device}: {verdict.reason}")
    return problems
