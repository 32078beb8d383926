"""The result of a conversion: what every linear runs, in which unit, and why others were kept.

Separate from the plan, since a plan may be applied on another machine.
"""

from typing import ClassVar

import msgspec

from loka.records import prose
from loka.records.measurement import Environment, Interval
from loka.records.probe import FlopsOf
from loka.records.record import Part, Record
from loka.records.unit import UnitPlan


class Conversion(Record, frozen=True, kw_only=True, tag="conversion"):
    """What runs where in a converted model. `str()` gives a summary.

    Args:
        model: the model's class.
        converted: what the GEMMs of every low-precision linear run.
        kept: why every other linear stays in high precision.
        environment: where the model was converted.
        units: the chains that were placed, as they run.
        mods: rewrites that were applied before, with their options.
        frozen: whether weights are quantized once, for serving.
        low_precision_share: share of the GEMM FLOPs of a step; None if neither a plan nor an example gave the shapes.
        flops_of: what that is a share of: the model's GEMMs, or the probed sites'.
        notes: what `auto` resolved to and which backends refused; differences from where the plan was made.
        plan: the seal of the plan it came from; None for a recipe.
    """

    SCHEMA: ClassVar[int] = 2
    schema: int = 2
    model: str
    converted: dict[str, str]
    kept: dict[str, str]
    environment: Environment
    units: list[UnitPlan] = msgspec.field(default_factory=list)
    mods: list[str] = msgspec.field(default_factory=list)
    frozen: bool = False
    low_precision_share: float | None = None
    flops_of: FlopsOf | None = None
    notes: list[str] = msgspec.field(default_factory=list)
    plan: str | None = None

    def __str__(self) -> str:
        total = len(self.converted) + len(self.kept)
        share = ""
        if self.low_precision_share is not None:
            of = "the model's" if self.flops_of == "model" else "the probed"
            share = f"; {self.low_precision_share:.1%} of {of} GEMM FLOPs in low precision"
        chained = sum(len(unit.links) for unit in self.units)
        chains = f" ({chained} in {len(self.units)} chain{'s' * (len(self.units) > 1)})" if self.units else ""
        more = [f"mods: {', '.join(self.mods)}"] if self.mods else []
        more += [f"kept {name}: {why}" for name, why in self.kept.items()]
        more += [f"note: {note}" for note in self.notes]
        lines = (line for text in more for line in prose.fold(text, "  "))
        head = f"{len(self.converted)} of {total} linears converted{chains}, {len(self.kept)} kept{share}"
        return "\n".join([head, *lines])


class QuantizedSite(Part, frozen=True):
    """One linear or expert layer. `activation` and `weight` are canonical Specs; None for 16-bit precision."""

    name: str
    type: str
    shape: list[int]  # of the weight
    activation: str | None
    weight: str | None
    reason: str
    weight_error: float | None = None  # relative L2 error of the quantized weight
    metric_change: Interval | None = None  # relative change of the end metric with this site alone quantized
    fast_accum: bool = False  # sums are accumulated in the tensor cores


class Quantized(Record, frozen=True, tag="quantized"):
    """How a model was quantized: every site, its size before and after, and the change of the metric."""

    model: str
    recipe: str
    sites: list[QuantizedSite]
    bytes_before: int  # of the checkpoint with every floating-point tensor in 16-bit
    bytes_after: int
    environment: Environment
    metric: str | None = None  # the metric and its data; None if nothing was measured
    bound: float | None = None  # largest accepted relative change of the metric
    change: Interval | None = None  # measured with the whole quantized model
    notes: list[str] = msgspec.field(default_factory=list)  # what `auto` resolved to; sets of sites that were given up
    plan: str | None = None  # the seal of the plan it came from; None for a recipe
    mods: list[str] = msgspec.field(default_factory=list)  # mods applied to the model, with their options
    units: list[UnitPlan] = msgspec.field(default_factory=list)  # chains, with the magnitudes their scales come from

    @property
    def ratio(self) -> float:
        """Size after quantization divided by size before."""
        return self.bytes_after / self.bytes_before
