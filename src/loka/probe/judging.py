"""Judge the kernels that plans made from a report would run: of linears by recipe, and of chains, whole and in parts.

A report may be planned from where the model is not, so this is done beforehand. The model is converted for a trial and
runs a step on the inputs of sampled calls (`loka.placing.judging`).

Every call of a chain is judged at its shape. The products of linears by themselves, and the quantizers of operands that
are no transposes, are judged at theirs with each candidate (`loka.probe.engine`). What is left is what only a step
runs, as the pass that quantizes a tensor and its transpose, or a weight gradient in float32. Its kernels are compiled
for nothing else, so it is judged at the largest linear, and at the largest of those whose sides are no multiples of 16:
their verdicts are those of the others.

A model that is converted already is not judged: the plan that did it was, and a step would change its scales. Neither
is one whose forward is a call of all ranks, which may come to different verdicts and wait for each other.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from loka.dispatch import recipe_named
from loka.dispatch.choosing import split_unit
from loka.dispatch.recipe import Recipe, choice_of
from loka.kernels import registry
from loka.lowp.chain import chains_of
from loka.lowp.linear import linears_of, refuse
from loka.measure.device import device_of
from loka.measure.kernel_calls import KernelCall
from loka.measure.site import gemm_shape
from loka.placing.judging import WRONG, Judge, find_planned, plan_unmeasured
from loka.probe.chains import ExampleKeeper, find_collective
from loka.probe.engine import out_dtype
from loka.probe.watch import Watch
from loka.records import GEMMS, Plan, SitePlan, UnitPlan
from loka.units import Steps
from loka.units.example import tensors_in

Refused = dict[tuple[str, str, str], str]  # why, by site, recipe and backend


class StepJudge:
    """Judges steps of a probed model that is converted for a trial.

    Args:
        model: the probed model.
        kept: inputs of sampled calls.
        given: an example of the caller's, or None.
        meanwhile: tasks to run while kernels are compiled (`loka.kernels.compiling`).
    """

    def __init__(
        self, model: nn.Module, kept: ExampleKeeper, given: Any, meanwhile: list[Callable[[], Any]] | None = None
    ) -> None:
        shown = kept.examples if given is None else given.runs if isinstance(given, Steps) else [given]
        self.model, self.device, self._autocast = model, device_of(model), kept.autocast
        self._examples = _largest_of_each_kind(shown)
        self._judge, self._only_references = Judge(self.device, meanwhile=meanwhile), False
        self._missing = None if self._examples else "that takes an example"
        if (why := find_collective(model)) is not None:
            self._missing = f"{why}, so running the model is a call of all ranks"

    @property
    def notes(self) -> list[str]:
        """What could not be judged."""
        return self._judge.notes

    def refuse_chains(self, units: Sequence[UnitPlan]) -> dict[str, str]:
        """Return the chains that run a wrong kernel, with kernel, call and fault."""

        def plans(names: Collection[str]) -> Iterator[Plan]:
            return (
                plan_unmeasured(self.model, units=parts)
                for parts in _variants([unit for unit in units if unit.name in names])
            )

        return self._refuse([unit.name for unit in units], plans, list, "chains")

    def refuse_linears(self, watches: Mapping[str, Watch], recipes: Sequence[str], backends: Sequence[Any]) -> Refused:
        """Return the linears that run a wrong kernel by a recipe on a backend of the registry."""
        refused: Refused = {}
        for backend in [name for name in backends if isinstance(name, str)]:
            left = [
                (name, kind)
                for name in recipes
                for kind in _by_kind(self._plan_linears(watches.values(), recipe_named(name), backend))
            ]
            while left:
                found = {f"{kind[0].site} by {name}": (name, kind) for name, kind in left}
                left = []
                for first, why in self._refuse_first(found).items():
                    name, kind = found[first]
                    wrong = why.startswith(WRONG)
                    refused |= {(site.site, name, backend): why for site in (kind if wrong else kind[:1])}
                    if not wrong and kind[1:]:  # the step fails for a reason of this linear's: ask the next one
                        left.append((name, kind[1:]))
        return refused

    def _refuse_first(self, found: Mapping[str, tuple[str, Sequence[SitePlan]]]) -> dict[str, str]:
        """Refuse the first linears of several kinds, each by a recipe."""

        def plans(names: Collection[str]) -> Iterator[Plan]:
            chosen = [(recipe, kind[0]) for recipe, kind in (found[name] for name in names)]
            for recipe in dict.fromkeys(recipe for recipe, _ in chosen) or [""]:
                yield plan_unmeasured(self.model, sites=[site for name, site in chosen if name == recipe])

        return self._refuse(list(found), plans, self._leave_candidates, "linears")

    def _plan_linears(self, watches: Iterable[Watch], recipe: Recipe, backend: str) -> list[SitePlan]:
        """Return how linears run by a recipe, where they can."""
        found = []
        able = registry.backend("scaled_mm", backend).supports
        for watch in watches:
            if watch.kept is not None or not watch.gemms or refuse(watch.module):
                continue
            m, ways = max(watch.largest, 1), {gemm: recipe.operands(gemm) for gemm in GEMMS}
            ways = {gemm: None if way is None else way.on(backend) for gemm, way in ways.items()}
            calls = [w.call(*gemm_shape(g, m, watch.k, watch.n)) for g, w in ways.items() if w is not None]
            if all(able(call, self.device) for call in calls):
                choices = [choice_of(gemm, way, recipe.name) for gemm, way in ways.items()]
                found.append(SitePlan(site=watch.name, m=m, k=watch.k, n=watch.n, flops_share=0.0, choices=choices))
        return found

    def _refuse(
        self,
        names: Collection[str],
        plans: Callable[[Collection[str]], Iterator[Plan]],
        judged: Callable[[Iterable[KernelCall]], list[KernelCall]],
        what: str,
    ) -> dict[str, str]:
        """Refuse names whose plans run a wrong kernel among the calls to be judged.

        Once a step ran only references, so do the others.
        """
        if not names or self._only_references or any(True for _ in (*chains_of(self.model), *linears_of(self.model))):
            return {}
        if self._missing is not None:
            if self.device.type == "cuda":  # elsewhere references run
                self._note(f"the kernels of {what} were not judged: {self._missing}")
            return {}

        def find(some: Collection[str]) -> list[KernelCall]:
            calls: dict[KernelCall, None] = {}
            for plan in plans(some):
                for example in self._examples:
                    calls |= dict.fromkeys(find_planned(self.model, plan, example, training=True))
                self._only_references = bool(calls) and all(one.backend == "reference" for one in calls)
                if self._only_references:
                    break
            return judged(calls)

        autocast = torch.autocast(self.device.type, dtype=self._autocast) if self._autocast else nullcontext()
        with autocast:
            return self._judge.refuse(names, find)

    def _leave_candidates(self, calls: Iterable[KernelCall]) -> list[KernelCall]:
        """Return the calls but for products that are judged as candidates."""
        return [one for one in calls if one.op != "scaled_mm" or one.call.out_dtype != out_dtype(self.device)]

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


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


def _by_kind(sites: Iterable[SitePlan]) -> Iterable[list[SitePlan]]:
    """Return the sites by which of their sides are multiples of 16, the largest of each kind first."""
    kinds: dict[tuple[bool, ...], list[SitePlan]] = {}
    for site in sorted(sites, key=lambda site: -site.m * site.k * site.n):
        kinds.setdefault(tuple(side % 16 == 0 for side in (site.m, site.k, site.n)), []).append(site)
    return kinds.values()


def _largest_of_each_kind(examples: Sequence[Any]) -> list[Any]:
    """Return the largest of examples whose tensors differ in their first size alone; functions are all returned."""
    found: dict[int | str, tuple[int, Any]] = {}
    for example in examples:
        tensors = [] if callable(example) else list(tensors_in(example))
        key = id(example) if callable(example) else str([(t.dtype, t.shape[1:]) for t in tensors])
        size = sum(t.numel() for t in tensors)
        if key not in found or size > found[key][0]:
            found[key] = size, example
    return [example for _, example in found.values()]
