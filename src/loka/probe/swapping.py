"""Swapping: measure how low precision changes the metric, each unit alone, then all together, on the same examples.

    swapped = swap(model, units, batches, metric)
    swapped.alone["over.2"]          Interval of the relative change of the mean metric
    swapped.vetoed                   units whose change may exceed their share of the margin, and why

A unit is anything that can be switched on and off: a placed module, a chain, a hook. The metric is called with the
model and a batch and returns one number per example, for instance the log loss of a ranker. Differences are taken per
example. Intervals are 95 % bootstraps over examples, over groups of them (users), or over batches if these differ
(`loka.probe.paired`). Both directions count: an improvement on these examples is noise that may be a regression on
others.

The margin is 0.02 % of the loss for all units together, and margin / sqrt(units) for one alone, because independent
errors add in squares. If the examples cannot resolve that (half the interval is wider), 0.1 % is used for the ends of
the interval and the text says so; the change itself is still held to 0.02 %. The upper end decides: a unit that is not
shown to be within its share is vetoed.

Every unit is switched off again, and the training mode and random state are restored, even on errors.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from loka.dispatch.margin import MARGIN, allow
from loka.nn.wrapping import in_eval
from loka.probe.paired import Losses, gather, has_drifted, spell_change
from loka.probe.progress import Progress, telling
from loka.records import Interval
from loka.records.prose import spell_error

Metric = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Switchable:
    """A unit that can be switched on and off.

    Args:
        name: name of the unit.
        enable: switches it to low precision.
        disable: switches it back.

    Example:
        >>> Switchable("over.2", lambda: layer.set_mode("fp8"), lambda: layer.set_mode("high"))
    """

    name: str
    enable: Callable[[], object]
    disable: Callable[[], object]


@dataclass(frozen=True)
class Swapped:
    """The measured change of the metric, for each unit alone and for all together."""

    alone: Mapping[str, Interval]  # relative change of the mean metric, by unit
    together: Interval | None  # with all units enabled; None if there was only one, or `together` was False
    margin: float  # relative change allowed for the whole model
    examples: int  # number of examples compared
    failed: Mapping[str, str] = field(default_factory=dict)  # units that raised, and the error

    @property
    def vetoed(self) -> dict[str, str]:
        """Units that must not be used, with the reason: they failed, or may change the metric beyond their share."""
        found = {name: allow(change, margin=self.margin, units=len(self.alone)) for name, change in self.alone.items()}
        return {
            **{name: f"fails: {why}" for name, why in self.failed.items()},
            **{name: f"alone it changes the metric by {a.text}" for name, a in found.items() if not a.within},
        }

    @property
    def holds(self) -> bool:
        """Whether all units together stay within the margin on these examples."""
        change = self.together or next(iter(self.alone.values()), None)
        return change is not None and not self.failed and allow(change, margin=self.margin).within

    def __str__(self) -> str:
        lines = [
            f"{name}: {allow(change, margin=self.margin, units=len(self.alone)).text}"
            for name, change in self.alone.items()
        ]
        if self.together is not None:
            lines.append(f"all {len(self.alone)} together: {allow(self.together, margin=self.margin).text}")
        return "\n".join([*lines, *(f"{name}: fails: {why}" for name, why in self.failed.items())])


def swap(
    model: nn.Module,
    units: Sequence[Switchable],
    batches: Iterable[Any],
    metric: Metric,
    *,
    margin: float = MARGIN,
    together: bool = True,
    groups: Callable[[Any], Tensor] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Swapped:
    """Measure how units change a metric, alone and together.

    Args:
        model: the model, with every unit switched off.
        units: the units to switch on.
        batches: held-out examples; kept in memory, because each unit is measured on all of them.
        metric: (model, batch) -> one number per example, in a fixed order.
        margin: relative change allowed for the whole model.
        together: also measure all units at once.
        groups: batch -> integer ids, one per example, if examples are not independent (same user).
        seed: seed of the bootstrap.
        progress: called with (unit, done, total).

    Returns:
        Intervals of the relative changes, and the vetoed units.

    Raises:
        ValueError: no units or batches, a duplicate name, a metric that does not return one number per example, or a
            metric that changed after every unit was switched off again.

    Example:
        >>> unit = Switchable("over.2", lambda: layer.set_mode("fp8"), lambda: layer.set_mode("high"))
        >>> swap(model, [unit], held_out, losses).vetoed
        {}
    """
    held = list(batches)
    names = [unit.name for unit in units]
    if not units or not held:
        raise ValueError(
            f"{len(units)} units and {len(held)} batches: expected at least one of each; is an iterator empty?"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"units are named twice: {sorted(n for n in names if names.count(n) > 1)}")
    ids = None if groups is None else torch.cat([groups(batch).reshape(-1).cpu() for batch in held])
    baseline = _losses(model, held, metric)
    alone: dict[str, Interval] = {}
    failed: dict[str, str] = {}
    with telling(progress, "swap") as tell:
        for number, unit in enumerate(units):
            tell(unit.name, number, len(units) + together)
            try:
                alone[unit.name] = _measure(model, [unit], held, metric).change_from(
                    baseline, ids, seed=seed, method="auto"
                )
            except Exception as error:  # a unit that cannot run must not stop the others
                failed[unit.name] = spell_error(error)
        able = [unit for unit in units if unit.name in alone]
        both = None
        if together and len(able) > 1:
            tell("all together", len(units), len(units) + 1)
            both = _measure(model, able, held, metric).change_from(baseline, ids, seed=seed, method="auto")
    if (change := has_drifted(_losses(model, held, metric), baseline, margin)) is not None:
        raise ValueError(
            f"with every unit switched off again the metric changes {spell_change(change)}: expected no change; "
            "hint: does it write to its batch, or keep a state?"
        )
    return Swapped(alone, both, margin, baseline.values.numel(), failed)


def _measure(model: nn.Module, units: Sequence[Switchable], held: Sequence[Any], metric: Metric) -> Losses:
    switched: list[Switchable] = []
    try:
        for unit in units:
            switched.append(unit)  # before enable(), so that a unit that fails half way is disabled too
            unit.enable()
        return _losses(model, held, metric)
    finally:
        for unit in reversed(switched):
            unit.disable()


def _losses(model: nn.Module, held: Sequence[Any], metric: Metric) -> Losses:
    devices = [next(model.parameters()).device] if any(p.is_cuda for p in model.parameters()) else []
    with in_eval(model), torch.no_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(0)
        found = gather([metric(model, batch).detach() for batch in held])
    if found.values.numel() < 2:
        raise ValueError(
            f"the metric gave {found.values.numel()} number(s): expected one per example, e.g. a loss without reduction"
        )
    return found
