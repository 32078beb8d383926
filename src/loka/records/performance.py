"""Rows of the performance database: what one way to run one call cost on one machine, and how wrong it was.

A row is keyed by everything that decides its time:

    op, variant      linear | "fprop e4m3:row @ e4m3:row fast, weights dynamic"     a GEMM of a Linear, quantisation included
                     scaled_mm, quantize, norm_quantize, fused_linear | the kernel's own spelling of the call without its shape
    m, k, n          M is the bucket's edge it was measured at (`loka.dispatch.database.bucket_of`); 0 where the op has no such dimension
    backend, version "bf16" is the high-precision form of the same call
    device, driver, torch

Everything else is its value. A refused row (the kernel cannot run this, crashed, or is wrong) has no time and says why. `PerformanceRows` is the
exchange format: rows of one machine and one run share a group, so that a file does not repeat them thousands of times.
"""

import msgspec

from loka.records.measurement import Interval
from loka.records.record import Part, Record


class Errors(Part, frozen=True):
    """How far the result is from float64 on one distribution of inputs."""

    mere: float
    relative_l2: float


class PerformanceRow(Part, frozen=True):
    """One call on one backend, within a group that says where and when."""

    op: str
    variant: str
    m: int
    k: int
    n: int
    backend: str
    version: str
    microseconds: Interval | None = None
    speedup: Interval | None = None  # over bf16, paired by repeat
    baseline: Interval | None = None  # microseconds of that bf16
    errors: dict[str, Errors] = msgspec.field(default_factory=dict)  # by distribution of the inputs
    conformance: float | None = None  # worst error of the gate; green when at most the tolerance
    tolerance: float | None = None
    refusal: str | None = None

    def __post_init__(self) -> None:
        if self.refusal is None and self.microseconds is None:
            raise ValueError(
                f"{self.backend} on {self.op} {self.variant}: a row has a time, or a refusal that says why not"
            )


class Origin(Part, frozen=True):
    """Where, when and by which code rows were measured."""

    device: str
    driver: str | None
    torch: str
    date: str  # ISO 8601, UTC
    commit: str | None
    loka: str


class RowGroup(Part, frozen=True):
    """Rows of one origin."""

    origin: Origin
    rows: list[PerformanceRow]


class PerformanceRows(Record, frozen=True, tag="performance"):
    """An export of the performance database."""

    groups: list[RowGroup]
    notes: list[str] = msgspec.field(default_factory=list)
