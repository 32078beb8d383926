"""Convert: a plan in, the same model in low precision out; whole, in place, and back again.

    done = loka.convert(model, plan)                          what the plan says: its mods, its chains, its linears
    done = loka.convert(model, plan, freeze=True)             for serving: weights quantised once, no gradients
    done = loka.convert(model, recipe="tensorwise")           one recipe at every linear
    loka.revert(model)                                        the original modules, keys and parameters, with what was trained

Modules are converted in place: they change their class and keep their identity. Optimizers, tied weights and references held elsewhere stay valid, a state_dict does not change, and a model can
be converted before or after DistributedDataParallel, fully_shard (FSDP2), torch.compile and TorchRec's DistributedModelParallel wrap it. FSDP1 is refused.

A plan that does not fit the model is refused before anything is changed, and the refusal names every mismatch. Linears the plan does not mention, or keeps in high precision
throughout, are left alone; so are those a recipe meets and cannot convert (subclasses with a forward of their own, parametrised weights), and the record says why.

Scales that are remembered between steps are no part of a state_dict: `loka.placing.scales` keeps them.
"""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from loka import mods
from loka.dispatch import RECIPES, recipe_named
from loka.kernels.registry import BACKENDS
from loka.lowp.auto import ROWS, Pick, is_emulation, settle, spell_refusals
from loka.lowp.binding import LinearBinding, LinearOptions
from loka.lowp.chain import chains_of
from loka.lowp.chain_handing import AnotherPathError
from loka.lowp.fast_path import close_fast_paths, open_fast_paths
from loka.lowp.folding import PACKED
from loka.lowp.interaction import interactions_of, release_interaction
from loka.lowp.linear import Linear, linears_of, refresh, refuse
from loka.lowp.shared_inputs import could_share, noting_inputs, share_inputs, unshare_inputs
from loka.measure.device import device_of, environment_of, name_device
from loka.nn.grouped import GroupedLinear
from loka.nn.wrapping import named_sites, unwrap
from loka.placing.flops import low_precision_share
from loka.placing.linears import Bound, bind_by_plan, candidates, spoken_for
from loka.records import Conversion, KernelBucket, Plan, UnitPlan
from loka.units import place, place_tables, placed_tables, refuse_tables, refuse_unit, release_tables
from loka.units.example import call_model
from loka.units.undisturbed import undisturbed

ModuleFilter = Callable[[nn.Module, str], bool]
_THAWED = "_loka_thawed"  # on a frozen model: modes and needs of gradients from before
_MODS = "_loka_converted_with"  # on a model: the mods its plan applied, with the effect of each
_COLLECTIVES = "loka.comms.placement"  # a room above this one, found by its name: only a plan with collectives needs it


def convert(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    recipe: str | None = None,
    freeze: bool = False,
    module_filter_fn: ModuleFilter | None = None,
    backend: str | None = None,
    options: LinearOptions | None = None,
    example: Any = None,
) -> Conversion:
    """Convert a model in place: by a plan, or by one recipe at every linear that `module_filter_fn(module, name)` lets through.

    Args:
        model: any nn.Module, wrapped or not.
        plan: what to run where, from `report.plan()`, `loka.tune` or `loka.Plan.load`. All of it is placed, or nothing.
        recipe: without a plan, the one recipe to run everywhere: tensorwise, rowwise, rowwise_with_gw_hp, blockwise.
        freeze: make it a serving model: eval mode, weights quantised once; a chain needs its scales, which a plan from evidence has.
        module_filter_fn: with a recipe, which linears.
        backend: runs the GEMMs of a recipe, `auto` where none is named. Beside a plan it replaces the plan's backends; without it they run as named, and a plan that names
            `reference`, which is emulation, is refused on a GPU.
        options: how single linears run beside their GEMMs: scales, saved activations, weight cache.
        example: an input of the model (a tuple is *args, a dict **kwargs): the plan is tried on it, mods see it run, and the share of the model's GEMM FLOPs that runs in low
            precision is counted; in a serving model, what several chains read is quantised once. Without one, a plan for another architecture whose names and shapes fit shows in the first forward, which raises.

    Returns:
        The record of what runs where, what was kept, and why.

    Raises:
        ValueError: the plan does not fit this model or this device; the message has every reason, and nothing was changed.

    Example:
        >>> print(loka.convert(model, loka.Plan.load("plan.json")))
        12 of 13 linears converted (9 in 3 chains), 1 kept; 96.1% of the model's GEMM FLOPs in low precision
    """
    _check_request(model, plan, recipe, options)
    inner = unwrap(model)
    already = [*(name for name, _ in (*linears_of(inner), *chains_of(inner))), *placed_tables(inner)]
    if already:
        raise ValueError(f"already converted: {', '.join(already[:5])}; call loka.revert(model) first")
    chosen = options or LinearOptions()
    if plan is not None:
        _check_plan_options(module_filter_fn, chosen)
    with ExitStack() as undo:
        applied = [] if plan is None or not plan.mods else _apply_mods(inner, plan.mods, example, undo)
        if plan is not None:
            _check_level(inner, plan)
            bound, of = bind_by_plan(inner, plan, backend, chosen), plan.flops_of
            units = fit_units(plan.units, backend)
            bound.notes += _compare_places(plan, inner)
        else:
            assert recipe is not None
            bound, of = _bind_by_recipe(inner, recipe, module_filter_fn, backend or "auto", chosen), None
            units = []
        share = bound.share
        tables = [] if plan is None else _place_tables(inner, plan, undo)
        if plan is not None and plan.collectives:
            room: Any = import_module(_COLLECTIVES)
            undo.callback(room.release, model)
            bound.notes += room.place(model, plan.collectives)
        if example is not None:
            members = {name for unit in units for name in unit.linears}
            share, of = low_precision_share(inner, example, bound.bindings, members), "model"
        _place(inner, bound, units, undo)
        if example is not None and units:
            _rehearse(inner, example)
        if freeze:
            undo.callback(_thaw, inner)
            freeze_model(inner)
            if example is None and could_share(inner):
                bound.notes.append("chains may read one tensor, and each quantises it for itself: which ones do, an example shows; hint: convert(..., example=batch)")  # fmt: skip
        undo.pop_all()
    if applied:
        inner.__dict__[_MODS] = applied
    converted = {name: str(binding) for name, binding in bound.bindings.items()}
    converted |= {name: f"in chain {unit.name}: {unit.scales} scales" for unit in units for name in unit.linears}
    if tables:
        bound.notes.append(f"{', '.join(tables)}: trained by loka.nn.table_optimizer.TableOptimizer; make optimisers after this call")  # fmt: skip
    return Conversion(
        model=type(inner).__name__,
        converted=converted,
        kept=bound.kept,
        units=units,
        mods=[mod for mod, _ in applied],
        frozen=freeze,
        low_precision_share=share,
        flops_of=of,
        notes=list(bound.notes),
        plan=None if plan is None or plan.seal is None else plan.seal.sha256,
        environment=environment_of(inner),
    )


def _check_level(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that was made for a part of this model, or for something that holds it, and say so."""
    names = [name for unit in plan.units for name in unit.linears]
    names += [site.site for site in plan.sites if any(choice.quantized for choice in site.choices)]
    modules = dict(named_sites(model))
    if not names or any(name in modules for name in names):
        return
    for prefix in modules:
        if all(f"{prefix}.{name}" in modules for name in names):
            raise ValueError(f"the plan is for a part of this model: it names {names[0]}, which is {prefix}.{names[0]} here; hint: loka.convert(model.get_submodule({prefix!r}), plan)")  # fmt: skip
    prefix, _, rest = names[0].partition(".")
    if all(name.startswith(f"{prefix}.") and name.removeprefix(f"{prefix}.") in modules for name in names):
        raise ValueError(f"the plan is for a model that holds this one as {prefix}: it names {names[0]}, which is {rest} here; hint: loka.convert what holds it")  # fmt: skip


def _place_tables(model: nn.Module, plan: Plan, undo: ExitStack) -> list[str]:
    """The plan's tables, all of them or none; the names of those that were swapped."""
    if problems := refuse_tables(model, plan.tables):
        raise ValueError("the plan's tables do not fit this model:\n  " + "\n  ".join(problems))
    undo.callback(release_tables, model)
    return place_tables(model, plan.tables) if plan.tables else []


def _check_plan_options(keep: ModuleFilter | None, options: LinearOptions) -> None:
    if keep is not None:
        raise ValueError("a plan already says which modules: give no module_filter_fn beside it")
    if options.scales != "dynamic" or options.gradients is not None:
        raise ValueError("a plan already says how gradients and scales are kept; give neither beside it")


def _apply_mods(model: nn.Module, spelled: Sequence[str], example: Any, undo: ExitStack) -> list[tuple[str, str]]:
    """The plan's mods; every name with the strongest thing it did to the function."""
    if present := mods.applied_to(model):
        if list(present) == list(spelled):
            return []
        raise ValueError(f"the plan applies {', '.join(spelled)}, and the model has {', '.join(present)} already; hint: loka.mods.revert(model) first")  # fmt: skip
    undo.callback(mods.revert, model)
    done = mods.apply(model, [mods.parse(text) for text in spelled], example=example)
    effects = {text: [c.effect for c in done.summary.changed if text.startswith(c.mod)] for text in spelled}
    return [(text, "architecture" if "architecture" in found else "rounding") for text, found in effects.items()]


def fit_units(units: Sequence[UnitPlan], backend: str | None) -> list[UnitPlan]:
    """The units as they will run: on the backend that is asked for beside the plan, otherwise on the plan's."""
    if backend is None:
        return list(units)
    ops = [op for op in ("fused_linear", "scaled_mm", "quantize") if backend in BACKENDS[op]]
    if units and not ops and backend != "auto":
        known = sorted({name for op in ("fused_linear", "scaled_mm", "quantize") for name in BACKENDS[op]})
        raise ValueError(f"the kernels of a chain have no backend {backend!r}; backends are auto, {', '.join(known)}")
    kernels = [KernelBucket(rows=2**31, kernels=dict.fromkeys(ops, backend))] if ops else []  # none: auto
    return [msgspec.structs.replace(unit, kernels=kernels) for unit in units]


def _compare_places(plan: Plan, model: nn.Module) -> list[str]:
    """What differs from where the plan was made; a speed measured there says nothing here."""
    here, there = name_device(device_of(model)), plan.environment
    notes = []
    if plan.target is not None and plan.units and here != plan.target:
        notes.append(f"the plan's speeds are of {plan.target}; this is {here}: measure again")
    if torch.__version__.split("+")[0] != there.torch.split("+")[0] and plan.units:
        notes.append(f"the plan was made with torch {there.torch}; this is {torch.__version__}: its speeds may differ")
    fast = [site.site for site in plan.sites if any(c.gemm == "wgrad" and c.fast_accum for c in site.choices)]
    if fast:  # what a plan says is run; recipes have not said this since
        notes.append(
            f"the plan adds the weight gradients of {', '.join(fast[:4])}{f' and {len(fast) - 4} more' * (len(fast) > 4)} in the tensor cores, with about 14 bits: "
            "over a large batch that may cost quality that no look at a few rows shows; hint: make the plan again"
        )
    return notes


def _place(model: nn.Module, bound: Bound, units: Sequence[UnitPlan], undo: ExitStack) -> None:
    """All of it, or nothing."""
    if problems := [problem for unit in units for problem in refuse_unit(model, unit)]:
        raise ValueError("the plan's units do not fit this model:\n  " + "\n  ".join(dict.fromkeys(problems)))
    _settle(model, bound)
    undo.callback(_release, model)
    for unit in units:
        chain = place(model, unit)
        if not (chain.primed and (chain.gradients_primed or unit.scales == "calibrated")):
            bound.notes.append(f"{unit.name}: no magnitudes in the plan: the first step, or the calibration, finds scales from the tensors, then it runs as planned")  # fmt: skip
        for name in unit.linears:
            bound.kept.pop(name, None)
    _adopt(model, bound.bindings)
    close_fast_paths(model)


def _rehearse(model: nn.Module, example: Any) -> None:
    """Run the example once: a forward shows activations that it calls as functions, and what stands between two linears, which names alone do not."""
    with undisturbed(model), torch.no_grad(), noting_inputs(model):
        model.eval()
        try:
            example() if callable(example) else call_model(model, tuple(example) if isinstance(example, list) else example)  # fmt: skip
        except AnotherPathError as error:
            raise ValueError(f"the plan's units do not fit this model:\n  {error}") from error


def freeze_model(model: nn.Module, *, offload: bool = False) -> int:
    """Make a converted model a serving model, in place: eval mode, no gradients, weights quantised once.

    Args:
        model: converted, wrapped or not; chains know their scales (from a plan with evidence, from training, or from `calibrating`).
        offload: move the 16-bit weights of chains to the host, which serving does not need.

    Returns:
        How many linears run on quantised weights.

    Raises:
        ValueError: a chain has no scales yet.

    Example:
        >>> loka.placing.freeze_model(model)
        12
    """
    inner = unwrap(model)
    chains = [chain for _, chain in chains_of(inner)]
    if unknown := [chain.name for chain in chains if not chain.primed]:
        raise ValueError(f"no scales are known for {', '.join(unknown)}; hint: with loka.placing.calibrating(model): model(batch)")  # fmt: skip
    if _THAWED not in inner.__dict__:
        modes = {name: module.training for name, module in inner.named_modules()}
        inner.__dict__[_THAWED] = (modes, {name: p.requires_grad for name, p in inner.named_parameters()})
    inner.eval().requires_grad_(False)
    for chain in chains:
        chain.freeze(offload=offload)
    share_inputs(inner)
    return refresh(inner)


def _thaw(model: nn.Module) -> None:
    """Modes and needs of gradients from before `freeze_model`; without them a model that is reverted would not train and not say so."""
    modes, needs = model.__dict__.pop(_THAWED, ({}, {}))
    for name, module in model.named_modules():
        module.training = modes.get(name, module.training)
    for name, p in model.named_parameters():
        if name in needs:
            p.requires_grad_(needs[name])


def _check_request(model: Any, plan: Any, recipe: Any, options: Any) -> None:
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
        raise ValueError(f"plan: expected a loka.records.Plan, got {type(plan).__name__} {str(plan)[:60]!r}; hint: {hint}")  # fmt: skip
    if options is not None and not isinstance(options, LinearOptions):
        raise ValueError(f"options: expected LinearOptions, got {type(options).__name__}; hint: loka.LinearOptions(scales='delayed')")  # fmt: skip


def _settle(model: nn.Module, bound: Bound) -> None:
    """Write down what `auto` comes to on the model's device, and who refused; emulation on a GPU is said aloud, asked for or not."""
    picked: dict[Pick, list[str]] = {}
    asked: list[str] = []
    modules = dict(named_sites(model))
    for name, binding in bound.bindings.items():
        weight = modules[name].weight
        assert isinstance(weight, Tensor)
        bound.bindings[name], picks = settle(binding, weight, bound.rows.get(name, ROWS))
        for pick in dict.fromkeys(picks):
            picked.setdefault(pick, []).append(name)
        if any(gemm is not None and is_emulation(gemm.backend, weight.device) for gemm in (binding.fprop, binding.dgrad, binding.wgrad)):  # fmt: skip
            asked.append(name)
    for pick, names in picked.items():
        refused = f"; refused: {spell_refusals(dict(pick.refusals))}" if pick.refusals else ""
        bound.notes.append(f"auto is {pick} in {len(names)} linear{'s' * (len(names) > 1)}{refused}")
        if pick.emulated:
            warnings.warn(f"{', '.join(names)}: emulated on {pick.device}, no kernel can{refused}", stacklevel=3)
    if asked:
        warnings.warn(f"{', '.join(asked)}: emulated on the GPU, as backend='reference' asks: right, and slow", stacklevel=3)  # fmt: skip


def _bind_by_recipe(
    model: nn.Module, name: str, keep: ModuleFilter | None, backend: str, options: LinearOptions
) -> Bound:
    recipe = recipe_named(name)
    named = (recipe.fprop, recipe.dgrad, recipe.wgrad)
    fprop, dgrad, wgrad = (None if way is None else way.on(backend) for way in named)
    binding = options.apply(LinearBinding(fprop, dgrad, wgrad))
    bound, taken = Bound(), spoken_for(model)
    for site, module in candidates(model):
        if keep is not None and not keep(module, site):
            bound.kept[site] = "module_filter_fn"
        elif isinstance(module, GroupedLinear):
            bound.kept[site] = "grouped GEMMs have no backward in low precision"
        elif reason := taken.get(site) or refuse(module):
            bound.kept[site] = reason
        else:
            bound.bindings[site] = binding
    return bound


def _adopt(model: nn.Module, bindings: Mapping[str, LinearBinding]) -> None:
    modules = dict(named_sites(model))
    for name, binding in bindings.items():
        module = modules[name]
        assert isinstance(module, nn.Linear)
        Linear.adopt(module, binding, name)


def revert(model: nn.Module, *, discard: Sequence[str] = ()) -> int:
    """Take a conversion back: the original modules, keys and Parameter objects, with what was trained. Tables that a plan keeps in fewer bits give back the rounded rows.

    Args:
        model: converted, wrapped or not.
        discard: names of architecture mods that the plan applied and that are given up with what they learned; without their names such a model is not reverted.

    Returns:
        How many linears were converted.

    Raises:
        ValueError: the plan applied mods that change the architecture, and `discard` does not name them; or modules hold FP8 weights alone, from which no original can be made.
            Nothing was changed.

    Example:
        >>> loka.revert(model)
        12
    """
    inner = unwrap(model)
    if packed := [name for name, module in inner.named_modules() if getattr(module, PACKED, False)]:
        raise ValueError(f"{', '.join(packed[:5])}{' and others' if len(packed) > 5 else ''}: loka.quantize kept FP8 weights alone, the original ones are gone; hint: load the original again; loka.convert(..., freeze=True) serves and can be reverted")  # fmt: skip
    applied: list[tuple[str, str]] = inner.__dict__.get(_MODS, [])
    lost = [name for name, effect in applied if effect == "architecture" and name.partition("(")[0] not in discard]
    if lost:
        raise ValueError(f"the plan changed the architecture by {', '.join(lost)}: the original cannot have what was trained in it; hint: loka.revert(model, discard={[n.partition('(')[0] for n in lost]!r})")  # fmt: skip
    count = _release(inner)
    release_tables(inner)
    if (room := sys.modules.get(_COLLECTIVES)) is not None:
        room.release(model)
    _thaw(inner)
    if inner.__dict__.pop(_MODS, None):
        mods.revert(inner)
    return count


def _release(model: nn.Module) -> int:
    for _, layer in list(interactions_of(model)):
        release_interaction(layer)
    linears, chains = [linear for _, linear in linears_of(model)], [chain for _, chain in chains_of(model)]
    unshare_inputs(model)
    for linear in linears:
        linear.release()
    for chain in chains:
        chain.release()
    open_fast_paths(model)
    return len(linears) + sum(len(chain.links) for chain in chains)
