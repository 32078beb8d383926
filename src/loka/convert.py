"""Convert: a plan in, swapped modules out. The parameters stay the same objects, so a state_dict does not change.

    summary = loka.convert(model, plan)                       what the plan says, site by site
    summary = loka.convert(model, recipe="tensorwise")        one recipe at every linear
    loka.revert(model)                                        plain nn.Linear again

A plan that does not fit the model is refused before anything is changed, and the refusal names every mismatch. Linears the plan does not
mention, or keeps in high precision throughout, are left alone.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

from loka.dispatch import Operands, check, recipe_named
from loka.nn.linear import BoundGemm, Linear, LinearBinding
from loka.records import GEMMS, Choice, Plan

ModuleFilter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Summary:
    """What a conversion did."""

    converted: dict[str, str]  # site -> what each GEMM now runs
    kept: dict[str, str]  # site -> why it stays in high precision
    low_precision_share: float | None  # of the GEMM FLOPs of a training step; None where no plan gave the shapes
    flops_of: str | None  # what that is a share of: the model's GEMMs, or the probed sites'

    def __str__(self) -> str:
        total = len(self.converted) + len(self.kept)
        share = ""
        if self.low_precision_share is not None:
            of = "the model's" if self.flops_of == "model" else "the probed"
            share = f"; {self.low_precision_share:.1%} of {of} GEMM FLOPs in low precision"
        kept = "".join(f"\n  kept {name}: {why}" for name, why in self.kept.items())
        return f"{len(self.converted)} of {total} linears converted, {len(self.kept)} kept{share}{kept}"


def convert(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    recipe: str | None = None,
    module_filter_fn: ModuleFilter | None = None,
    backend: str = "auto",
) -> Summary:
    """Swap linears in place: by a plan, or by one recipe at every linear that `module_filter_fn(module, name)` lets through."""
    if (plan is None) == (recipe is None):
        raise ValueError("convert takes a plan or a recipe, exactly one of them")
    if isinstance(model, nn.Linear):
        raise ValueError("the model is itself an nn.Linear and cannot be swapped in place; wrap it in nn.Sequential")
    already = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    if already:
        raise ValueError(f"already converted: {', '.join(already[:5])}; call loka.revert(model) first")
    if plan is not None:
        if module_filter_fn is not None or backend != "auto":
            raise ValueError("a plan already says which modules and which backends; give neither beside it")
        return _convert_by_plan(model, plan)
    assert recipe is not None
    return _convert_by_recipe(model, recipe, module_filter_fn, backend)


def _convert_by_plan(model: nn.Module, plan: Plan) -> Summary:
    problems = check(plan, model)
    if problems:
        raise ValueError(f"the plan for {plan.model} does not fit this model:\n  " + "\n  ".join(problems))
    bindings: dict[str, LinearBinding] = {}
    kept: dict[str, str] = {}
    planned = {site.site: site for site in plan.sites}
    for name, _ in _linears(model):
        site = planned.get(name)
        if site is None:
            kept[name] = "not in the plan"
        elif any(choice.quantized for choice in site.choices):
            bindings[name] = LinearBinding(**{choice.gemm: _bind(choice) for choice in site.choices})
        else:
            kept[name] = "; ".join(f"{c.gemm}: {c.reason}" for c in site.choices) or "no GEMM was seen"
    _swap(model, {name: (lambda m, b=binding: Linear.replacing(m, b)) for name, binding in bindings.items()})
    converted = {name: str(binding) for name, binding in bindings.items()}
    return Summary(converted, kept, plan.low_precision_share, plan.flops_of)


def _bind(choice: Choice) -> BoundGemm | None:
    if choice.a is None or choice.b is None:
        return None
    return BoundGemm(choice.backend, Operands.parse(choice.a, choice.b, fast_accum=choice.fast_accum))


def _convert_by_recipe(model: nn.Module, name: str, keep: ModuleFilter | None, backend: str) -> Summary:
    recipe = recipe_named(name)
    bound = {g: BoundGemm(backend, o) if (o := recipe.operands(g)) is not None else None for g in GEMMS}
    binding = LinearBinding(**bound)
    chosen = [site for site, module in _linears(model) if keep is None or keep(module, site)]
    kept = {site: "module_filter_fn" for site, _ in _linears(model) if site not in set(chosen)}
    _swap(model, {site: (lambda m: Linear.replacing(m, binding)) for site in chosen})
    return Summary({site: str(binding) for site in chosen}, kept, None, None)


def revert(model: nn.Module) -> int:
    """Put plain nn.Linear back everywhere; returns how many were converted."""
    names = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    _swap(model, {name: lambda m: m.restored() for name in names})
    return len(names)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module


def _swap(model: nn.Module, replacements: dict[str, Callable[..., nn.Module]]) -> None:
    """Replace modules by name; a module registered under several names is replaced under all of them by one object."""
    modules = dict(model.named_modules(remove_duplicate=False))
    new = {id(modules[name]): (modules[name], make) for name, make in replacements.items()}
    made = {key: make(old) for key, (old, make) in new.items()}
    for name, module in modules.items():
        if id(module) in made:
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, made[id(module)])


class _CallableModule(ModuleType):
    """`loka.convert` is this module and, as everybody writes it, the function: importing one must not hide the other."""

    def __call__(self, *args: Any, **kwargs: Any) -> Summary:
        return convert(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
