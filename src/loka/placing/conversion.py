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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from loka import mods
from loka.lowp.auto import ROWS, Pick, is_emulation, settle, spell_refusals
from loka.lowp.binding import LinearBinding, LinearOptions
from loka.lowp.chain import chains_of
from loka.lowp.chain_handing import AnotherPathError
from loka.lowp.chain_modules import remaining_chains
from loka.lowp.fast_path import close_fast_paths, open_fast_paths
from loka.lowp.folding import PACKED
from loka.lowp.interaction import interactions_of, release_interaction
from loka.lowp.linear import Linear, linears_of, refresh
from loka.lowp.shared_inputs import could_share, noting_inputs, share_inputs, unshare_inputs
from loka.measure.device import environment_of
from loka.nn.wrapping import named_sites, unwrap
from loka.placing.checking import check_level, check_request, check_unconverted, compare_places
from loka.placing.flops import low_precision_share
from loka.placing.linears import Bound, ModuleFilter, bind_by_plan, bind_by_recipe
from loka.records import Conversion, Plan
from loka.records.prose import name_some
from loka.units import place, place_tables, refuse_tables, release_tables
from loka.units.example import NotCalledError, call_model, capture_example
from loka.units.undisturbed import sparing_weights, undisturbed

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
    check_request(model, plan, recipe, options, module_filter_fn)
    inner, chosen = unwrap(model), options or LinearOptions()
    check_unconverted(inner)
    with ExitStack() as undo:
        applied, tables = list[tuple[str, str]](), list[str]()
        if plan is not None:
            applied = _apply_mods(inner, plan.mods, example, undo) if plan.mods else []
            check_level(inner, plan)
            bound = bind_by_plan(inner, plan, backend, chosen)
            bound.notes += compare_places(plan, inner)
            tables = _place_tables(inner, plan, undo)
            bound.notes += _place_collectives(model, plan, undo)
        else:
            assert recipe is not None
            bound = bind_by_recipe(inner, recipe, module_filter_fn, backend or "auto", chosen)
        if example is not None:
            _count_share(inner, example, bound)
        _place(inner, bound, undo)
        if example is not None and bound.units:
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
    if tables:
        bound.notes.append(
            f"{', '.join(tables)}: trained by loka.nn.table_optimizer.TableOptimizer; create optimizers after this call"
        )
    chained = {name: unit for unit in bound.units for name in unit.linears}
    return Conversion(
        model=type(inner).__name__,
        converted={name: str(binding) for name, binding in bound.bindings.items()}
        | {name: f"in chain {unit.name}: {unit.scales} scales" for name, unit in chained.items()},
        kept=bound.kept,
        units=bound.units,
        mods=[mod for mod, _ in applied],
        frozen=freeze,
        low_precision_share=bound.share,
        flops_of=bound.flops_of,
        notes=bound.notes,
        plan=None if plan is None or plan.seal is None else plan.seal.sha256,
        environment=environment_of(inner),
    )


def _place_collectives(model: nn.Module, plan: Plan, undo: ExitStack) -> list[str]:
    """Place the plan's codecs, if it has any, and return notes about them."""
    if not plan.collectives:
        return []
    room: Any = import_module(_COLLECTIVES)
    undo.callback(room.release, model)
    return list(room.place(model, plan.collectives))


def _count_share(model: nn.Module, example: Any, bound: Bound) -> None:
    """Count the low-precision share of the model's GEMM FLOPs on an example, and note what the example does not call."""
    chained = {name for unit in bound.units for name in unit.linears}
    bound.share, idle = low_precision_share(model, example, bound.bindings, chained)
    bound.flops_of = "model"
    if idle:
        bound.notes.append(
            "not called on the example, so not counted; where a forward reads such a weight itself, as in "
            f"F.linear, nothing runs in low precision: {', '.join(idle)}"
        )


def _place_tables(model: nn.Module, plan: Plan, undo: ExitStack) -> list[str]:
    """Replace the plan's tables, all or none, and return the names of those that were replaced."""
    if problems := refuse_tables(model, plan.tables):
        raise ValueError("the plan's tables do not fit this model:\n  " + "\n  ".join(problems))
    undo.callback(release_tables, model)
    return place_tables(model, plan.tables) if plan.tables else []


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
        with (
            undisturbed(model),
            sparing_weights(model),
            suppress(NotCalledError),
        ):  # it may call only parts of the model
            example = capture_example(model, run, stop=True)
    done = mods.apply(model, [mods.parse(text) for text in spelled], example=example)
    effects = {text: [c.effect for c in done.summary.changed if text.startswith(c.mod)] for text in spelled}
    return [(text, "architecture" if "architecture" in found else "rounding") for text, found in effects.items()]


def _place(model: nn.Module, bound: Bound, undo: ExitStack) -> None:
    """Place the units and the bound linears in the model."""
    _settle(model, bound)
    undo.callback(_release, model)
    for unit in bound.units:
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
    with undisturbed(model), sparing_weights(model), torch.no_grad(), noting_inputs(model):
        model.eval()
        try:
            given = tuple(example) if isinstance(example, list) else example
            example() if callable(example) else call_model(model, given)
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
        raise ValueError(
            f"no scales are known for {', '.join(unknown)}; hint: with loka.placing.calibrating(model): model(batch)"
        )
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
        gemms = (binding.fprop, binding.dgrad, binding.wgrad)
        if any(gemm is not None and is_emulation(gemm.backend, weight.device) for gemm in gemms):
            asked.append(name)
    for pick, names in picked.items():
        refused = f"; refused: {spell_refusals(dict(pick.refusals))}" if pick.refusals else ""
        bound.notes.append(f"auto is {pick} for {len(names)} linear{'s' * (len(names) > 1)}{refused}")
        if pick.emulated:
            warnings.warn(f"{', '.join(names)}: emulated on {pick.device}, no kernel can{refused}", stacklevel=3)
    if asked:
        said = f"{', '.join(asked)}: emulated on the GPU, as backend='reference' asks: correct, but slow"
        warnings.warn(said, stacklevel=3)


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
    linears, chains = [linear for _, linear in linears_of(model)], remaining_chains(model)
    unshare_inputs(model)
    for linear in linears:
        linear.release()
    for chain in chains:
        chain.release()
    open_fast_paths(model)
    return len(linears) + sum(len(chain.links) for chain in chains)
