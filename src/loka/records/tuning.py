"""What `loka.tune` found: the units with what was measured about each, the step and the metric of the whole model beside high precision. One record, one configuration."""

import msgspec

from loka.records.conversion import Conversion
from loka.records.measurement import Environment, Interval
from loka.records.plan import Plan
from loka.records.record import Part, Record


class TunedUnit(Part, frozen=True):
    """One unit as tuning saw it.

    Args:
        name: of its first linear, of the table, or of the collective.
        linears: all of them; none of a table or a collective.
        way: what runs: "chain", a recipe, a format of rows, a codec, or "high".
        flops_share: of the GEMM FLOPs of the looked-at linears.
        harm: predicted relative change of the loss.
        speedup: over compiled 16 bits, cut out of the model.
        estimated: the same, estimated for a device that is not here; never beside a measured one.
        metric_change: measured by swapping this unit alone.
        reason: why this way.
        alarms: what a person should look at, such as columns with a large offset.
    """

    name: str
    linears: list[str]
    way: str
    flops_share: float
    reason: str
    harm: Interval | None = None
    speedup: Interval | None = None
    estimated: Interval | None = None
    metric_change: Interval | None = None
    alarms: list[str] = msgspec.field(default_factory=list)


class Estimate(Part, frozen=True):
    """Speeds that were estimated, not measured.

    Args:
        target: the device they are for.
        method: what they come from and how far off it was, in words.
        rows: rows of a call there over those here.
        linears: of all linears of the model together, over compiled 16 bits; what is no linear is not counted. None where nothing is converted.
    """

    target: str
    method: str
    rows: float
    linears: Interval | None = None


class SizeEstimate(Part, frozen=True):
    """What FP8 is estimated to bring for a model of one size."""

    size: str  # its name
    rows: int  # of a batch
    linears: Interval  # speed-up of all linears together, forward and backward, over compiled 16 bits
    share: float  # of their GEMM FLOPs in units that are estimated to be faster


class SizeEstimates(Record, frozen=True, tag="size_estimates"):
    """Estimates for a device that is not here, at the size that was run and at a larger one; nothing of it was measured."""

    target: str  # the device
    method: str  # what they come from and how far off it was, in words
    here: SizeEstimate  # the model that was run
    large: SizeEstimate  # one of a size where FP8 is meant for
    environment: Environment  # where this was computed


class Tuning(Record, frozen=True, tag="tuning"):
    """The record of one call.

    Args:
        model: the model's class.
        target: "train" or "serve".
        margin: relative change of the metric that counts as none, as asked.
        used_margin: what the held-out data could resolve: the margin, or 0.001 where they could not.
        units: every unit that was looked at.
        plan: what was chosen.
        conversion: what runs.
        step_microseconds: of the whole step, compiled, in a CUDA graph: "bf16" beside "loka"; empty where nothing could be timed.
        host_microseconds: what the host takes to launch the same steps where they are in no graph.
        speedup: of the whole step over the faster compiled 16-bit one; None: not measured, and `speed_note` says why.
        estimate: where speeds were estimated for a device that is not here.
        metric: mean of the metric in high precision.
        metric_change: of the whole plan, paired, on held-out batches.
        metric_unit: what the interval is over: "examples" or "batches".
        metric_name: "loss", or what the user's own metric is called.
        gradients: how gradients were judged.
        training_change: of the metric after a paired run of training, where the user allowed one.
        seconds: by phase.
        notes: what a reader must know.
        environment: where.
    """

    model: str
    target: str
    margin: float
    used_margin: float
    units: list[TunedUnit]
    plan: Plan
    environment: Environment
    conversion: Conversion | None = None
    step_microseconds: dict[str, float] = msgspec.field(default_factory=dict)
    host_microseconds: dict[str, float] = msgspec.field(default_factory=dict)
    speedup: Interval | None = None
    speed_note: str | None = None
    estimate: Estimate | None = None
    metric: float | None = None
    metric_change: Interval | None = None
    metric_unit: str = "examples"
    metric_name: str = "loss"
    gradients: str = "by the score"
    training_change: Interval | None = None
    seconds: dict[str, float] = msgspec.field(default_factory=dict)
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The headline, in words that claim no more than was measured."""
        parts = [*self.plan.units, *self.plan.tables, *self.plan.collectives]
        if not parts and not any(s.choices for s in self.plan.sites if s.low_precision_share):
            if not self.plan.mods:
                return "nothing was converted"
            if self.speedup is None:
                return f"nothing was converted to low precision; rewritten by {', '.join(self.plan.mods)}, speed not measured"
            speed = f"{self.speedup:.2fx}"
            return f"nothing runs in FP8; in 16 bits with {', '.join(self.plan.mods)} the step is {speed} of the compiled original"
        change = self.metric_change
        if change is None:
            quality = "the metric was not measured"
        else:
            within = "within" if max(-change.low, change.high) <= self.used_margin else "not worse by more than"
            shown = within if change.high <= self.used_margin else "not shown to be within"
            quality = f"{self.metric_name} {change:+.4%}: {shown} {self.used_margin:.2%}"
        speed = "speed not measured" + (f" ({self.speed_note})" if self.speed_note else "")
        if self.speedup is not None:
            speed = f"step {self.speedup:.2fx} over compiled 16 bits"
            return f"{speed}; {quality}"
        return f"{quality}; {speed}{self._say_estimate()}"

    def _say_estimate(self) -> str:
        """The estimated speed-up in words that call it an estimate; empty where there is none."""
        found = None if self.estimate is None else self.estimate.linears
        if self.estimate is None or found is None:
            return ""
        return f"; estimated for {self.estimate.target}: its linears {found:.2fx}"
