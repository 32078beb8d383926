"""What Probe saw: per site the statistics of its tensors, and per candidate the error and the time."""

from typing import Literal

import msgspec

from loka.records.measurement import Environment, Interval
from loka.records.record import Part, Record
from loka.records.unit import UnitPlan

Gemm = Literal["fprop", "dgrad", "wgrad"]
Role = Literal["x", "w", "dy"]
Safety = Literal["safe", "unsafe", "not measured"]
Speed = Literal["fast", "slow", "not measured"]
FlopsOf = Literal["model", "sites"]
Source = Literal["rows", "copula", "gaussian", "normal"]  # where the operands of an evaluation come from
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
SOURCES: tuple[Source, ...] = ("rows", "copula", "gaussian", "normal")


class TensorStats(Part, frozen=True):
    """The distribution of one operand of a site, over everything sampled."""

    role: Role
    elements: int
    non_finite: int
    mean: float
    std: float
    absmax: float
    abs_p99: float
    abs_p999: float
    kurtosis: float  # excess; 0 for a Gaussian
    zero_fraction: float
    outlier_channels: int  # channels whose absmax exceeds 8 x the median channel's
    histogram_first: int  # log2 |x| of the first bin; bin i counts 2^(first + i) <= |x| < 2^(first + i + 1)
    histogram: list[int]


class FormatRange(Part, frozen=True):
    """The magnitudes a number format holds, so that a report can draw them beside a histogram."""

    name: str
    max: float
    smallest_normal: float
    smallest_subnormal: float


class DistributionError(Part, frozen=True):
    """The errors of one candidate on operands of one origin, each with a 95 % interval."""

    source: Source
    samples: int
    rows: int  # per sample
    mere: Interval
    relative_l2: Interval
    sqnr_db: Interval | None  # None for an exact result
    saturated: Interval  # share of the elements of the worse operand
    underflowed: Interval


class Candidate(Part, frozen=True):
    """One way to run one GEMM of a site, and how it did: tried, and not yet chosen (`Choice`).

    `harm` is what it is judged by: the error weighed by the gradient (`loka.probe.score`). `errors` has one entry per origin of the operands. `mere` to
    `underflowed` repeat the worst of those that count (`ProbeReport.judged_on`), which `distribution` names. The recipes "static" and "delayed" (chains: one
    E4M3 scale per tensor that is given beforehand) have a harm and nothing else; "chain" is what was measured of a linear that runs in a chain.
    """

    gemm: Gemm
    recipe: str
    backend: str
    a: str  # canonical Spec of the left operand
    b: str
    refusal: str | None = None  # why it cannot run here; then nothing below is measured
    distribution: str | None = None  # what the operands were drawn from
    samples: int = 0
    mere: Interval | None = None
    relative_l2: Interval | None = None
    sqnr_db: float | None = None
    saturated: float | None = None
    underflowed: float | None = None
    microseconds: Interval | None = None  # quantisation included
    speedup: Interval | None = None  # over bf16
    errors: list[DistributionError] = msgspec.field(default_factory=list)
    speed_note: str | None = None  # why there is no speed-up
    speed_source: str | None = None  # where it was measured, when it was looked up; None: where the probe ran
    # size of the relative change of the loss, as a share: the usual one, and what it may be; verdicts go by `high`
    harm: Interval | None = None
    # fprop: signed first-order mean on the sampled examples; gradients: share of a step's progress that is lost
    drift: float | None = None

    @property
    def error(self) -> Interval | None:
        """What it is judged by beside `harm`: MERE in fprop, relative L2 in the gradient GEMMs."""
        return self.mere if self.gemm == "fprop" else self.relative_l2


class Cause(Part, frozen=True):
    """A reason for an error that was tested: the error without it, everything else as it was."""

    text: str
    error: float  # of the candidate as it is
    without: float | None  # with the cause removed; None where it cannot be removed
    mod: str | None = None  # the rewrite of the model that would help


class GemmVerdict(Part, frozen=True):
    """What Probe concludes for one GEMM of a site, and why."""

    gemm: Gemm
    safety: Safety
    speed: Speed
    reason: str
    suggested_mod: str | None = None  # the rewrite that would help, and how
    causes: list[Cause] = msgspec.field(default_factory=list)  # of an unsafe verdict, the strongest first


class Alarm(Part, frozen=True):
    """A column of a raw input whose mean is large against its spread: rounding at the size of the mean destroys what varies."""

    column: int
    mean: float
    spread: float  # standard deviation
    text: str  # what was seen, and why it matters
    help: str  # what would help


class Unseen(Part, frozen=True):
    """A product that Probe cannot look at."""

    name: str
    type: str
    reason: str
    flops: (
        float  # of a training step, estimated from its parameters and the rows it was given; 0 where it was not called
    )


class Site(Part, frozen=True):
    """One place in the model where a GEMM happens."""

    name: str  # fully qualified module name
    type: str  # class of the module
    m: int  # rows seen per call (the largest)
    k: int
    n: int
    calls: int
    flops_share: float  # of the GEMM FLOPs of a training step, forward and backward; of which: see `flops_of`
    gemms: list[Gemm]  # those that happen: a site whose input needs no gradient has no dgrad
    stats: list[TensorStats]
    candidates: list[Candidate]
    verdicts: list[GemmVerdict]
    groups: int = 1  # matrices that share the m rows: experts of a grouped GEMM, each row meeting one
    metric_change: Interval | None = None  # relative change of the end metric with this site alone in low precision
    metric_recipe: str | None = None  # the recipe of that measurement
    covariance: str | None = None  # how the covariance of the rows was kept: in full, or approximated, and how
    # why it stays as it is whatever its error (a parametrised weight, a mod that protects it); not to be planned
    kept: str | None = None
    unscored: str | None = None  # why its candidates have no harm
    off: str | None = None  # why Probe stopped looking at it
    alarms: list["Alarm"] = msgspec.field(default_factory=list)  # hazards at its input, by column


class ProbeReport(Record, frozen=True, tag="probe"):
    """Everything a probe found: the evidence that a plan is made from."""

    model: str
    steps: int
    sampled_steps: int
    max_mere: float
    max_gradient_error: float
    flops_of: (
        FlopsOf  # shares are of every GEMM of the model, or (where those were not counted) of the probed sites only
    )
    rows: int  # real rows kept per site, at most; errors are measured on them
    formats: list[FormatRange]  # those the candidates use
    sites: list[Site]
    environment: Environment
    sensitivity: str | None = None  # what `metric_change` of the sites is a change of, and on which examples
    combined_change: Interval | None = None  # of the same metric with `combined_sites` in low precision together
    combined_sites: list[str] = msgspec.field(default_factory=list)
    judged_on: list[Source] = msgspec.field(default_factory=list)  # the worst of these counts
    data: str | None = None  # what the model was trained on while it was watched
    margin: float = 0.0002  # relative change of the loss the whole model may have
    units: int = 0  # that share it: errors of independent units add in squares, so each may cost margin / sqrt(units)
    unseen: list[Unseen] = msgspec.field(default_factory=list)  # products that were not looked at
    notes: list[str] = msgspec.field(default_factory=list)  # what went wrong while looking
    # linears that could run in FP8 from one to the next, or do
    chains: list[UnitPlan] = msgspec.field(default_factory=list)
    alone: dict[str, str] = msgspec.field(default_factory=dict)  # linears that are in no chain, and why
    no_chains: str | None = None  # why none were looked for


Feature = Literal["absmax", "std", "tail", "kurtosis", "zeros", "histogram"]


class Move(Part, frozen=True):
    """One operand of a site whose distribution has moved during training."""

    site: str
    role: Role
    feature: Feature  # absmax, std, tail (absmax / std), kurtosis + 3: log2; zeros: a share; histogram: mean |log2 x|
    since: int  # step from which the comparison window starts
    step: int  # step at which the window that differs starts
    before: float
    after: float
    sigmas: float | None  # change over its standard error; None where windows hold too few looks to know it


class VerdictChange(Part, frozen=True):
    """A site whose candidates are judged differently on its latest rows than on its first."""

    site: str
    before: str
    after: str


class DriftReport(Record, frozen=True, tag="drift"):
    """Windows of training compared, site by site."""

    model: str
    steps: int
    window_steps: int  # length of a window now; windows double when there are many
    sites: int  # compared
    too_short: list[str]  # sites without two complete windows: nothing can be said of them yet
    moves: list[Move]
    judged: bool  # whether verdicts were compared; if not, `changes` says nothing
    changes: list[VerdictChange]
