"""Rows of the performance database: time and error of one call on one backend and one machine.

A row is keyed by everything that affects its time:

    op, variant      linear | "fprop e4m3:row @ e4m3:row fast, weights dynamic": a GEMM of a linear, quantization
                     included; scaled_mm, quantize, norm_quantize, fused_linear | the kernel's spelling of the call
                     without its shape
    m, k, n          M is the bucket's edge it was measured at (`loka.dispatch.database.bucket_of`); 0 for an op without
                     such a dimension
    backend, version "bf16" is the high-precision form of the same call
    device, driver, torch

A refused row (the kernel does not support the call, crashed, or is wrong) has a reason instead of a time.
`PerformanceRows` is the exchange format: rows of one machine and one run share a group, so that a file does not repeat
their origin.
"""

import msgspec

from loka.records.measurement import Environment, Interval
from loka.records.record import Part, Record


class Errors(Part, frozen=True):
    """Errors compared with float64 on one distribution of inputs."""

    mere: float
    relative_l2: float


class PerformanceRow(Part, frozen=True):
    """One call on one backend. Its `RowGroup` says where and when it was measured."""

    op: str
    variant: str
    m: int
    k: int
    n: int
    backend: str
    version: str
    microseconds: Interval | None = None
    speedup: Interval | None = None  # over bf16, paired by repeat
    baseline: Interval | None = None  # microseconds of that bf16 call
    errors: dict[str, Errors] = msgspec.field(default_factory=dict)  # by distribution of the inputs
    conformance: float | None = None  # worst error in the conformance check; passes if at most the tolerance
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
    """Peak rates measured on the same device in the same run; None if not supported or not measured."""

    copy_bytes_per_second: float  # bytes read plus bytes written
    bf16_flops: float | None = None
    fp8_flops: float | None = None


class KernelRow(Part, frozen=True):
    """The result of one backend on one call. A backend that refused or was wrong has a reason instead of a time."""

    op: str
    call: str  # the call spelled out: shapes, Specs, output type
    shape: dict[str, int]
    backend: str  # "bf16" is the high-precision baseline of the same shape
    refusal: str | None = None  # it does not support this call, crashed, or its result is wrong; then it was not timed
    error: float | None = None  # worst error in the conformance check; passes if error <= tolerance
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
        """Whether it ran and failed the conformance check."""
        return self.tolerance is not None and (self.error is None or self.error > self.tolerance)


class KernelBench(Record, frozen=True, tag="kernel_bench"):
    """One run of the kernel benchmark."""

    method: str  # how the times were taken
    peaks: Peaks | None
    rows: list[KernelRow]
    environment: Environment
    notes: list[str] = msgspec.field(default_factory=list)
