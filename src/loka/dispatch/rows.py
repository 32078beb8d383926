"""Where rows of the performance database come from: this machine, a benchmark's record, or the files that ship with the package.

    rows_of_timings(job, timings, versions)    what `loka.measure.site` measured, ready for `Database.add`
    rows_of_bench(record)                      a KernelBench record (`loka bench kernels`): bare kernels, for chains
    shipped()                                  rows measured on an H200 and committed, so that a machine without a GPU can plan for one

The variant of a GEMM of a Linear is spelled `fprop e4m3:row @ e4m3:row fast, weights dynamic`; wgrad has no weight among its operands and no such end.
The version of a backend names the library and loka itself, whose quantisers are part of every time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from loka.dispatch.database import Key, Machine, bucket_of
from loka.kernels import registry
from loka.kernels.scaled_mm import GemmWay
from loka.measure.device import snapshot
from loka.measure.site import NO_GPU, SiteJob, SiteTiming, Weights
from loka.measure.timing import BASELINE
from loka.records import Environment, Gemm, Interval, from_json
from loka.records.measurement import installed_version
from loka.records.performance import Errors, KernelBench, KernelRow, Origin, PerformanceRow, PerformanceRows

LINEAR = "linear"
ABSENT = "absent"
_DISTRIBUTIONS = {"deepgemm": "sgl-deep-gemm", "fbgemm": "fbgemm-gpu-genai", "torchao": "torchao"}


def linear_variant(gemm: Gemm, a: str, b: str, *, fast_accum: bool, weights: Weights) -> str:
    """The spelling of one GEMM of a Linear."""
    end = "" if gemm == "wgrad" else f", weights {weights}"
    return f"{gemm} {a} @ {b}{' fast' if fast_accum else ''}{end}"


def linear_key(gemm: Gemm, way: GemmWay, m: int, k: int, n: int, weights: Weights) -> Key:
    """Where the time of one GEMM of a Linear with M rows, K inputs and N outputs is filed."""
    variant = linear_variant(gemm, str(way.a), str(way.b), fast_accum=way.fast_accum, weights=weights)
    return Key(LINEAR, variant, m, k, n, way.backend)


def versions_of(environment: Environment) -> dict[str, str]:
    """What each backend is, in the process that runs."""
    own = f"loka {environment.loka}"
    known = {"torch": f"torch {environment.torch}", "triton": f"triton {environment.triton or ABSENT}"}
    found = {BASELINE: f"torch {environment.torch}", "reference": own}
    for name in registry.BACKENDS["scaled_mm"]:
        if name != "reference":
            library = known.get(name) or f"{name} {installed_version(_DISTRIBUTIONS[name]) or ABSENT}"
            found[name] = f"{library}, {own}"
    return found


def machine_here(environment: Environment | None = None) -> Machine:
    """This machine, as rows must match it."""
    here = environment or snapshot()
    return Machine(here.device, here.driver, here.torch, versions_of(here))


def origin_of(environment: Environment) -> Origin:
    """Where rows measured in this environment come from."""
    return Origin(
        device=environment.device,
        driver=environment.driver,
        torch=environment.torch,
        date=environment.date,
        commit=environment.commit,
        loka=environment.loka,
    )


def rows_of_timings(job: SiteJob, timings: Sequence[SiteTiming], versions: dict[str, str]) -> list[PerformanceRow]:
    """A job's answers as rows; what was not tried (no GPU, no time left) is no row."""
    return [_row_of_timing(job, timing, versions) for timing in timings if not was_not_tried(timing)]


def was_not_tried(timing: SiteTiming) -> bool:
    """Whether an answer says nothing about the kernel: no GPU, or no time left. Both may be different next time."""
    refusal = timing.refusal or ""
    return refusal == NO_GPU or refusal.startswith(("not timed:", "not run:", "timed out"))


def _row_of_timing(job: SiteJob, timing: SiteTiming, versions: dict[str, str]) -> PerformanceRow:
    key = linear_key(job.gemm, timing.candidate, job.m, job.k, job.n, job.weights)
    return PerformanceRow(
        op=key.op,
        variant=key.variant,
        m=key.m,
        k=key.k,
        n=key.n,
        backend=key.backend,
        version=versions[key.backend],
        microseconds=_shorten(timing.microseconds),
        speedup=_shorten(timing.speedup),
        baseline=_shorten(timing.baseline),
        errors={d: Errors(**{name: _short(e) for name, e in errors.items()}) for d, errors in timing.errors.items()},
        conformance=None if timing.error is None else _short(timing.error),
        tolerance=None if timing.tolerance is None else _short(timing.tolerance),
        refusal=timing.refusal,
    )


def _short(value: float) -> float:
    """Five digits: more than a clock gives, and a third of the file."""
    return float(f"{value:.5g}")


def _shorten(interval: Interval | None) -> Interval | None:
    if interval is None:
        return None
    return Interval(value=_short(interval.value), low=_short(interval.low), high=_short(interval.high))


@dataclass(frozen=True)
class Imported:
    """Rows taken from a benchmark's record, and why others were not."""

    origin: Origin
    rows: list[PerformanceRow]
    skipped: dict[str, int]  # reason -> rows


def rows_of_bench(record: KernelBench) -> Imported:
    """Bare kernels and their bf16 baselines as rows; M must be the edge of a bucket, since a row is used for all of it."""
    versions = versions_of(record.environment)
    rows: list[PerformanceRow] = []
    skipped: dict[str, int] = {}
    baselines = {row.call: row.microseconds for row in record.rows if row.backend == BASELINE}
    for row in record.rows:
        reason = _unfit(row, versions)
        if reason is not None:
            skipped[reason] = skipped.get(reason, 0) + 1
            continue
        shape: dict[str, Any] = {name: row.shape.get(name, 0) for name in ("m", "k", "n")}
        rows.append(
            PerformanceRow(
                op=row.op, variant=row.call.partition(" ")[2], **shape, backend=row.backend,
                version=versions[row.backend], microseconds=row.microseconds, speedup=row.speedup,
                baseline=baselines.get(row.call) if row.backend != BASELINE else None,
                conformance=row.error, tolerance=row.tolerance, refusal=row.refusal,
            )
        )  # fmt: skip
    return Imported(origin_of(record.environment), rows, skipped)


def _unfit(row: KernelRow, versions: dict[str, str]) -> str | None:
    if row.backend in _DISTRIBUTIONS:
        return f"the record does not say which version of {row.backend} it timed"
    if row.backend not in versions:
        return f"{row.backend!r} is a column of the benchmark, not a backend"
    if row.op not in registry.BACKENDS or set(row.shape) - {"m", "k", "n"} or not row.shape.get("m"):
        return f"{row.op} with shape {row.shape} is no call of the registry"
    if not row.call.partition(" ")[2]:
        return "the call has no spelling beside its shape"
    if row.shape["m"] != bucket_of(row.shape["m"]):
        return "M is not the edge of a bucket"
    if row.microseconds is None and (row.refusal or "").startswith("not timed"):
        return "not timed"
    return None


def shipped() -> Iterator[tuple[str, PerformanceRows]]:
    """The exports that come with the package, by file name."""
    folder: Any = files("loka.dispatch") / "measured"
    if not folder.is_dir():
        return
    for file in sorted(folder.iterdir(), key=lambda f: str(f.name)):
        if file.name.endswith(".json"):
            yield file.name, from_json(file.read_bytes(), PerformanceRows, source=file.name)
