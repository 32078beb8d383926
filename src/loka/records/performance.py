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

from loka.records.measurement import Environment, Interval
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


class Peaks(Part, frozen=True):
    """Ceilings measured on the same device in the same run; None: the device has no such unit, or it was not measured."""

    copy_bytes_per_second: float  # bytes read plus bytes written
    bf16_flops: float | None = None
    fp8_flops: float | None = None


class KernelRow(Part, frozen=True):
    """How one backend did on one call. What refused or was wrong has no time, and says why."""

    op: str
    call: str  # the call's own spelling: shapes, Specs, output type
    shape: dict[str, int]
    backend: str  # "bf16" is the high-precision baseline of the same shape
    refusal: str | None = None  # it cannot run this call, crashed, or its result is wrong; then it was not timed
    error: float | None = None  # worst error of the conformance check; it is green when error <= tolerance
    tolerance: float | None = None
    microseconds: Interval | None = None
    speedup: Interval | None = None  # over the bf16 row of the same call, paired by repeat
    roofline_microseconds: float | None = None  # the larger of bytes / copy bandwidth and FLOPs / peak rate
    buffers: int | None = None  # operand sets rotated through while timing

    def __post_init__(self) -> None:
        if self.refusal is not None and self.microseconds is not None:
            raise ValueError(
                f"{self.backend} on {self.call} was refused ({self.refusal}) and timed: one of them is wrong"
            )

    @property
    def red(self) -> bool:
        """Whether it ran and was wrong."""
        return self.tolerance is not None and (self.error is None or self.error > self.tolerance)


class KernelBench(Record, frozen=True, tag="kernel_bench"):
    """One run of the kernel benchmark."""

    method: str  # how the times were taken
    peaks: Peaks | None
    rows: list[KernelRow]
    environment: Environment
    notes: list[str] = msgspec.field(default_factory=list)
