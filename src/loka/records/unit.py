"""A unit of a plan: what one decision is about, by names alone. Linears that stand alone are `SitePlan`s; what spans several modules is a `UnitPlan`; an embedding table is a
`TablePlan`; what ranks send each other is a `CollectivePlan`."""

from typing import Any, Literal

import msgspec

from loka.records.measurement import Interval
from loka.records.record import Part

UnitKind = Literal["chain"]
ScaleSource = Literal["dynamic", "bounded", "delayed", "calibrated"]
NormName = Literal["none", "block", "layer", "rms", "batch"]
GradientScales = Literal["tensor", "block", "delayed"]


class LinkPlan(Part, frozen=True):
    """One layer of a chain: a linear, and what follows it before the next one.

    Args:
        linear: the linear's name.
        k, n: its inputs and outputs.
        norm: what normalises its output; a batch norm in serving alone, where it is folded into the weight.
        norm_site: the name of that norm.
        activation: by the kernels' names.
        passed: modules that do nothing while the chain runs: the norm, the activation, the dropout.
        callers: modules whose forward calls the activation, or a dropout, as a function.
        called: whether the activation is such a call, and no module of its own.
        eps: of the norm.
        slope: of a leaky ReLU.
        dropout: the p of the dropout behind it, as it was found; None without one. What is drawn in training is up to the p that its module has then; a function must keep this one.
        dropout_site: the name of that nn.Dropout, or of the module whose forward calls a dropout as a function.
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
        """The link where a chain ends: a norm over the whole row stays outside, and what follows it; so does a dropout with nothing in front of it, which a library's GEMM does not draw."""
        alone = self.dropout is not None and self.norm == "none" and self.activation == "none"
        return LinkPlan(linear=self.linear, k=self.k, n=self.n) if alone or self.norm in ("layer", "rms") else self


class Magnitude(Part, frozen=True):
    """The largest magnitudes that were seen at a linear: of its output before the activation, of that output's gradient, of its input; first scales come from them."""

    output: float
    gradient: float = 0.0
    input: float = 0.0


class KernelBucket(Part, frozen=True):
    """The backends of a chain's kernels for batches of up to so many rows, by op. A chain runs several ops in one scale regime; what a linear's GEMM runs alone is a `Choice`."""

    rows: int
    kernels: dict[str, str]  # op -> backend


class UnitEvidence(Part, frozen=True):
    """What was measured about a unit as it would run."""

    speedup: Interval | None = None  # over the compiled 16-bit unit, in company
    # the same, estimated for a device that was not there; never beside a measured one
    estimated: Interval | None = None
    microseconds: Interval | None = None
    harm: Interval | None = None  # predicted relative change of the loss
    metric_change: Interval | None = None  # measured by swapping this unit alone, relative
    error: float | None = None  # relative L2 of the unit's output on real rows


class UnitPlan(Part, frozen=True):
    """How one unit of a plan runs: its layers, scales and kernels, with evidence and reason.

    Args:
        name: of the unit: that of its first linear.
        links: first to last.
        scales: where the scales between layers come from.
        gradient: scales of the gradients.
        bounded_input: the input comes out of a BlockNorm.
        around: the layer whose interactions are fused around the chain, a Wukong layer; None for none.
        magnitudes: where the first scales come from, by linear.
        kernels: what runs, by bucket of rows.
        evidence: what was measured.
        reason: why it runs like this.
        refusals: what else was tried, and why not.
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
        """Names of its linears, first to last."""
        return [link.linear for link in self.links]


def upgrade_units(units: Any) -> None:
    """Units of schema 1 as those of schema 2, in place: a link had `functions`, activations that were plain functions, where it now has `callers`.

    Args:
        units: as decoded from JSON.

    Raises:
        ValueError: a link has such functions; which forward calls them was not written down.
    """
    listed = [unit.get("links") for unit in (units if isinstance(units, list) else []) if isinstance(unit, dict)]
    links = [link for part in listed if isinstance(part, list) for link in part if isinstance(link, dict)]
    lost = [f"{link.get('linear')} ({link['functions']})" for link in links if link.get("functions")]
    if lost:
        raise ValueError(
            f"it does not say which modules call the activations of {'; '.join(lost)}; hint: make it again, with loka.tune(...) or "
            "Probe(model)...evaluate().plan(); a saved probe report is still read: `loka plan REPORT --out PLAN`"
        )
    for link in links:
        link.pop("functions", None)


class TablePlan(Part, frozen=True):
    """How the rows of one embedding table are kept.

    Args:
        name: of the module.
        rows: format of the rows, e.g. `int8:row`.
        count: how many.
        width: of each.
        bytes: of rows and scales in that format.
        float32_bytes: what float32 rows take.
        evidence: what was measured: the relative L2 error of its rows, the change of the metric with this table alone, the time of a lookup.
        reason: why this format.
        refusals: what else was tried, and why not.
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
    """What ranks send each other of the dense matrices.

    Args:
        name: `weights`, which FSDP2 gathers, or `gradients`, which are added up.
        codec: as `loka.comms.parse_codec` reads it; `fp32` is as they are.
        elements: of all matrices, once.
        bytes: of those in this codec.
        float32_bytes: in float32.
        evidence: what was measured: the relative L2 error, for weights the change of the metric, the time to write and read them.
        reason: why this codec.
        refusals: what else was tried, and why not.
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
