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

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loka.dispatch import RECIPES, recipe_named
from loka.lowp.auto import ROWS, Pick, is_emulation, settle, spell_refusals
from loka.lowp.binding import BoundGemm, LinearBinding, LinearOptions
from loka.lowp.fast_path import close_fast_paths, open_fast_paths
from loka.lowp.linear import Linear, linears_of, refresh, refuse
from loka.lowp.scaling import Scaling
from loka.nn.grouped import GroupedLinear
from loka.nn.wrapping import unwrap
from loka.placing.flops import low_precision_share
from loka.placing.linears import Bound, bind_by_plan, candidates, spoken_for
from loka.records import GEMMS, Plan

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
    notes: tuple[str, ...] = ()  # what `auto` came to and who refused; what of the plan was not applied

    def __str__(self) -> str:
        total = len(self.converted) + len(self.kept)
        share = ""
        if self.low_precision_share is not None:
            of = "the model's" if self.flops_of == "model" else "the probed"
            share = f"; {self.low_precision_share:.1%} of {of} GEMM FLOPs in low precision"
        kept = "".join(f"\n  kept {name}: {why}" for name, why in self.kept.items())
        notes = "".join(f"\n  note: {note}" for note in self.notes)
        return f"{len(self.converted)} of {total} linears converted, {len(self.kept)} kept{share}{kept}{notes}"


def convert(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    recipe: str | None = None,
    module_filter_fn: ModuleFilter | None = None,
    backend: str | None = None,
    options: LinearOptions | None = None,
    example: Any = None,
) -> Summary:
    """Convert in place: by a plan, or by one recipe at every linear that `module_filter_fn(module, name)` lets through.

    `backend` runs the GEMMs of a recipe, `auto` where none is named. Beside a plan it replaces the plan's backends; without it they run as named, and a plan that names `reference`,
    which is emulation, is refused on a GPU (`loka.placing.linears`). `options` say how the linears run beside their GEMMs (scales, saved activations, weight cache). `example` is an input of the model; with it the summary tells the
    share of the model's GEMM FLOPs that now runs in low precision.
    """
    _check_request(model, plan, recipe, options)
    inner = unwrap(model)
    already = [name for name, _ in linears_of(inner)]
    if already:
        raise ValueError(f"already converted: {', '.join(already[:5])}; call loka.revert(model) first")
    chosen = options or LinearOptions()
    if plan is not None:
        if module_filter_fn is not None:
            raise ValueError("a plan already says which modules: give no module_filter_fn beside it")
        if chosen.scales != "dynamic" or chosen.gradients is not None:
            raise ValueError("a plan already says how gradients and scales are kept; give neither beside it")
        bound, of = bind_by_plan(inner, plan, backend, chosen), plan.flops_of
    else:
        assert recipe is not None
        bound, of = _bind_by_recipe(inner, recipe, module_filter_fn, backend or "auto", chosen), None
    share = bound.share
    if example is not None:
        share, of = low_precision_share(inner, example, bound.bindings), "model"
    _settle(inner, bound)
    _adopt(inner, bound.bindings)
    close_fast_paths(inner)
    converted = {name: str(binding) for name, binding in bound.bindings.items()}
    return Summary(converted, bound.kept, share, of, tuple(bound.notes))


def _check_request(model: Any, plan: Any, recipe: Any, options: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected an nn.Module, got {type(model).__name__}")
    if (plan is None) == (recipe is None):
        raise ValueError("convert takes a plan or a recipe, exactly one of them")
    if plan is not None and not isinstance(plan, Plan):
        hint = (
            f"recipe={plan!r}"
            if isinstance(plan, str) and plan in RECIPES
            else "loka.records.load(path, loka.records.Plan), or report.plan()"
        )
        raise ValueError(f"plan: expected a loka.records.Plan, got {type(plan).__name__} {str(plan)[:60]!r}; hint: {hint}")  # fmt: skip
    if options is not None and not isinstance(options, LinearOptions):
        raise ValueError(f"options: expected LinearOptions, got {type(options).__name__}; hint: loka.LinearOptions(scales='delayed')")  # fmt: skip


def _settle(model: nn.Module, bound: Bound) -> None:
    """Write down what `auto` comes to on the model's device, and who refused; emulation on a GPU is said aloud, asked for or not."""
    picked: dict[Pick, list[str]] = {}
    asked: list[str] = []
    for name, binding in bound.bindings.items():
        weight = model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        bound.bindings[name], picks = settle(binding, weight, bound.rows.get(name, ROWS))
        for pick in dict.fromkeys(picks):
            picked.setdefault(pick, []).append(name)
        if any(gemm is not None and is_emulation(gemm.backend, weight.device) for gemm in (binding.fprop, binding.dgrad, binding.wgrad)):  # fmt: skip
            asked.append(name)
    for pick, names in picked.items():
        refused = f"; refused: {spell_refusals(dict(pick.refusals))}" if pick.refusals else ""
        bound.notes.append(f"auto is {pick} in {len(names)} linears{refused}")
        if pick.emulated:
            warnings.warn(f"{', '.join(names)}: emulated on {pick.device}, no kernel can{refused}", stacklevel=3)
    if asked:
        warnings.warn(f"{', '.join(asked)}: emulated on the GPU, as backend='reference' asks: right, and slow", stacklevel=3)  # fmt: skip


def _bind_by_recipe(
    model: nn.Module, name: str, keep: ModuleFilter | None, backend: str, options: LinearOptions
) -> Bound:
    recipe = recipe_named(name)
    gemms = {g: BoundGemm(backend, o) if (o := recipe.operands(g)) is not None else None for g in GEMMS}
    binding = options.apply(LinearBinding(gemms.get("fprop"), gemms.get("dgrad"), gemms.get("wgrad")))
    bound, taken = Bound(), spoken_for(model)
    for site, module in candidates(model):
        if keep is not None and not keep(module, site):
            bound.kept[site] = "module_filter_fn"
        elif reason := taken.get(site) or _refuse_type(module) or refuse(module):
            bound.kept[site] = reason
        else:
            bound.bindings[site] = binding
    return bound


def _refuse_type(module: nn.Module) -> str | None:
    if isinstance(module, GroupedLinear):
        return "grouped GEMMs have no backward in low precision"
    if module.weight.dtype == torch.float64:
        return "float64 weights: no low-precision GEMM writes float64"
    return None


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
    inner = unwrap(model)
    linears = [linear for _, linear in linears_of(inner)]
    for linear in linears:
        linear.release()
    open_fast_paths(inner)
    return len(linears)


def scale_state(model: nn.Module) -> dict[str, Tensor]:
    """What remembered scales need after a restart, as named tensors: `site/operand/part`. Empty where all scales are dynamic."""
    return {
        f"{name}/{role}/{part}": tensor
        for name, linear in linears_of(unwrap(model))
        for role, amax in linear.state.amax_states.items()
        for part, tensor in amax.state().items()
    }


def load_scale_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put back what `scale_state` returned; refuses one of another conversion, naming the differences."""
    expected = scale_state(model)
    if problems := sorted(expected.keys() ^ state.keys()):
        where = [f"{name}: {'missing' if name in expected else 'unknown'}" for name in problems]
        hint = "hint: where a Guard switched sites, guard.load_state_dict(...) comes first"
        raise ValueError(f"this scale state does not fit the model ({len(where)} differences): {'; '.join(where[:6])}; {hint}")  # fmt: skip
    for name, linear in linears_of(unwrap(model)):
        for role, amax in linear.state.amax_states.items():
            amax.load({part: state[f"{name}/{role}/{part}"] for part in amax.state()})


@contextmanager
def calibrating(model: nn.Module) -> Iterator[None]:
    """Batches run in this block set the static scales: the largest magnitude each site sees becomes its bound.

    A block that ends in an exception changes nothing: earlier scales stay as they were.
    """
    states = {
        name: linear.state.x
        for name, linear in linears_of(unwrap(model))
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
