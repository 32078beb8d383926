"""The chains of a probed model: those already placed in it, else those that could be.

Finding them takes an example input, because only a forward pass shows which layer feeds which (`loka.units`). A probe
keeps the inputs of some sampled calls for this purpose. If running the model is a collective call (sharded parameters,
SyncBatchNorm), an evaluation on one rank would wait for the others forever; then the caller must pass an example, on
every rank.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from loka.lowp.chain import chains_of
from loka.measure.device import device_of
from loka.nn.replacing import SEES_CHAINS
from loka.probe.hook import Switch
from loka.probe.watch import Watch
from loka.probe.weights import is_sharded
from loka.records import Magnitude, UnitPlan
from loka.units import Example, Steps, describe_chain, discover
from loka.units.example import call_model

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
    """Chains with observed magnitudes, linears in no chain with the reason (`alone`), or why none were sought."""

    units: list[UnitPlan] = field(default_factory=list)
    alone: dict[str, str] = field(default_factory=dict)
    reason: str | None = None


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
