"""Convert: a plan in, linears in low precision out. Modules and parameters stay the same objects, so a state_dict does not change.

    summary = loka.convert(model, plan)                       what the plan says, site by site
    summary = loka.convert(model, recipe="tensorwise")        one recipe at every linear
    loka.revert(model)                                        plain nn.Linear again

A linear is converted in place: it changes its class and keeps its identity. Optimizers, hooks, tied weights and references held elsewhere stay valid, and a model can be
converted before or after DistributedDataParallel, fully_shard (FSDP2) and torch.compile wrap it. FSDP1 is refused.

A plan that does not fit the model is refused before anything is changed, and the refusal names every mismatch. Linears the plan does not mention, or keeps in high precision
throughout, are left alone; so are those a recipe meets and cannot convert (subclasses with a forward of their own, parametrised weights), and the summary says why.

Scales that are remembered between steps are no part of a state_dict: `scale_state` and `load_scale_state` keep them in a section of their own.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from loka.dispatch import Operands, check, recipe_named
from loka.nn.binding import BoundGemm, LinearBinding, LinearOptions
from loka.nn.fast_path import close_fast_paths, open_fast_paths
from loka.nn.flops import low_precision_share
from loka.nn.fused_tower import FusedTower
from loka.nn.grouped import GroupedLinear
from loka.nn.linear import Linear, linears_of, refresh, refuse
from loka.nn.scaling import Scaling
from loka.records import GEMMS, Choice, Gemm, Plan

__all__ = [
    "LinearOptions",
    "ModuleFilter",
    "Scaling",
    "Summary",
    "calibrating",
    "convert",
    "load_scale_state",
    "refresh",
    "revert",
    "scale_state",
]

ModuleFilter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Summary:
    """What a conversion did."""

    converted: dict[str, str]  # site -> what each GEMM now runs
    kept: dict[str, str]  # site -> why it stays in high precision
    low_precision_share: (
        float | None
    )  # of the GEMM FLOPs of a step; None where neither a plan nor an example gave the shapes
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
    options: LinearOptions | None = None,
    example: Any = None,
) -> Summary:
    """Convert in place: by a plan, or by one recipe at every linear that `module_filter_fn(module, name)` lets through.

    `options` say how the linears run beside their GEMMs (scales, saved activations, weight cache). `example` is an input of the model; with it the summary tells the
    share of the model's GEMM FLOPs that now runs in low precision.
    """
    if (plan is None) == (recipe is None):
        raise ValueError("convert takes a plan or a recipe, exactly one of them")
    inner = _unwrap(model)
    already = [name for name, _ in linears_of(inner)]
    if already:
        raise ValueError(f"already converted: {', '.join(already[:5])}; call loka.revert(model) first")
    chosen = options or LinearOptions()
    if plan is not None:
        if module_filter_fn is not None or backend != "auto":
            raise ValueError("a plan already says which modules and which backends; give neither beside it")
        if chosen.scales != "dynamic" or chosen.gradients is not None:
            raise ValueError("a plan already says how gradients and scales are kept; give neither beside it")
        bindings, kept = _bind_by_plan(inner, plan, chosen)
        share, of = plan.low_precision_share, plan.flops_of
    else:
        assert recipe is not None
        bindings, kept = _bind_by_recipe(inner, recipe, module_filter_fn, backend, chosen)
        share, of = None, None
    if example is not None:
        share, of = low_precision_share(inner, example, bindings), "model"
    _adopt(inner, bindings)
    close_fast_paths(inner)
    return Summary({name: str(binding) for name, binding in bindings.items()}, kept, share, of)


def _unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside DistributedDataParallel and torch.compile."""
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                "FSDP1 flattens parameters, which hides the weights; hint: torch.distributed.fsdp.fully_shard"
            )
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def _bind_by_plan(
    model: nn.Module, plan: Plan, options: LinearOptions
) -> tuple[dict[str, LinearBinding], dict[str, str]]:
    problems = check(plan, model)
    bindings: dict[str, LinearBinding] = {}
    kept: dict[str, str] = {}
    planned = {site.site: site for site in plan.sites}
    spoken_for = _spoken_for(model)
    for name, module in _candidates(model):
        site = planned.get(name)
        if site is None:
            kept[name] = "not in the plan"
        elif any(choice.quantized for choice in site.choices):
            if reason := spoken_for.get(name) or refuse(module):
                problems.append(f"{name}: {reason}")
                continue
            try:
                bindings[name] = options.apply(_binding({c.gemm: _bind(c) for c in site.choices}))
            except ValueError as error:
                problems.append(f"{name}: {error}")
        else:
            kept[name] = "; ".join(f"{c.gemm}: {c.reason}" for c in site.choices) or "no GEMM was seen"
    if problems:
        raise ValueError(f"the plan for {plan.model} does not fit this model:\n  " + "\n  ".join(problems))
    return bindings, kept


def _binding(bound: Mapping[Gemm, BoundGemm | None]) -> LinearBinding:
    return LinearBinding(bound.get("fprop"), bound.get("dgrad"), bound.get("wgrad"))


def _bind(choice: Choice) -> BoundGemm | None:
    if choice.a is None or choice.b is None:
        return None
    return BoundGemm(choice.backend, Operands.parse(choice.a, choice.b, fast_accum=choice.fast_accum))


def _bind_by_recipe(
    model: nn.Module, name: str, keep: ModuleFilter | None, backend: str, options: LinearOptions
) -> tuple[dict[str, LinearBinding], dict[str, str]]:
    recipe = recipe_named(name)
    bound = {g: BoundGemm(backend, o) if (o := recipe.operands(g)) is not None else None for g in GEMMS}
    binding = options.apply(_binding(bound))
    bindings: dict[str, LinearBinding] = {}
    kept: dict[str, str] = {}
    spoken_for = _spoken_for(model)
    for site, module in _candidates(model):
        if keep is not None and not keep(module, site):
            kept[site] = "module_filter_fn"
        elif reason := spoken_for.get(site) or _refuse_type(module) or refuse(module):
            kept[site] = reason
        else:
            bindings[site] = binding
    return bindings, kept


def _spoken_for(model: nn.Module) -> dict[str, str]:
    """Linears that something else has decided about: run by a fused tower, or marked by mods.protect_intermediates."""
    reasons = {n: "protected by a mod" for n, m in model.named_modules() if getattr(m, "loka_protected", False)}
    for tower_name, tower in model.named_modules():
        if isinstance(tower, FusedTower):
            prefix = f"{tower_name}." if tower_name else ""
            reasons |= {
                f"{prefix}{link.linear}": f"runs in FP8 inside the fused tower {tower_name}" for link in tower.links
            }
    return reasons


def _refuse_type(module: nn.Module) -> str | None:
    if isinstance(module, GroupedLinear):
        return "grouped GEMMs have no backward in low precision"
    if module.weight.dtype == torch.float64:
        return "float64 weights: no low-precision GEMM writes float64"
    return None


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Linear | GroupedLinear]]:
    """Every module a reader would expect to be converted, each once, under its first name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | GroupedLinear):
            yield name, module


def _adopt(model: nn.Module, bindings: Mapping[str, LinearBinding]) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    done: list[Linear] = []
    try:
        for name, binding in bindings.items():
            module = modules[name]
            assert isinstance(module, nn.Linear)
            done.append(Linear.adopt(module, binding, name))
    except Exception:
        for linear in done:  # all or nothing
            linear.release()
        raise


def revert(model: nn.Module) -> int:
    """Make every converted linear what it was; returns how many were converted."""
    inner = _unwrap(model)
    linears = [linear for _, linear in linears_of(inner)]
    for linear in linears:
        linear.release()
    open_fast_paths(inner)
    return len(linears)


def scale_state(model: nn.Module) -> dict[str, Tensor]:
    """What remembered scales need after a restart, as named tensors: `site/operand/part`. Empty where all scales are dynamic."""
    return {
        f"{name}/{role}/{part}": tensor
        for name, linear in linears_of(_unwrap(model))
        for role, amax in linear.state.amax_states.items()
        for part, tensor in amax.state().items()
    }


def load_scale_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put back what `scale_state` returned; refuses one of another conversion, naming the differences."""
    expected = scale_state(model)
    if problems := sorted(expected.keys() ^ state.keys()):
        where = [f"{name}: {'missing' if name in expected else 'unknown'}" for name in problems]
        raise ValueError(f"this scale state does not fit the model ({len(where)} differences): {'; '.join(where[:6])}")
    for name, linear in linears_of(_unwrap(model)):
        for role, amax in linear.state.amax_states.items():
            amax.load({part: state[f"{name}/{role}/{part}"] for part in amax.state()})


@contextmanager
def calibrating(model: nn.Module) -> Iterator[None]:
    """Batches run in this block set the static scales: the largest magnitude each site sees becomes its bound.

    A block that ends in an exception changes nothing: earlier scales stay as they were.
    """
    states = {
        name: linear.state.x
        for name, linear in linears_of(_unwrap(model))
        if linear.state.x is not None and any(spec.mode == "static" for spec in linear.binding.x_specs.values())
    }
    if not states:
        raise ValueError(
            "no converted linear has static scales; hint: convert(..., options=LinearOptions(scales='static'))"
        )
    before = {name: (state.static.clone(), state.calibrated) for name, state in states.items()}
    for state in states.values():
        state.static.zero_()
        state.calibrating = True
    try:
        yield
        for state in states.values():
            state.calibrated = bool(state.static > 0)
        if unseen := [name for name, state in states.items() if not state.calibrated]:
            raise ValueError(
                f"calibration saw no finite value other than zero at {', '.join(unseen[:6])}; run more batches"
            )
    except BaseException:  # half a calibration is none: the bounds of the last whole one stay, Ctrl-C included
        for name, state in states.items():
            static, state.calibrated = before[name]
            state.static.copy_(static)
        raise
    finally:
        for state in states.values():
            state.calibrating = False


class _CallableModule(ModuleType):
    """`loka.convert` is this module and, as everybody writes it, the function: importing one must not hide the other."""

    def __call__(self, *args: Any, **kwargs: Any) -> Summary:
        return convert(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
