"""Decide which sites of a model are quantized and how: by the rules of a mixture, then by a measured bound.

decide    the first rule of the mixture that matches a site, unless the caller or the model keeps it out
measure   every candidate swapped in alone, then those together that save the most weight within the bound
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from loka.dispatch import Mixture, recipe_named
from loka.dispatch.budget import Item, search
from loka.kernels.scaled_mm import GemmWay
from loka.lowp.linear import refuse
from loka.nn import GroupedLinear
from loka.placing.linears import ModuleFilter, spoken_for
from loka.probe.swapping import Switchable, swap
from loka.ptq.modules import Site, put, quantize_module
from loka.records import Interval
from loka.records.prose import name_some

Progress = Callable[[str, int, int], None]
Score = Callable[[nn.Module], tuple[Tensor, Tensor | None]]


@dataclass
class Decided:
    """The decision for every site, and what it was measured to cost.

    Args:
        recipe: name of the mixture or plan that decided.
        operands: how the sites run that are quantized.
        reasons: why, for every site.
        cautious: how sites would run that the mixture keeps out of caution.
        alone: change of the metric by each site alone.
        together: change by all of them.
        notes: about the search.
    """

    recipe: str
    operands: dict[str, GemmWay] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    cautious: dict[str, GemmWay] = field(default_factory=dict)
    alone: dict[str, Interval] = field(default_factory=dict)
    together: Interval | None = None
    notes: list[str] = field(default_factory=list)

    def leave_out(self, refused: Mapping[str, str]) -> None:
        """Keep sites in 16 bits, each with its reason."""
        for name in refused:
            self.operands.pop(name, None), self.cautious.pop(name, None)
        self.reasons |= refused


@dataclass(frozen=True)
class Trial:
    """How candidates are measured; see `loka.quantize` for what is not explained here.

    Args:
        score: returns the losses of a model, and their groups or None.
        bound: largest accepted relative change of all sites together; None for none.
        widen: measure sites too that the mixture keeps out of caution.
        backend: backend of the GEMMs.
        progress: called with (site, done, total).
    """

    score: Score
    bound: float | None
    widen: bool
    backend: str
    progress: Progress | None


def decide(
    model: nn.Module,
    found: Mapping[str, Site],
    mixture: Mixture,
    keep: Sequence[str],
    allowed: ModuleFilter | None,
    read: Mapping[str, str],
) -> Decided:
    """Decide by the rules of a mixture how every site runs.

    Args:
        model: the model.
        found: its sites.
        mixture: the rules.
        keep: name patterns of sites that stay.
        allowed: (module, name) -> whether a site may be quantized.
        read: sites whose weight the model reads without calling them, and why that keeps them.
    """
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise ValueError(f"keep={pattern!r} matches no site; sites are {name_some(list(found), 8)}")
    made, taken = Decided(mixture.name), {**spoken_for(model), **read}
    for name, module in found.items():
        experts = isinstance(module, GroupedLinear)
        rule = mixture.decide(name, experts=experts)
        asked = next((pattern for pattern in keep if fnmatchcase(name, pattern)), None)
        if asked is not None:
            made.reasons[name] = f"asked for by keep={asked!r}"
        elif allowed is not None and not allowed(module, name):
            made.reasons[name] = "excluded by module_filter_fn"
        elif why := taken.get(name) or (None if experts else refuse(module)):
            made.reasons[name] = why
        elif (operands := None if rule.recipe is None else recipe_named(rule.recipe).fprop) is not None:
            made.operands[name], made.reasons[name] = operands, rule.reason
        else:
            made.reasons[name] = rule.reason
            cautious = recipe_named("blockwise" if experts else "rowwise").fprop
            assert cautious is not None
            made.cautious[name] = cautious
    return made


def measure(model: nn.Module, found: Mapping[str, Site], decided: Decided, trial: Trial) -> None:
    """Measure every candidate alone, then together those within the bound, and reduce `decided` to these."""
    tried = decided.operands | (decided.cautious if trial.widen else {})
    if not tried:
        return
    made = {name: quantize_module(found[name], way, backend=trial.backend) for name, way in tried.items()}
    _, groups = trial.score(model)

    def swap_in(*units: Sequence[str]) -> Any:
        return swap(
            model,
            [_switch(model, names, made, found) for names in units],
            [None],
            lambda m, _: trial.score(m)[0],
            together=False,
            groups=None if groups is None else lambda _: groups,
            progress=trial.progress,
        )

    seen = swap_in(*([name] for name in made))
    alone = decided.alone = seen.alone
    most = trial.bound or 0.0  # without a bound, a cautious site must not cost anything
    usable = [name for name in made if name in alone and (name not in decided.cautious or alone[name].high <= most)]

    def measure_together(names: frozenset[str]) -> Interval:
        together = swap_in(sorted(names))
        if together.failed:
            raise ValueError(f"the sites cannot run together: {next(iter(together.failed.values()))}")
        change: Interval = next(iter(together.alone.values()))
        return change

    if trial.bound is None:
        picked = frozenset(usable)
        decided.together = measure_together(picked) if usable else None
    else:
        items = [Item(n, max(0.0, alone[n].high), float(found[n].weight.numel())) for n in usable]
        spent = search(items, trial.bound, measure_together, suspicion={n: alone[n].high for n in usable})
        picked, decided.together, decided.notes = spent.chosen, spent.change, spent.notes
    for name in made:
        if name in alone:
            decided.reasons[name] = _say_change(alone[name], trial.bound, name in picked)
        else:
            decided.reasons[name] = f"it fails: {seen.failed[name]}"
    decided.operands = {name: way for name, way in tried.items() if name in picked}


def _switch(
    model: nn.Module, names: Sequence[str], made: Mapping[str, nn.Module], found: Mapping[str, nn.Module]
) -> Switchable:
    """Return a switch between the sites of a model and their quantized replacements."""
    label = names[0] if len(names) == 1 else f"{len(names)} sites together"
    return Switchable(
        label, lambda: put(model, {n: made[n] for n in names}), lambda: put(model, {n: found[n] for n in names})
    )


def _say_change(change: Interval, bound: float | None, picked: bool) -> str:
    if picked:
        return f"measured: {change:+.3%} alone"
    return f"{change:+.3%} alone" + (
        "" if bound is None else f", and the whole model must stay within {100 * bound:.3g}%"
    )
