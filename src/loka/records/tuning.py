"""The result of `loka.tune`: measurements of every unit, and of the whole model's step and metric against bf16."""

import msgspec

from loka.records.conversion import Conversion
from loka.records.measurement import Environment, Interval
from loka.records.plan import Plan
from loka.records.record import Part, Record


class TunedUnit(Part, frozen=True):
    """One unit as seen by tuning.

    Args:
        name: name of its first linear, of the table, or of the collective.
        linears: names of its linears; empty for a table or a collective.
        way: what runs: "chain", a recipe, a format of rows, a codec, or "high".
        flops_share: its share of the GEMM FLOPs of the observed linears.
        reason: why it runs this way.
        harm: predicted relative change of the loss.
        speedup: over the compiled 16-bit unit, both cut out of the model.
        estimated: the same, estimated for an absent device; only if `speedup` is None.
        metric_change: measured by swapping in this unit alone.
        alarms: what needs attention, such as input columns with a large offset.
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
        method: description of the method and its known error.
        rows: rows per call on the target divided by rows per call here.
        linears: speed-up of all linears together over compiled 16-bit ones, other modules not counted; None if nothing
            is converted.
    """

    target: str
    method: str
    rows: float
    linears: Interval | None = None


class SizeEstimate(Part, frozen=True):
    """The estimated gain of FP8 for a model of one size."""

    size: str  # name of the size
    rows: int  # rows of a batch
    linears: Interval  # speed-up of all linears together, forward and backward, over compiled 16-bit ones
    share: float  # share of their GEMM FLOPs in units that are estimated to be faster


class SizeEstimates(Record, frozen=True, tag="size_estimates"):
    """Estimates for an absent device, at the size that was run and at a larger one. Nothing of it was measured."""

    target: str  # the device
    method: str  # description of the method and its known error
    here: SizeEstimate  # the model that was run
    large: SizeEstimate  # a model of a size that FP8 is meant for
    environment: Environment  # where the estimates were computed


class Tuning(Record, frozen=True, tag="tuning"):
    """The result of one call of `loka.tune`.

    Args:
        model: the model's class.
        target: "train" or "serve".
        margin: relative change of the metric that counts as no change, as requested.
        used_margin: the margin, or 0.001 if the held-out data could not resolve it.
        units: every unit that was considered.
        plan: what was chosen.
        environment: where it was measured.
        conversion: what runs.
        step_microseconds: times of the whole compiled step in a CUDA graph, "bf16" and "loka"; empty if not timed.
        host_microseconds: host time to launch the same steps without a CUDA graph.
        speedup: speed-up of the whole step over the faster compiled 16-bit one; None if not measured.
        speed_note: why there is no speed-up.
        estimate: speeds estimated for an absent device.
        metric: mean of the metric in high precision.
        metric_change: change by the whole plan, paired, on held-out batches.
        metric_unit: what the interval is taken over: "examples" or "batches".
        metric_name: "loss", or the name of the user's own metric.
        gradients: how gradients were judged.
        training_change: change of the metric after a paired training run, if the user allowed one.
        kernels: number of kernel calls of the step that were judged by the conformance gate, at their own shapes.
        seconds: time spent, by phase.
        notes: caveats.
        arguments: of the call, as text, with digests of the model's shapes and of its losses.
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
    kernels: int = 0
    seconds: dict[str, float] = msgspec.field(default_factory=dict)
    notes: list[str] = msgspec.field(default_factory=list)
    arguments: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """A one-line summary that claims no more than was measured."""
        parts = [*self.plan.units, *self.plan.tables, *self.plan.collectives]
        if not parts and not any(s.choices for s in self.plan.sites if s.low_precision_share):
            if not self.plan.mods:
                return "nothing was converted"
            if self.speedup is None:
                return f"nothing was converted to low precision; rewritten by {', '.join(self.plan.mods)}, speed not measured"
            speed = f"{self.speedup:.2fx}"
            return f"nothing runs in FP8; with {', '.join(self.plan.mods)} the 16-bit step is {speed} over the compiled original"
        change = self.metric_change
        if change is None:
            quality = "the metric was not measured"
        else:
            within = "within" if max(-change.low, change.high) <= self.used_margin else "not worse by more than"
            shown = within if change.high <= self.used_margin else "not shown to be within"
            quality = f"{self.metric_name} {change:+.4%}: {shown} {self.used_margin:.2%}"
        speed = "speed not measured" + (f" ({self.speed_note})" if self.speed_note else "")
        if self.speedup is not None:
            speed = f"step {self.speedup:.2fx} over the compiled 16-bit step"
            return f"{speed}; {quality}"
        return f"{quality}; {speed}{self._describe_estimate()}"

    def _describe_estimate(self) -> str:
        """Describe the estimated speed-up, labelled as an estimate; empty if there is none."""
        found = None if self.estimate is None else self.estimate.linears
        if self.estimate is None or found is None:
            return ""
        return f"; estimated for {self.estimate.target}: its linears {found:.2fx}"
