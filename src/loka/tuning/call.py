"""The arguments of one `loka.tune` call, and its current selection. The phases read the first and change the second."""

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
    """The arguments of one call, its budget, and what goes into the record besides the selection.

    Args:
        task: the model, its batches and its loss.
        metric: see `loka.tune`.
        margin: acceptable relative change of the metric.
        training: tune for training, so gradients count; otherwise for serving.
        budget: seconds for timing.
        thorough: compile in every way of `timing.COMPILERS`.
        evidence: the measurements so far, on disk.
        progress: the progress bar.
        estimator: estimates speeds on a device that is not present.
        row_factor: rows per call on that device, relative to here.
        train: steps of the paired training run.
        optimizer: makes its optimizer from parameters.
        choose_tables, choose_collectives: also choose formats of tables, and codecs of collectives.
        cuda_graph: whether steps will run in a CUDA graph. If not, a step takes at least its launch time on the host.
        arguments: the arguments as text, for the record: by them, a folder tells one call from another.
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
    arguments: dict[str, str] = field(default_factory=dict)
    untimed: str | None = None  # why nothing can be timed here
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds left of the budget."""
        return self.budget - (time.monotonic() - self.began)

    @property
    def compilers(self) -> list[str]:
        """Compile modes to try (keys of `timing.COMPILERS`), the default first."""
        return list(timing.COMPILERS) if self.thorough else [""]

    @property
    def device_name(self) -> str:
        """Device name as records spell it."""
        return name_device(self.task.device)

    @property
    def environment(self) -> Environment:
        """Hardware and software this runs on, for the record."""
        return environment_of(self.task.model)

    def phase(self, name: str) -> Any:
        """Show a phase in the progress bar and add its time to `seconds`."""
        return self.progress.phase(name, self.seconds)

    def margin_for(self, change: Interval) -> float:
        """Return the margin to judge a change by: the user's, or a coarser one if the interval is wider than that."""
        return self.margin if change.high - change.value <= self.margin else max(COARSE_MARGIN, self.margin)

    def is_within(self, change: Interval, used: float) -> bool:
        """Check whether the upper end of a change is within `used`, and its value within the user's margin.

        The second check matters if `used` is coarser than the user's margin: noise must not help a unit to pass.
        """
        return change.high <= used and change.value <= self.margin


@dataclass
class Selection:
    """The offers that are still in, and everything measured about them.

    Args:
        looked: observations of every linear.
        chosen: every offer ever made, and why linears stay in high precision.
        base: losses of the held-out batches in high precision, by the model as it is now, with its mods.
        given: those losses without the mods that tune applied itself: what `change` is relative to.
        mods: mods that the model has.
        used: the margin that changes are judged by.
        offers: the offers that are still in; at first, all of them.
        speeds: measured speed-up by offer.
        estimates: estimated speed-up by offer, on a device that is not present.
        alone: change of the metric with one offer swapped in.
        change: change of the metric by all that is applied, compared with `given`; None if it is nothing.
        swapped: the losses behind `change`.
        unresolved: `change`, if the data cannot resolve the user's margin and a coarser one is used.
        may_drop_mods: whether tune applied the mods itself and may drop them if they make the step slower.
        tables, collectives: formats and codecs chosen along with the offers.
    """

    looked: Looked
    chosen: Chosen
    base: Losses
    given: Losses
    mods: list[str]
    used: float
    offers: list[Offer] = field(init=False)
    speeds: dict[str, Interval] = field(default_factory=dict)
    estimates: dict[str, Interval] = field(default_factory=dict)
    alone: dict[str, Interval] = field(default_factory=dict)
    change: Interval | None = None
    swapped: Losses | None = None
    unresolved: Interval | None = None
    may_drop_mods: bool = False
    tables: list[TablePlan] = field(default_factory=list)
    collectives: list[CollectivePlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.offers = list(self.chosen.offers)

    def drop(self, offer: Offer, why: str) -> None:
        """Drop an offer: its linears stay in high precision."""
        self.offers = [o for o in self.offers if o is not offer]
        self.chosen.kept.update(dict.fromkeys(offer.unit.linears, why))

    def replace(self, offer: Offer, parts: list[Offer]) -> None:
        """Replace an offer by parts of it. Measurements of the whole are discarded: a part may have its name."""
        for known in (self.speeds, self.estimates, self.alone):
            known.pop(offer.name, None)
        self.chosen.offers[:] = [*(o for o in self.chosen.offers if o is not offer), *parts]
        self.offers = [*(o for o in self.offers if o is not offer), *parts]

    def leave_out(self, linear: str, why: str, *, training: bool) -> None:
        """Drop one linear of an offer. The rest of its chain stays in, as separate offers."""
        offer = next(offer for offer in self.offers if linear in offer.unit.linears)
        if len(offer.unit.links) == 1:
            self.drop(offer, why)
            return
        self.chosen.kept[linear] = why
        units = split_unit(offer.unit, {linear})
        self.replace(offer, [part_of(offer, unit, self.looked, training=training) for unit in units])

    def put_back(self, linear: str, mine: list[Offer], parts: list[Offer]) -> None:
        """Add a dropped linear again: `parts`, chains that contain it, replace the offers `mine`, which do not."""
        for offer in mine:
            self.replace(offer, [])
        del self.chosen.kept[linear]
        self.chosen.offers[:] = [*(o for o in self.chosen.offers if linear not in o.unit.linears), *parts]
        self.offers = [*self.offers, *parts]

    def to_plan(self, call: Call, offers: list[Offer] | None = None, mods: list[str] | None = None) -> Plan:
        """Build a plan of the offers with their measurements, and the reason for every linear that is not converted.

        Args:
            call: the call this selection belongs to.
            offers: use these offers instead of the current ones.
            mods: mods that the plan applies first; None for a model that already has them.

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
    """Return the note of a plan without measured speeds: what it is based on."""
    if call.estimator is None:
        return f"made for accuracy only: no speed was measured on {call.device_name}"
    return (
        f"a first plan to try on {call.estimator.target}: speeds are {call.estimator}; "
        "none was measured, so tune again on that device"
    )
