"""Probe's results: statistics of the tensors at every site, and the error and time of every candidate."""

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
    """The range of a number format, drawn next to histograms in reports."""

    name: str
    max: float
    smallest_normal: float
    smallest_subnormal: float


class DistributionError(Part, frozen=True):
    """The errors of one candidate on operands from one source, each with a 95 % interval."""

    source: Source
    samples: int
    rows: int  # per sample
    mere: Interval
    relative_l2: Interval
    sqnr_db: Interval | None  # None for an exact result
    saturated: Interval  # share of the elements, of the operand where it is larger
    underflowed: Interval


class Candidate(Part, frozen=True):
    """One way to run one GEMM of a site, and its results. It was evaluated, not yet chosen (`Choice`).

    It is judged by `harm`, the error weighted by the gradient (`loka.probe.score`). `errors` has one entry per source
    of the operands; `mere` to `underflowed` repeat the worst of those that count (`ProbeReport.judged_on`), which
    `distribution` names. The recipes "static" and "delayed" (for chains: one E4M3 scale per tensor, known before the
    call) only have a `harm`; "chain" was measured at a linear that already runs in a chain.
    """

    gemm: Gemm
    recipe: str
    backend: str
    a: str  # canonical Spec of the left operand
    b: str
    refusal: str | None = None  # why it cannot run here; then nothing below is measured
    distribution: str | None = None  # source of the operands
    samples: int = 0
    mere: Interval | None = None
    relative_l2: Interval | None = None
    sqnr_db: float | None = None
    saturated: float | None = None
    underflowed: float | None = None
    microseconds: Interval | None = None  # quantization included
    speedup: Interval | None = None  # over bf16
    errors: list[DistributionError] = msgspec.field(default_factory=list)
    speed_note: str | None = None  # why there is no speed-up
    speed_source: str | None = None  # where a looked-up speed was measured; None: where the probe ran
    # predicted size of the relative change of the loss: `value` is typical, `high` the largest to expect; verdicts use
    # `high`
    harm: Interval | None = None
    # fprop: signed first-order mean on the sampled examples; gradient GEMMs: lost share of a step's progress
    drift: float | None = None

    @property
    def error(self) -> Interval | None:
        """The error it is judged by besides `harm`: MERE in fprop, relative L2 in the gradient GEMMs."""
        return self.mere if self.gemm == "fprop" else self.relative_l2


class Cause(Part, frozen=True):
    """A tested cause of an error: the error with and without it, all else unchanged."""

    text: str
    error: float  # of the candidate as it is
    without: float | None  # with the cause removed; None if it cannot be removed
    mod: str | None = None  # the rewrite of the model that would help


class GemmVerdict(Part, frozen=True):
    """Probe's conclusion for one GEMM of a site, and why."""

    gemm: Gemm
    safety: Safety
    speed: Speed
    reason: str
    suggested_mod: str | None = None  # the rewrite that would help, and how
    causes: list[Cause] = msgspec.field(default_factory=list)  # of an unsafe verdict, the strongest first


class Alarm(Part, frozen=True):
    """An input column whose mean is large compared with its spread, so that rounding destroys what varies."""

    column: int
    mean: float
    spread: float  # standard deviation
    text: str  # the observation, and why it matters
    help: str  # what would help


class Unseen(Part, frozen=True):
    """A product that Probe cannot observe."""

    name: str
    type: str
    reason: str
    flops: float  # per training step, estimated from its parameters and input rows; 0 if it was not called


class Site(Part, frozen=True):
    """A module of the model that runs GEMMs."""

    name: str  # fully qualified module name
    type: str  # class of the module
    m: int  # rows seen per call (the largest)
    k: int
    n: int
    calls: int
    flops_share: float  # of the GEMM FLOPs of a training step, forward and backward (`ProbeReport.flops_of`)
    gemms: list[Gemm]  # those that run: a site whose input needs no gradient has no dgrad
    stats: list[TensorStats]
    candidates: list[Candidate]
    verdicts: list[GemmVerdict]
    groups: int = 1  # weight matrices that share the m rows: experts of a grouped GEMM, one per row
    metric_change: Interval | None = None  # relative change of the end metric with this site alone in low precision
    metric_recipe: str | None = None  # the recipe of that measurement
    covariance: str | None = None  # whether the covariance of the rows was stored in full or approximated, and how
    # why it must not be converted whatever its error (a parametrized weight, a mod that protects it)
    kept: str | None = None
    unscored: str | None = None  # why its candidates have no harm
    off: str | None = None  # why Probe stopped observing it
    alarms: list["Alarm"] = msgspec.field(default_factory=list)  # hazards at its input, by column


class ProbeReport(Record, frozen=True, tag="probe"):
    """All results of a probe: the evidence that plans are made from."""

    model: str
    steps: int
    sampled_steps: int
    max_mere: float
    max_gradient_error: float
    flops_of: FlopsOf  # shares are of all GEMMs of the model, or (if those were not counted) of the probed sites
    rows: int  # largest number of real rows kept per site, to measure errors on
    formats: list[FormatRange]  # those the candidates use
    sites: list[Site]
    environment: Environment
    sensitivity: str | None = None  # the metric of the sites' `metric_change`, and the examples it was measured on
    combined_change: Interval | None = None  # of the same metric with `combined_sites` in low precision together
    combined_sites: list[str] = msgspec.field(default_factory=list)
    judged_on: list[Source] = msgspec.field(default_factory=list)  # the worst of these counts
    data: str | None = None  # what the model was trained on while it was observed
    margin: float = 0.0002  # relative change of the loss allowed for the whole model
    units: int = 0  # sharing the margin: independent errors add in squares, so each may cost margin / sqrt(units)
    unseen: list[Unseen] = msgspec.field(default_factory=list)  # products that were not observed
    notes: list[str] = msgspec.field(default_factory=list)  # what went wrong during observation
    # linears that can keep activations in FP8 from one to the next, or already do
    chains: list[UnitPlan] = msgspec.field(default_factory=list)
    alone: dict[str, str] = msgspec.field(default_factory=dict)  # linears in no chain, and why
    no_chains: str | None = None  # why chains were not searched for
    # chains of which a kernel fails the conformance gate: kernel, call and fault, by the chain's name
    wrong_chains: dict[str, str] = msgspec.field(default_factory=dict)


Feature = Literal["absmax", "std", "tail", "kurtosis", "zeros", "histogram"]


class Move(Part, frozen=True):
    """An operand of a site whose distribution shifted during training."""

    site: str
    role: Role
    feature: Feature  # absmax, std, tail (absmax / std), kurtosis + 3: log2; zeros: a share; histogram: mean |log2 x|
    since: int  # first step of the window it is compared with
    step: int  # first step of the window that differs
    before: float
    after: float
    sigmas: float | None  # change over its standard error; None if the windows hold too few samples


class VerdictChange(Part, frozen=True):
    """A site whose candidates are judged differently on its latest rows than on its first."""

    site: str
    before: str
    after: str


class DriftReport(Record, frozen=True, tag="drift"):
    """Windows of training compared, site by site."""

    model: str
    steps: int
    window_steps: int  # current length of a window; it doubles when there are too many windows
    sites: int  # number of sites compared
    too_short: list[str]  # sites without two complete windows yet
    moves: list[Move]
    judged: bool  # whether verdicts were compared; if not, `changes` is meaningless
    changes: list[VerdictChange]
