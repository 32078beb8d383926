"""Whether what `loka.convert` is asked for makes sense for this model, and what differs from where a plan was made."""

from typing import Any

import torch
from torch import nn

from loka.dispatch import RECIPES
from loka.lowp.binding import LinearOptions
from loka.lowp.chain import chains_of
from loka.lowp.linear import linears_of
from loka.measure.device import device_of, name_device
from loka.nn.wrapping import named_sites
from loka.records import Plan
from loka.records.prose import name_some
from loka.units import placed_tables


def check_request(model: Any, plan: Any, recipe: Any, options: Any, keep: Any) -> None:
    """Raise if the arguments of `convert` are of the wrong type or do not go together. `keep` is `module_filter_fn`."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected an nn.Module, got {type(model).__name__}")
    if (plan is None) == (recipe is None):
        raise ValueError("convert takes a plan or a recipe, exactly one of them")
    if plan is not None and not isinstance(plan, Plan):
        hint = (
            f"recipe={plan!r}"
            if isinstance(plan, str) and plan in RECIPES
            else "loka.Plan.load(path), loka.tune(...).plan or report.plan()"
        )
        raise ValueError(
            f"plan: expected a loka.records.Plan, got {type(plan).__name__} {str(plan)[:60]!r}; hint: {hint}"
        )
    if options is not None and not isinstance(options, LinearOptions):
        raise ValueError(
            f"options: expected LinearOptions, got {type(options).__name__}; hint: loka.LinearOptions(scales='delayed')"
        )
    if plan is not None and keep is not None:
        raise ValueError("module_filter_fn cannot be combined with a plan: the plan says which modules are converted")
    if plan is not None and options is not None and (options.scales != "dynamic" or options.gradients is not None):
        raise ValueError("options.scales and options.gradients cannot be combined with a plan, which sets both")


def check_unconverted(model: nn.Module) -> None:
    """Raise if any part of a model is converted already."""
    already = [*(name for name, _ in (*linears_of(model), *chains_of(model))), *placed_tables(model)]
    if already:
        raise ValueError(f"already converted: {name_some(already)}; call loka.revert(model) first")


def check_level(model: nn.Module, plan: Plan) -> None:
    """Raise if the plan was made for a submodule of this model, or for a model that contains this one."""
    names = [name for unit in plan.units for name in unit.linears]
    names += [site.site for site in plan.sites if site.quantized]
    modules = dict(named_sites(model))
    if not names or any(name in modules for name in names):
        return
    for prefix in modules:
        if all(f"{prefix}.{name}" in modules for name in names):
            raise ValueError(
                f"the plan is for a part of this model: it names {names[0]}, which is {prefix}.{names[0]} here; hint: "
                f"loka.convert(model.get_submodule({prefix!r}), plan)"
            )
    prefix, _, rest = names[0].partition(".")
    if all(name.startswith(f"{prefix}.") and name.removeprefix(f"{prefix}.") in modules for name in names):
        raise ValueError(
            f"the plan is for a model that holds this one as {prefix}: it names {names[0]}, which is {rest} here; "
            "hint: call loka.convert on that model"
        )


def compare_places(plan: Plan, model: nn.Module) -> list[str]:
    """Return notes on differences to the machine the plan was made for: speeds measured there may not hold here."""
    here, there = name_device(device_of(model)), plan.environment
    notes = []
    if plan.target is not None and plan.units and here != plan.target:
        notes.append(f"the plan's speeds are for {plan.target}; this is {here}: measure again")
    if torch.__version__.split("+")[0] != there.torch.split("+")[0] and plan.units:
        notes.append(f"the plan was made with torch {there.torch}; this is {torch.__version__}: its speeds may differ")
    fast = [site.site for site in plan.sites if any(c.gemm == "wgrad" and c.fast_accum for c in site.choices)]
    if fast:  # recipes no longer ask for fast accumulation in wgrad, but an older plan runs as it is written
        notes.append(
            f"the plan accumulates the weight gradients of {name_some(fast, 4)} in the tensor cores, with about "
            "14 bits: over a large batch this may cost quality that a probe of a few rows does not show; "
            "hint: make the plan again"
        )
    return notes
