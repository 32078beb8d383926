"""The decision: which GEMM of which site runs on which kernel in which precision, and why."""

import msgspec

from loka.records.measurement import Environment
from loka.records.probe import FlopsOf, Gemm
from loka.records.record import Part, Record


class Choice(Part, frozen=True):
    """What one GEMM will run. `a` and `b` are canonical Specs; both None means high precision."""

    gemm: Gemm
    backend: str
    a: str | None
    b: str | None
    reason: str
    fast_accum: bool = False
    expected_error: float | None = None
    expected_speedup: float | None = None
    refusals: list[str] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        if (self.a is None) != (self.b is None):
            raise ValueError(f"{self.gemm}: both operands are quantised or neither is, got a={self.a!r}, b={self.b!r}")

    @property
    def quantized(self) -> bool:
        """Whether this GEMM runs in low precision."""
        return self.a is not None


class SitePlan(Part, frozen=True):
    """The choices for one site."""

    site: str
    m: int
    k: int
    n: int
    flops_share: float  # of this site's GEMMs, forward and backward, in the step's GEMM FLOPs
    choices: list[Choice]  # one for every GEMM that happens

    @property
    def low_precision_share(self) -> float:
        """The part of `flops_share` that runs in low precision: a linear's GEMMs cost the same."""
        return self.flops_share * sum(c.quantized for c in self.choices) / len(self.choices) if self.choices else 0.0


class Plan(Record, frozen=True, tag="plan"):
    """A plan a person can read, diff and trust."""

    model: str
    recipe: str
    target: str | None  # device the speed-ups are for; None: made for accuracy only
    max_error: float
    max_gradient_error: float
    min_speedup: float | None  # None: accuracy only
    flops_of: FlopsOf  # what the shares are shares of
    sites: list[SitePlan]
    environment: Environment
    notes: list[str] = msgspec.field(default_factory=list)  # what a reader must know before trusting it

    @property
    def low_precision_share(self) -> float:
        """Share of the GEMM FLOPs of a training step that this plan runs in low precision."""
        return sum(site.low_precision_share for site in self.sites)
