"""What a conversion did: which linear runs what, in which unit, what was kept and why. A record of its own beside the plan, since a plan may meet another machine."""

from typing import Any, ClassVar

import msgspec

from loka.records.measurement import Environment, Interval
from loka.records.probe import FlopsOf
from loka.records.record import Part, Record
from loka.records.unit import UnitPlan, upgrade_units


class Conversion(Record, frozen=True, kw_only=True, tag="conversion"):
    """What runs where. Prints as a summary.

    Args:
        model: the model's class.
        converted: for every linear in low precision, what its GEMMs run.
        kept: for every other one, why it stays.
        units: the chains that were placed, as they run.
        mods: rewrites that were applied before, as spelled.
        frozen: whether weights are quantised once, for serving.
        low_precision_share: of the GEMM FLOPs of a step; None where neither a plan nor an example gave the shapes.
        flops_of: what that is a share of: the model's GEMMs, or the probed sites'.
        notes: what `auto` came to and who refused; what differs from where the plan was made.
        plan: the seal of the plan it came from; None for a recipe.
        environment: where it was done.
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

    @classmethod
    def upgrade(cls, document: dict[str, Any]) -> None:
        """As `Record.upgrade`."""
        upgrade_units(document.get("units"))

    def __str__(self) -> str:
        total = len(self.converted) + len(self.kept)
        share = ""
        if self.low_precision_share is not None:
            of = "the model's" if self.flops_of == "model" else "the probed"
            share = f"; {self.low_precision_share:.1%} of {of} GEMM FLOPs in low precision"
        chained = sum(len(unit.links) for unit in self.units)
        chains = f" ({chained} in {len(self.units)} chain{'s' * (len(self.units) > 1)})" if self.units else ""
        kept = "".join(f"\n  kept {name}: {why}" for name, why in self.kept.items())
        mods = f"\n  mods: {', '.join(self.mods)}" if self.mods else ""
        notes = "".join(f"\n  note: {note}" for note in self.notes)
        return f"{len(self.converted)} of {total} linears converted{chains}, {len(self.kept)} kept{share}{mods}{kept}{notes}"


class QuantizedSite(Part, frozen=True):
    """One linear or layer of experts. `activation` and `weight` are canonical Specs, None for 16 bits."""

    name: str
    type: str
    shape: list[int]  # of the weight
    activation: str | None
    weight: str | None
    reason: str
    weight_error: float | None = None  # relative L2 of the rounding of the weight
    metric_change: Interval | None = None  # relative change of the end metric with this site alone quantised
    fast_accum: bool = False  # sums stay in the tensor cores


class Quantized(Record, frozen=True, tag="quantized"):
    """How a model was quantised: every site, the bytes before and after, the change of the metric."""

    model: str
    recipe: str
    sites: list[QuantizedSite]
    bytes_before: int  # of the checkpoint with every floating tensor in 16 bits
    bytes_after: int
    environment: Environment
    metric: str | None = None  # what was measured, on what; None where nothing was
    bound: float | None = None  # largest accepted relative change of it
    change: Interval | None = None  # of the whole quantised model
    notes: list[str] = msgspec.field(default_factory=list)  # what `auto` came to; sets of sites that were given up
    plan: str | None = None  # the seal of the plan it came from; None for a recipe
    mods: list[str] = msgspec.field(default_factory=list)  # rewrites the model had, as spelled
    units: list[UnitPlan] = msgspec.field(default_factory=list)  # chains, with the magnitudes their scales come from

    @property
    def ratio(self) -> float:
        """Size after over size before."""
        return self.bytes_after / self.bytes_before
