"""What one call of tune was asked, and what it has chosen so far. The phases (`loka.tuning.session`) read the first and change the second."""

import time
from dataclasses import dataclass, field
from typing import Any

from loka.dispatch.choosing import Chosen, Looked, Offer, part_of, split_unit, to_plan_parts
from loka.dispatch.margin import COARSE_MARGIN
from loka.measure.device import environment_of, name_device
from loka.probe.paired import Losses
from loka.records import CollectivePlan, Interval, Plan, TablePlan, UnitEvidence
from loka.records.measurement import Environment
from loka.tuning import timing
from loka.tuning.estimating import Estimator
from loka.tuning.evidence import Evidence
from loka.tuning.progress import Progress
from loka.tuning.task import MakeOptimizer, Task


@dataclass
class Call:
    """One call of tune: what was asked, what is known, what the record will say.

    Args:
        task: the model, its batches and its loss.
        metric: as `loka.tune` takes it.
        margin: relative change of the metric that counts as none.
        training: whether gradients count; otherwise the model is for serving.
        budget: seconds.
        thorough: compile in every way there is.
        evidence: what was measured, on disk.
        progress: who is shown how far it is.
        estimator: of speeds on a device that is not here.
        row_factor: rows of a call there over those here.
        train: steps of a paired run of training.
        optimizer: that it trains with.
        choose_tables, choose_collectives: whether formats of tables, and codecs of what ranks send, are chosen too.
        cuda_graph: whether steps will run in a CUDA graph; otherwise one takes as long as the host takes to launch it, where that is longer.
    """

    task: Task
    metric: Any
    margin: float
    training: bool
    budget: float
    thorough: bool
    evidence: Evidence
    progress: Progress
    estimator: Estimator | None = None
    row_factor: float = 1.0
    train: int = 0
    optimizer: MakeOptimizer | None = None
    choose_tables: bool = False
    choose_collectives: bool = False
    cuda_graph: bool = True
    untimed: str | None = None  # why nothing is timed here
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.budget - (time.monotonic() - self.began)

    @property
    def compilers(self) -> list[str]:
        """Ways to compile, each of which is tried; the default first."""
        return list(timing.COMPILERS) if self.thorough else [""]

    @property
    def device_name(self) -> str:
        """As records name it."""
        return name_device(self.task.device)

    @property
    def environment(self) -> Environment:
        """Where all of it ran."""
        return environment_of(self.task.model)

    def phase(self, name: str) -> Any:
        """Shown and timed."""
        return self.progress.phase(name, self.seconds)

    def margin_for(self, change: Interval) -> float:
        """What a change is held against: the margin, or a coarser one where its interval does not resolve that."""
        return self.margin if change.high - change.value <= self.margin else max(COARSE_MARGIN, self.margin)

    def is_within(self, change: Interval, used: float) -> bool:
        """By its upper end; and where a coarser margin is used because the data do not resolve the one that was asked for, the change as measured is still held to that one: a unit must not pass for being noisy."""
        return change.high <= used and change.value <= self.margin


@dataclass
class Selection:
    """What is chosen so far, and what was measured of it.

    Args:
        looked: what was seen of every linear.
        chosen: every offer that was made, and why linears stay in high precision.
        base: the losses of the held-out batches in high precision.
        mods: rewrites that the model has.
        used: the margin that changes are held against.
        offers: those that are still in.
        speeds: measured, by offer.
        estimates: the same on a device that is not here.
        alone: change of the metric with one offer swapped in.
        change: with all of them; None where none is in.
        swapped: the losses that came of.
        unresolved: that change, where the data resolve a coarser margin than was asked for.
        may_leave_mods: whether tune chose the mods itself: they leave where they make the step slower.
        tables, collectives: chosen beside them.
    """

    looked: Looked
    chosen: Chosen
    base: Losses
    mods: list[str]
    used: float
    offers: list[Offer]
    speeds: dict[str, Interval] = field(default_factory=dict)
    estimates: dict[str, Interval] = field(default_factory=dict)
    alone: dict[str, Interval] = field(default_factory=dict)
    change: Interval | None = None
    swapped: Losses | None = None
    unresolved: Interval | None = None
    may_leave_mods: bool = False
    tables: list[TablePlan] = field(default_factory=list)
    collectives: list[CollectivePlan] = field(default_factory=list)

    def drop(self, offer: Offer, why: str) -> None:
        """Leave an offer out: its linears stay in high precision."""
        self.offers = [o for o in self.offers if o is not offer]
        self.chosen.kept.update(dict.fromkeys(offer.unit.linears, why))

    def replace(self, offer: Offer, parts: list[Offer]) -> None:
        """Put parts of an offer in its place; what was measured of the whole is not true of the part that has its name."""
        for known in (self.speeds, self.estimates, self.alone):
            known.pop(offer.name, None)
        self.chosen.offers[:] = [*(o for o in self.chosen.offers if o is not offer), *parts]
        self.offers = [*(o for o in self.offers if o is not offer), *parts]

    def leave_out(self, linear: str, why: str, *, training: bool) -> None:
        """Leave one linear out of the offer that holds it; what is left of its chain stays in, as offers of their own."""
        offer = next(offer for offer in self.offers if linear in offer.unit.linears)
        if len(offer.unit.links) == 1:
            self.drop(offer, why)
            return
        self.chosen.kept[linear] = why
        self.replace(offer, [part_of(offer, unit, self.looked, training=training) for unit in split_unit(offer.unit, {linear})])  # fmt: skip

    def put_back(self, linear: str, mine: list[Offer], parts: list[Offer]) -> None:
        """Take a linear that was left out in again: parts of a chain that hold it replace those that do not."""
        for offer in mine:
            self.replace(offer, [])
        del self.chosen.kept[linear]
        self.chosen.offers[:] = [*(o for o in self.chosen.offers if linear not in o.unit.linears), *parts]
        self.offers = [*self.offers, *parts]

    def to_plan(self, call: Call, offers: list[Offer] | None = None, mods: list[str] | None = None) -> Plan:
        """What is in, with what was measured of it, and a word for every linear that is not.

        Args:
            call: whose selection it is.
            offers: some offers instead of those that are in.
            mods: what the plan applies first; None for a model that has them.

        Returns:
            The plan.
        """
        offers = self.offers if offers is None else offers
        evidence = {
            o.name: UnitEvidence(
                speedup=self.speeds.get(o.name),
                estimated=self.estimates.get(o.name),
                harm=o.harm,
                metric_change=self.alone.get(o.name),
            )
            for o in offers
        }
        units, sites = to_plan_parts(offers, self.looked, evidence, self.chosen.kept, training=call.training)
        timed = call.untimed is None
        return Plan(
            model=type(call.task.model).__name__,
            recipe="auto",
            target=call.device_name if timed else None,
            max_error=1.0,
            max_gradient_error=1.0,
            min_speedup=1.0 if timed else None,
            flops_of="sites",
            sites=sites,
            units=units,
            tables=self.tables,
            collectives=self.collectives,
            mods=mods or [],
            margin=call.margin,
            environment=call.environment,
            notes=[] if timed else [_say_untimed(call)],
        )


def _say_untimed(call: Call) -> str:
    """What a plan without measured speeds rests on."""
    if call.estimator is None:
        return f"made for accuracy only: no speed was measured on {call.device_name}"
    return f"the plan to try first on {call.estimator.target}: speeds are {call.estimator}; none was measured, so tune again there"
