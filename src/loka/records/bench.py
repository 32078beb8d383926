"""Kernel benchmarks: one row per call and backend, refusals and red kernels included."""

import msgspec

from loka.records.measurement import Environment, Interval
from loka.records.record import Part, Record


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
