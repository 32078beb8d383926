"""Rows made by hand, so that a database can be asked about any machine."""

from typing import Any

from loka.dispatch import rows as rows_module
from loka.dispatch.database import Machine
from loka.kernels.scaled_mm import GemmWay
from loka.measure.site import SiteJob, SiteTiming
from loka.records import Interval
from loka.records.performance import Errors, Origin, PerformanceRow

H200 = Machine("NVIDIA H200", "580", "2.11.0", {"torch": "torch 2.11.0, loka 0", "triton": "triton 3.6, loka 0", "bf16": "torch 2.11.0"})  # fmt: skip


def interval(value: float, half: float = 0.0) -> Interval:
    return Interval(value=value, low=value - half, high=value + half)


def origin(**changes: Any) -> Origin:
    fields: dict[str, Any] = {"device": "NVIDIA H200", "driver": "580", "torch": "2.11.0", "date": "2026-01-02", "commit": "abc", "loka": "0"}  # fmt: skip
    return Origin(**{**fields, **changes})


def row(**changes: Any) -> PerformanceRow:
    """rowwise fprop on torch, 10 us where bf16 takes 15."""
    variant = rows_module.linear_variant("fprop", "e4m3:row", "e4m3:row", fast_accum=True, weights="dynamic")
    fields: dict[str, Any] = {
        "op": "linear", "variant": variant, "m": 2048, "k": 1024, "n": 512, "backend": "torch",
        "version": "torch 2.11.0, loka 0", "microseconds": interval(10.0, 0.1), "speedup": interval(1.5, 0.02),
        "baseline": interval(15.0, 0.1), "errors": {"normal": Errors(mere=0.13, relative_l2=0.04)},
        "conformance": 0.001, "tolerance": 0.002,
    }  # fmt: skip
    return PerformanceRow(**{**fields, **changes})


def fake_timer(microseconds: float = 10.0) -> Any:
    """In place of a GPU: every candidate takes this long, bf16 15 us; remembers what it was asked."""
    asked: list[SiteJob] = []

    def timer(jobs: list[SiteJob], device: Any, **options: Any) -> list[list[SiteTiming]]:
        asked.extend(jobs)
        return [[_timing(c, microseconds) for c in job.candidates] for job in jobs]

    timer.asked = asked  # type: ignore[attr-defined]
    return timer


def _timing(candidate: GemmWay, microseconds: float) -> SiteTiming:
    return SiteTiming(
        candidate,
        microseconds=interval(microseconds),
        speedup=interval(15.0 / microseconds),
        baseline=interval(15.0),
        error=0.001,
        tolerance=0.002,
        errors={"normal": {"mere": 0.13, "relative_l2": 0.04}},
    )
