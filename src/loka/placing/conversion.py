"""Convert a model to low precision in place, and revert it.

    done = loka.convert(model, plan)                     apply the plan's mods, chains and linears
    done = loka.convert(model, plan, freeze=True)        for serving: weights quantized once, no gradients
    done = loka.convert(model, recipe="tensorwise")      one recipe for every linear
    loka.revert(model)                                   restore the original modules; trained values are kept

Converted modules change their class and keep their identity. Optimizers, tied weights and references held elsewhere
stay valid, and the state_dict does not change. A model can be converted before or after DistributedDataParallel,
fully_shard (FSDP2), torch.compile or TorchRec's DistributedModelParallel wraps it. FSDP1 is not supported.

A plan that does not fit the model is rejected before anything is changed, and the error names every mismatch. Linears
that the plan does not mention, or keeps entirely in high precision, are left alone. So are linears that a recipe cannot
convert (subclasses with their own forward, parametrized weights); the returned record says why.

Scales remembered between steps are not part of the state_dict: save them with `loka.placing.scales`.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
from loka.records.prose import name_some
from loka.units import place, place_tables, placed_tables, refuse_tables, release_tables
from loka.units.example import NotCalledError, call_model, capture_example
from loka.units.undisturbed import undisturbed

ModuleFilter = Callable[[nn.Module, str], bool]
_THAWED = "_loka_thawed"  # attribute of a frozen model: training modes and requires_grad flags from before the freeze
_MODS = "_loka_converted_with"  # attribute of a converted model: the mods its plan applied, and the effect of each
# A package above this one, so it is imported by name, and only for a plan with collectives.
_COLLECTIVES = "loka.comms.placement"


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
    """Convert a model to low precision in place, by a plan or by one recipe for all linears.

    Args:
        model: any nn.Module, wrapped or not.
        plan: what to run where, from `report.plan()`, `loka.tune` or `loka.Plan.load`. It is applied completely or not
            at all.
        recipe: instead of a plan, one recipe for all linears: tensorwise, rowwise, rowwise_with_gw_hp or blockwise.
        freeze: prepare the model for serving: eval mode, no gradients, weights quantized once. Chains must have scales;
            a plan made from measurements contains them.
        module_filter_fn: with a recipe, convert only the linears for which `module_filter_fn(module, name)` is true.
        backend: the GEMM backend. Defaults to `auto` with a recipe, and to the backends the plan names with a plan. A
            plan that names `reference`, which is emulation, is rejected on a GPU unless a backend is given.
        options: settings of individual linears other than their GEMMs: scales, saved activations, weight cache.
        example: an input of the model (a tuple is *args, a dict **kwargs). The plan is tried on it, mods may trace it,
            and the low-precision share of the model's GEMM FLOPs is counted. With `freeze`, it also lets chains that
            read the same tensor share one quantized copy. Without it, a plan made for a different architecture with
            the same names and shapes is only detected by the first forward, which raises.

    Returns:
        The record of what runs where, what was kept in high precision, and why.

    Raises:
        ValueError: the plan does not fit this model or device. The message has every reason; nothing was changed.

    Example:
        >>> print(loka.convert(model, loka.Plan.load("plan.json")))
        12 of 13 linears converted (9 in 3 chains), 1 kept; 96.1% of the model's GEMM FLOPs in low precision
    """
    _check_request(model, plan, recipe, options)
    inner = unwrap(model)
    already = [*(name for name, _ in (*linears_of(inner), *chains_of(inner))), *placed_tables(inner)]
    if already:
        raise ValueError(f"already converted: {name_some(already)}; call loka.revert(model) first")
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
            (share, idle), of = low_precision_share(inner, example, bound.bindings, members), "model"
            if idle:
                bound.notes.append(
                    "not called on the example, so not counted; where a forward reads such a weight itself, as in "
                    f"F.linear, nothing runs in low precision: {', '.join(idle)}"
                )
        _place(inner, bound, units, undo)
        if example is not None and units:
            _rehearse(inner, example)
        if freeze:
            undo.callback(_thaw, inner)
            freeze_model(inner)
            if example is None and could_share(inner):
                bound.notes.append(
                    "chains that read the same tensor each quantize it: finding them takes an example; hint: "
                    "convert(..., example=batch)"
                )
        undo.pop_all()
    if applied:
        inner.__dict__[_MODS] = applied
    converted = {name: str(binding) for name, binding in bound.bindings.items()}
    converted |= {name: f"in chain {unit.name}: {unit.scales} scales" for unit in units for name in unit.linears}
    if tables:
        bound.notes.append(f"{', '.join(tables)}: trained by loka.nn.table_optimizer.TableOptimizer; create optimizers after this call")  # fmt: skip
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


def _place_tables(model: nn.Module, plan: Plan, undo: ExitStack) -> list[str]:
    """Replace the plan's tables, all or none, and return the names of those that were replaced."""
    if problems := refuse_tables(model, plan.tables):
        raise ValueError("the plan's tables do not fit this model:\n  " + "\n  ".join(problems))
    undo.callback(release_tables, model)
    return place_tables(model, plan.tables) if plan.tables else []


def _check_plan_options(keep: ModuleFilter | None, options: LinearOptions) -> None:
    if keep is not None:
        raise ValueError("module_filter_fn cannot be combined with a plan: the plan says which modules are converted")
    if options.scales != "dynamic" or options.gradients is not None:
        raise ValueError("options.scales and options.gradients cannot be combined with a plan, which sets both")


def _apply_mods(model: nn.Module, spelled: Sequence[str], example: Any, undo: ExitStack) -> list[tuple[str, str]]:
    """Apply the plan's mods. Return each with its strongest effect: "architecture" or "rounding"."""
    if present := mods.applied_to(model):
        if list(present) == list(spelled):
            return []
        raise ValueError(
            f"the plan applies {', '.join(spelled)}, and the model has {', '.join(present)} already; hint: "
            "loka.mods.revert(model) first"
        )
    undo.callback(mods.revert, model)
    if callable(example):  # a function that runs the model; mods need the arguments of a call
        run, example = example, None
        with undisturbed(model), suppress(NotCalledError):  # it may call only parts of the model
            example = capture_example(model, run, stop=True)
    done = mods.apply(model, [mods.parse(text) for text in spelled], example=example)
    effects = {text: [c.effect for c in done.summary.changed if text.startswith(c.mod)] for text in spelled}
    return [(text, "architecture" if "architecture" in found else "rounding") for text, found in effects.items()]


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


def _compare_places(plan: Plan, model: nn.Module) -> list[str]:
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


def _place(model: nn.Module, bound: Bound, units: Sequence[UnitPlan], undo: ExitStack) -> None:
    """Place the units and the bound linears in the model."""
    _settle(model, bound)
    undo.callback(_release, model)
    for unit in units:
        chain = place(model, unit)
        if not (chain.primed and (chain.gradients_primed or unit.scales == "calibrated")):
            bound.notes.append(
                f"{unit.name}: no magnitudes in the plan: the first step, or the calibration, finds scales from the "
                "tensors, then it runs as planned"
            )
        for name in unit.linears:
            bound.kept.pop(name, None)
    _adopt(model, bound.bindings)
    close_fast_paths(model)


def _rehearse(model: nn.Module, example: Any) -> None:
    """Run the example once. Functional activations and ops between two linears only show up in a forward."""
    with undisturbed(model), torch.no_grad(), noting_inputs(model):
        model.eval()
        try:
            example() if callable(example) else call_model(model, tuple(example) if isinstance(example, list) else example)  # fmt: skip
        except AnotherPathError as error:
            raise ValueError(f"the plan's units do not fit this model:\n  {error}") from error


def freeze_model(model: nn.Module, *, offload: bool = False) -> int:
    """Prepare a converted model for serving, in place: eval mode, no gradients, weights quantized once.

    Args:
        model: a converted model, wrapped or not. Its chains must have scales: from a plan made from measurements, from
            training, or from `calibrating`.
        offload: move the 16-bit weights of chains, which serving does not need, to the host.

    Returns:
        The number of linears that run on quantized weights.

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
    """Restore training modes and requires_grad from before `freeze_model`: without it the model would not train."""
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
    """Resolve `auto` to a backend for the model's device and note which ones refused. Warn of emulation on a GPU."""
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
        bound.notes.append(f"auto is {pick} for {len(names)} linear{'s' * (len(names) > 1)}{refused}")
        if pick.emulated:
            warnings.warn(f"{', '.join(names)}: emulated on {pick.device}, no kernel can{refused}", stacklevel=3)
    if asked:
        warnings.warn(f"{', '.join(asked)}: emulated on the GPU, as backend='reference' asks: correct, but slow", stacklevel=3)  # fmt: skip


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
            bound.kept[site] = "excluded by module_filter_fn"
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
    """Undo a conversion: restore the original modules, keys and Parameter objects, which keep their trained values.

    Tables that the plan stored in fewer bits come back with their rounded rows.

    Args:
        model: a converted model, wrapped or not.
        discard: names of architecture mods applied by the plan. Reverting loses what was trained in them, so each
            must be named here.

    Returns:
        The number of linears that were converted.

    Raises:
        ValueError: the plan applied mods that change the architecture, and `discard` does not name them; or modules
            hold only FP8 weights, from which the originals cannot be restored. Nothing was changed.

    Example:
        >>> loka.revert(model)
        12
    """
    inner = unwrap(model)
    if packed := [name for name, module in inner.named_modules() if getattr(module, PACKED, False)]:
        raise ValueError(
            f"{name_some(packed)}: loka.quantize kept only FP8 weights, "
            "the originals are gone; hint: load the original model again; loka.convert(..., freeze=True) can be "
            "reverted"
        )
    applied: list[tuple[str, str]] = inner.__dict__.get(_MODS, [])
    lost = [name for name, effect in applied if effect == "architecture" and name.partition("(")[0] not in discard]
    if lost:
        raise ValueError(
            f"the plan changed the architecture by {', '.join(lost)}: reverting loses what was trained in it; hint: "
            f"loka.revert(model, discard={[n.partition('(')[0] for n in lost]!r})"
        )
    count = _release(inner)
    release_tables(inner)
    if (room := sys.modules.get(_COLLECTIVES)) is not None:
        room.release(model)
    _thaw(inner)
    if inner.__dict__.pop(_MODS, None):
        mods.revert(inner)
    return count


@contextmanager
def converted(model: nn.Module, plan: Plan) -> Iterator[Conversion]:
    """Convert a model by a plan inside the block, and undo that afterwards, but nothing that an earlier call has done.

    Args:
        model: a model without converted linears. An earlier call may have applied mods to it or frozen it.
        plan: what to run where.

    Returns:
        A context manager that yields the conversion.

    Example:
        >>> with loka.placing.converted(model, plan):
        ...     model(batch)
    """
    inner = unwrap(model)
    earlier = {name: inner.__dict__.pop(name) for name in (_MODS, _THAWED) if name in inner.__dict__}
    try:
        done = convert(model, plan)
        try:
            yield done
        finally:
            revert(model)
    finally:
        inner.__dict__.update(earlier)


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
