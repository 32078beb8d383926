"""What a post-training quantisation did: per site how, or why not, and what it cost the end metric."""

import msgspec

from loka.records.measurement import Environment, Interval
from loka.records.record import Part, Record
from loka.records.unit import UnitPlan


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
    """A quantised model."""

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
