"""The chains of a probed model: those already placed in it, else those that could be, and whether their kernels are right.

Finding them takes an example input, because only a forward pass shows which layer feeds which (`loka.units`). A probe
keeps the inputs of some sampled calls for this purpose. If running the model is a collective call (sharded parameters,
SyncBatchNorm), an evaluation on one rank would wait for the others forever; then the caller must pass an example, on
every rank.
"""

import copy
import dataclasses
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from loka.dispatch.choosing import split_unit
from loka.lowp.chain import chains_of
from loka.measure.device import device_of, environment_of
from loka.measure.kernel_calls import KernelCall
from loka.nn.replacing import SEES_CHAINS
from loka.placing.judging import Judge, find_planned
from loka.probe.hook import Switch
from loka.probe.watch import Watch
from loka.probe.weights import is_sharded
from loka.records import Magnitude, Plan, UnitPlan
from loka.units import Example, Steps, describe_chain, discover
from loka.units.example import call_model, tensors_in

KEPT = 4  # number of calls whose inputs are kept


class ExampleKeeper:
    """Keeps copies of the inputs of the first few sampled calls, because different inputs may take different paths."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self.examples: list[Example] = []
        self.autocast: torch.dtype | None = None  # of the sampled calls
        self.missing = "no sampled step called the model"

    def make_hook(self) -> Callable[..., None]:
        """Make the forward pre-hook of the outermost module. It never raises."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling() or len(self.examples) == KEPT or not self._switch.on:
                return
            device = device_of(module).type
            self.autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            try:
                self.examples.append(Example(*(tree_map(_copy, part) for part in (args, kwargs))))
            except Exception as error:
                self.missing = f"the model's input cannot be copied: {type(error).__name__}: {error}"

        setattr(hook, SEES_CHAINS, True)
        return hook


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


@dataclass(frozen=True)
class FoundChains:
    """Chains with observed magnitudes, linears in no chain with the reason (`alone`), or why none were sought.

    `wrong`: chains that run a wrong kernel, with what is wrong. `notes`: which kernels could not be judged.
    """

    units: list[UnitPlan] = field(default_factory=list)
    alone: dict[str, str] = field(default_factory=dict)
    reason: str | None = None
    wrong: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def find_chains(model: nn.Module, kept: ExampleKeeper, given: Any, watches: Mapping[str, Watch]) -> FoundChains:
    """Find the chains that are placed in a model, or could be. Never raises; problems are reported in `reason`."""
    placed = [describe_chain(model, chain) for _, chain in chains_of(model)]
    if placed:
        return FoundChains(placed)
    if given is None and (why := find_collective(model)):
        return FoundChains(reason=f"{why}, so running the model is a call of all ranks; hint: probe.evaluate(example=batch) on every rank")  # fmt: skip
    if given is None and not kept.examples and not hasattr(model, "example_inputs"):
        return FoundChains(reason=f"finding chains takes an example, and {kept.missing}; hint: probe.evaluate(example=batch)")  # fmt: skip
    try:
        seen = Steps(tuple(partial(call_model, model, example) for example in kept.examples))
        found = discover(model, seen if given is None and kept.examples else given)
    except Exception as error:  # whatever a user's forward raises
        return FoundChains(reason=f"{type(error).__name__}: {error}")
    return FoundChains([_with_magnitudes(unit, watches) for unit in found.units], found.alone)


def find_collective(model: nn.Module) -> str | None:
    """Return what in a model communicates with other ranks when it runs, or None."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if any(is_sharded(p) for p in model.parameters()):
        return "its parameters are sharded"
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) or type(module).__module__.startswith("torchrec.distributed"):
            return f"{name} is a {type(module).__name__}"
    return None


def _with_magnitudes(unit: UnitPlan, watches: Mapping[str, Watch]) -> UnitPlan:
    """Add observed magnitudes, for the initial scales. A link's output is the next link's x; the last link has none."""
    seen = {
        name: {role: float(value) for role, value in watches[name].tally.largest.items()}
        for name in unit.linears
        if name in watches
    }
    magnitudes = {}
    for link, following in zip(unit.links, [*unit.links[1:], None], strict=True):
        mine = seen.get(link.linear, {})
        output = 0.0 if following is None else seen.get(following.linear, {}).get("x", 0.0)
        if mine:
            magnitudes[link.linear] = Magnitude(output=output, gradient=mine.get("dy", 0.0), input=mine.get("x", 0.0))
    return replace(unit, magnitudes=magnitudes)


def judge_chains(model: nn.Module, found: FoundChains, kept: ExampleKeeper, given: Any) -> FoundChains:
    """Add which chains run a kernel that fails the conformance gate, placed as they were found, or split by a plan.

    Chains that are placed already were judged by the plan that placed them: running them would change their scales.

    Args:
        model: the probed model.
        found: what `find_chains` returned.
        kept: inputs of sampled calls.
        given: an example of the caller's, or None.
    """
    if not found.units or any(True for _ in chains_of(model)):
        return found
    shown = kept.examples if given is None else given.runs if isinstance(given, Steps) else [given]
    examples = _one_of_each_size(shown)
    device = device_of(model)
    if not examples or device.type == "meta":
        return dataclasses.replace(found, notes=["the kernels of chains were not judged: that takes an example"])
    judge = Judge(device)

    def find(names: Collection[str]) -> list[KernelCall]:
        calls: dict[KernelCall, None] = {}
        for units in _variants([unit for unit in found.units if unit.name in names]):
            for example in examples:
                calls |= dict.fromkeys(find_planned(model, _plan_of(model, units), example, training=True))
            if all(one.backend == "reference" for one in calls):
                break  # then so in parts of the chains
        return list(calls)

    with torch.autocast(device.type, dtype=kept.autocast, enabled=True) if kept.autocast else nullcontext():
        try:
            wrong = judge.refuse([unit.name for unit in found.units], find)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)
            wrong = {}
            judge.notes.append("the kernels of chains were not judged, for want of memory")
    return dataclasses.replace(found, wrong=wrong, notes=judge.notes)


def _variants(units: Sequence[UnitPlan]) -> Iterator[list[UnitPlan]]:
    """Yield the chains whole, then the parts that are left without their first linear, their second, and so on.

    What a link runs depends on whether it is the first or the last of a part, so this covers every part.
    """
    yield list(units)
    for at in range(max((len(unit.links) for unit in units), default=0)):
        out = {unit.links[at].linear for unit in units if at < len(unit.links)}
        parts = [part for unit in units for part in split_unit(unit, out & set(unit.linears)) if len(part.links) > 1]
        if parts := [part for part in parts if part not in units]:
            yield parts


def _one_of_each_size(examples: Sequence[Any]) -> list[Any]:
    """Return the examples without those whose tensors have the sizes of an earlier one's; functions are all returned."""
    sizes: dict[int | str, Any] = {}
    for example in examples:
        key = id(example) if callable(example) else str([(t.dtype, t.shape) for t in tensors_in(example)])
        sizes.setdefault(key, example)
    return list(sizes.values())


def _plan_of(model: nn.Module, units: list[UnitPlan]) -> Plan:
    return Plan(
        model=type(model).__name__,
        recipe="auto",
        target=None,
        max_error=1.0,
        max_gradient_error=1.0,
        min_speedup=None,
        flops_of="sites",
        sites=[],
        units=units,
        environment=environment_of(model),
    )
