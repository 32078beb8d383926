"""Whether a plan fits a model on its device. A Plan is a record; how it reads is `loka.records.prose`. Nothing here changes a model: see `loka.convert`."""

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
    """Every way in which a plan does not fit a model on its device, or the device itself.

    Args:
        plan: made for this model, or for one like it.
        model: as it would be converted.
        modules: its modules by the names that plans give them, where parts of it are wrapped (`loka.nn.wrapping.named_sites`); None is as `named_modules` has them.

    Returns:
        One line for each problem; empty where it fits.

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
            if any(choice.quantized for choice in site.choices):  # what is kept may be anything
                problems.append(f"{site.site}: is a {type(module).__name__}, expected an nn.Linear")
        elif (module.in_features, module.out_features) != (site.k, site.n):
            seen = f"K {module.in_features}, N {module.out_features}"
            problems.append(f"{site.site}: the model has {seen}, the plan K {site.k}, N {site.n}")
        else:
            # not `module.weight`: reading a parametrised one may change it
            problems += _check_choices(site, next(module.parameters()).device)
    return [*_check_target(plan, model), *problems]


def _check_target(plan: Plan, model: nn.Module) -> list[str]:
    """Speeds of one device say nothing about another. A plan for accuracy only is for any."""
    if plan.target is None or not any(choice.quantized for site in plan.sites for choice in site.choices):
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
            if choice.backend == "auto":  # settled when it is placed; the reference can run anything
                continue
            verdict = registry.backend("scaled_mm", choice.backend).supports(call, device)
        except ValueError as error:
            problems.append(f"{place}: {error}")
            continue
        if not verdict:
            problems.append(f"{place}: {choice.backend} cannot run {call} on {device}: {verdict.reason}")
    return problems
