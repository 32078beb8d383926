"""Measure candidates that have no database row for this machine yet, with the same result on every rank.

    result = tune(jobs, database, "cuda", seconds=120)

A job is a GEMM of a linear with its candidates (`loka.measure.site.SiteJob`); its M is first rounded to its bucket,
which is what a row stands for. Nothing is measured

    under CUDA-graph capture    a measurement would become part of the graph: skipped, and the result says so
    without a GPU               every candidate is refused, and no row is written

With torch.distributed, rank 0 decides what is missing, measures it, and broadcasts the rows; the other ranks write them
to their own databases (or the same file: the rows are equal). Times differ between ranks by noise. Ranks that chose by
their own times would sometimes run different kernels, and a collective between them would deadlock. A rank on a
different machine than rank 0 raises, since its rows would not be valid there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from loka.dispatch.database import Database, Key, Machine, bucket_of
from loka.dispatch.recipe import USUAL, recipe_named
from loka.dispatch.rows import linear_key, machine_here, origin_of, rows_of_timings, was_not_tried
from loka.kernels import registry
from loka.kernels.scaled_mm import GemmWay
from loka.measure.device import snapshot
from loka.measure.site import SiteJob, SiteTiming, Weights, time_jobs
from loka.records import Environment, ProbeReport
from loka.records.performance import PerformanceRows, RowGroup

Timer = Callable[..., list[list[SiteTiming]]]


@dataclass(frozen=True)
class TuneResult:
    """The result of `tune`."""

    measured: int = 0  # rows written, refusals of kernels included
    known: int = 0  # candidates that had a row already
    unmeasured: dict[str, int] | None = None  # reason -> candidates that still have none
    skipped: str | None = None  # why nothing was tried at all

    def __str__(self) -> str:
        if self.skipped:
            return f"nothing measured: {self.skipped}"
        left = "".join(f"; {count} not: {reason}" for reason, count in (self.unmeasured or {}).items())
        return f"{self.measured} rows measured, {self.known} known{left}"


def key_of(job: SiteJob, candidate: GemmWay) -> Key:
    """Return the database key of one candidate of a job."""
    return linear_key(job.gemm, candidate, job.m, job.k, job.n, job.weights)


def jobs_of_report(
    report: ProbeReport,
    *,
    weights: Weights = "dynamic",
    backends: Sequence[str] | None = None,
    recipes: Sequence[str] | None = None,
) -> list[SiteJob]:
    """List the GEMMs of a report with every recipe on every backend: everything a plan would look up.

    Args:
        report: a record of Probe.
        weights: quantized in every call ("dynamic") or once ("cached").
        backends: backends to measure; None for all but the reference, which is emulation.
        recipes: recipes to measure; None for USUAL.

    Returns:
        Jobs for `tune`.

    Example:
        >>> len(jobs_of_report(report.record))
    """
    names = backends or [name for name in registry.BACKENDS["scaled_mm"] if name != "reference"]
    chosen = [recipe_named(name) for name in recipes or USUAL]
    jobs = []
    for site in report.sites:
        for gemm in site.gemms:
            pairs = dict.fromkeys(o for recipe in chosen if (o := recipe.operands(gemm)) is not None)
            made = tuple(o.on(name) for o in pairs for name in names)
            jobs.append(SiteJob(gemm, site.m, site.k, site.n, made, weights))
    return jobs


def missing_jobs(jobs: Sequence[SiteJob], database: Database, machine: Machine) -> tuple[list[SiteJob], int]:
    """Return jobs at bucket edges with the candidates that have no row, and the number of candidates that have one."""
    wanted: dict[SiteJob, list[GemmWay]] = {}
    for job in jobs:
        weights = "dynamic" if job.gemm == "wgrad" else job.weights  # wgrad has no weight operand: both are the same
        place = replace(job, m=bucket_of(job.m), candidates=(), weights=weights)
        listed = wanted.setdefault(place, [])
        listed += [c for c in job.candidates if c not in listed]
    missing, known = [], 0
    for place, candidates in wanted.items():
        left = tuple(c for c in candidates if database.find(key_of(place, c), machine).row is None)
        known += len(candidates) - len(left)
        if left:
            missing.append(replace(place, candidates=left))
    return missing, known


def tune(
    jobs: Sequence[SiteJob],
    database: Database,
    device: torch.device | str = "cuda",
    *,
    seconds: float = 120.0,
    repeats: int = 15,
    distributions: Sequence[str] = ("normal",),
    environment: Environment | None = None,
    timer: Timer = time_jobs,
) -> TuneResult:
    """Measure missing rows within a time limit. A collective if torch.distributed is initialized: all ranks must call
    it.

    Args:
        jobs: GEMMs with their candidates.
        database: looked up first, then filled.
        device: the device to measure on.
        seconds: time limit for all measurements.
        repeats: repeats per timing.
        distributions: input distributions to measure errors on.
        environment: environment of the rows; by default this process's.
        timer: the function that measures.

    Returns:
        How many rows were measured, known before, and left out.

    Example:
        >>> tune(jobs_of_report(report.record), Database.open(), "cuda", seconds=60)
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return TuneResult(skipped="a CUDA graph is being captured")
    here = environment or snapshot()

    def time(missing: Sequence[SiteJob]) -> list[list[SiteTiming]]:
        return timer(missing, device, repeats=repeats, seconds=seconds, distributions=distributions)

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        result, rows = _measure(jobs, database, here, time)
        database.merge(rows)
        return result
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        answer = [_measure_to_broadcast(jobs, database, here, time)]
    dist.broadcast_object_list(answer, src=0)
    return _merge_broadcast(answer[0], database, here)


def _measure(
    jobs: Sequence[SiteJob], database: Database, here: Environment, time: Timer
) -> tuple[TuneResult, PerformanceRows]:
    machine = machine_here(here)
    missing, known = missing_jobs(jobs, database, machine)
    timed = time(missing) if missing else []
    rows = [
        row
        for job, timings in zip(missing, timed, strict=True)
        for row in rows_of_timings(job, timings, machine.versions)
    ]
    reasons: dict[str, int] = {}
    for timing in (t for timings in timed for t in timings if was_not_tried(t)):
        reasons[timing.refusal or ""] = reasons.get(timing.refusal or "", 0) + 1
    groups = [RowGroup(origin=origin_of(here), rows=rows)] if rows else []
    return TuneResult(measured=len(rows), known=known, unmeasured=reasons or None), PerformanceRows(groups=groups)


def _measure_to_broadcast(
    jobs: Sequence[SiteJob], database: Database, here: Environment, time: Timer
) -> dict[str, Any]:
    """Measure on rank 0 and return the rows as plain values. Errors are returned too, or the other ranks would hang."""
    try:
        result, rows = _measure(jobs, database, here, time)
    except Exception as error:  # re-raised on every rank by `_merge_broadcast`
        return {"error": f"{type(error).__name__}: {error}"}
    machine = msgspec.to_builtins(machine_here(here))
    return {"result": msgspec.to_builtins(result), "rows": msgspec.json.encode(rows), "machine": machine}


def _merge_broadcast(answer: dict[str, Any], database: Database, here: Environment) -> TuneResult:
    if "error" in answer:
        raise ValueError(f"rank 0 could not tune: {answer['error']}")
    tuned, mine = msgspec.convert(answer["machine"], Machine), machine_here(here)
    if tuned != mine:
        raise ValueError(f"rank {dist.get_rank()} runs on {mine}, rank 0 tuned on {tuned}: their rows do not hold here")
    database.merge(msgspec.json.decode(answer["rows"], type=PerformanceRows))
    return msgspec.convert(answer["result"], TuneResult)
