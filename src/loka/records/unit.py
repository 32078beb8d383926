"""Units of a plan, i.e. what one decision is about. They refer to modules by name only.

A single linear is a `SitePlan`, a chain of several modules a `UnitPlan`, an embedding table a `TablePlan`, and the
communication between ranks a `CollectivePlan`.
"""

from typing import Literal

import msgspec

from loka.records.measurement import Interval
from loka.records.record import Part

UnitKind = Literal["chain"]
ScaleSource = Literal["dynamic", "bounded", "delayed", "calibrated"]
NormName = Literal["none", "block", "layer", "rms", "batch"]
GradientScales = Literal["tensor", "block", "delayed"]


class LinkPlan(Part, frozen=True):
    """One layer of a chain: a linear, and what follows it before the next linear.

    Args:
        linear: name of the linear.
        k, n: its inputs and outputs.
        norm: the norm of its output. Batch norm occurs in serving only, where it is folded into the weight.
        norm_site: name of the norm module.
        activation: name of the activation, as in the kernels.
        passed: modules that are no-ops while the chain runs: the norm, the activation, the dropout.
        callers: modules whose forward calls the activation or a dropout as a function.
        called: whether the activation is such a function call instead of a module.
        eps: eps of the norm.
        slope: negative slope of a leaky ReLU.
        dropout: p of the dropout after it, when the model was inspected; None without one. In training a dropout
            module's current p is used; a dropout called as a function must keep this one.
        dropout_site: name of the nn.Dropout, or of the module whose forward calls a dropout as a function.
    """

    linear: str
    k: int
    n: int
    norm: NormName = "none"
    norm_site: str | None = None
    activation: str = "none"
    passed: list[str] = msgspec.field(default_factory=list)
    callers: list[str] = msgspec.field(default_factory=list)
    called: bool = False
    eps: float = 1e-5
    slope: float = 0.01
    dropout: float | None = None
    dropout_site: str | None = None

    def as_last(self) -> "LinkPlan":
        """Return this link as the last of a chain.

        A norm over whole rows and what follows it stay outside the chain, and so does a dropout directly after the
        linear, which a library GEMM cannot apply.
        """
        alone = self.dropout is not None and self.norm == "none" and self.activation == "none"
        return LinkPlan(linear=self.linear, k=self.k, n=self.n) if alone or self.norm in ("layer", "rms") else self


class Magnitude(Part, frozen=True):
    """Largest absolute values (amax) seen at a linear: its output before the activation, that output's gradient, its
    input.

    The first scales of a chain are computed from them.
    """

    output: float
    gradient: float = 0.0
    input: float = 0.0


class KernelBucket(Part, frozen=True):
    """The backends of a chain's kernels, for batches of up to `rows` rows."""

    rows: int
    kernels: dict[str, str]  # op -> backend


class UnitEvidence(Part, frozen=True):
    """Measurements of a unit as it would run."""

    speedup: Interval | None = None  # over the compiled 16-bit unit, both cut out of the model
    estimated: Interval | None = None  # the same, estimated for an absent device; only if `speedup` is None
    microseconds: Interval | None = None
    harm: Interval | None = None  # predicted relative change of the loss
    metric_change: Interval | None = None  # measured by swapping this unit alone, relative
    error: float | None = None  # relative L2 of the unit's output on real rows


class UnitPlan(Part, frozen=True):
    """How one unit of a plan runs: its layers, scales and kernels, with evidence and reason.

    Args:
        name: the name of its first linear.
        links: its layers, first to last.
        kind: always "chain".
        scales: where the scales between layers come from.
        gradient: kind of scales of the gradients.
        bounded_input: whether the input comes from a BlockNorm.
        around: name of the Wukong layer whose interactions are fused around the chain, if any.
        magnitudes: source of the first scales, by linear.
        kernels: backends by bucket of rows.
        evidence: measurements.
        reason: why it runs like this.
        refusals: alternatives that were tried, and why they were refused.
    """

    name: str
    links: list[LinkPlan]
    kind: UnitKind = "chain"
    scales: ScaleSource = "delayed"
    gradient: GradientScales = "delayed"
    bounded_input: bool = False
    around: str | None = None
    magnitudes: dict[str, Magnitude] = msgspec.field(default_factory=dict)
    kernels: list[KernelBucket] = msgspec.field(default_factory=list)
    evidence: UnitEvidence | None = None
    reason: str = ""
    refusals: list[str] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.links:
            raise ValueError(f"unit {self.name}: a chain needs at least one linear")
        for before, after in zip(self.links, self.links[1:], strict=False):
            if before.n != after.k:
                raise ValueError(
                    f"unit {self.name}: {before.linear} gives {before.n} features, {after.linear} takes {after.k}"
                )

    @property
    def linears(self) -> list[str]:
        """The names of its linears, first to last."""
        return [link.linear for link in self.links]


class TablePlan(Part, frozen=True):
    """How the rows of one embedding table are stored.

    Args:
        name: name of the module.
        rows: format of the rows, e.g. `int8:row`.
        count: number of rows.
        width: elements per row.
        bytes: size of rows and scales in that format.
        float32_bytes: size in float32.
        evidence: relative L2 error of its rows, metric change with this table alone, time of a lookup.
        reason: why this format.
        refusals: alternatives that were tried, and why they were refused.
    """

    name: str
    rows: str
    count: int
    width: int
    bytes: int
    float32_bytes: int
    kind: Literal["table"] = "table"
    evidence: UnitEvidence | None = None
    reason: str = ""
    refusals: list[str] = msgspec.field(default_factory=list)


class CollectivePlan(Part, frozen=True):
    """How ranks exchange the dense matrices.

    Args:
        name: `weights`, which FSDP2 gathers, or `gradients`, which are reduced.
        codec: a codec for `loka.comms.parse_codec`; `fp32` sends them unchanged.
        elements: elements of all matrices, each counted once.
        bytes: their size in this codec.
        float32_bytes: their size in float32.
        evidence: relative L2 error, metric change (weights only), time to encode and decode.
        reason: why this codec.
        refusals: alternatives that were tried, and why they were refused.
    """

    name: Literal["weights", "gradients"]
    codec: str
    elements: int
    bytes: int
    float32_bytes: int
    kind: Literal["collective"] = "collective"
    evidence: UnitEvidence | None = None
    reason: str = ""
    refusals: list[str] = msgspec.field(default_factory=list)
