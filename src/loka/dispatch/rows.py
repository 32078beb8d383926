"""Make rows for the performance database, from timings on this machine, benchmark records or files in the package.

    rows_of_timings(job, timings, versions)    from timings by `loka.measure.site`, ready for `Database.add`
    rows_of_bench(record)                      from a KernelBench record (`loka bench kernels`): bare kernels, for
                                               chains
    shipped()                                  rows measured on an H200 that ship with the package, so that a machine
                                               without a GPU can plan for one

The variant of a linear's GEMM is spelled `fprop e4m3:row @ e4m3:row fast, weights dynamic`. The end is missing for
wgrad, which has no weight operand. A backend's version names its library and loka, whose quantizers are part of every
time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
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
    """Spell the variant of one GEMM of a linear."""
    end = "" if gemm == "wgrad" else f", weights {weights}"
    return f"{gemm} {a} @ {b}{' fast' if fast_accum else ''}{end}"


def linear_key(gemm: Gemm, way: GemmWay, m: int, k: int, n: int, weights: Weights) -> Key:
    """Return the database key of one GEMM of a linear with M rows, K inputs and N outputs."""
    variant = linear_variant(gemm, str(way.a), str(way.b), fast_accum=way.fast_accum, weights=weights)
    return Key(LINEAR, variant, m, k, n, way.backend)


def versions_of(environment: Environment) -> dict[str, str]:
    """Return the version of each backend in this process."""
    own = f"loka {environment.loka}"
    # cublaslt: torch brings that library
    known = dict.fromkeys(("torch", "cublaslt"), f"torch {environment.torch}")
    known["triton"] = f"triton {environment.triton or ABSENT}"
    found = {BASELINE: f"torch {environment.torch}", "reference": own}
    for name in registry.BACKENDS["scaled_mm"]:
        if name != "reference":
            library = known.get(name) or f"{name} {installed_version(_DISTRIBUTIONS[name]) or ABSENT}"
            found[name] = f"{library}, {own}"
    return found


def machine_here(environment: Environment | None = None) -> Machine:
    """Describe this machine, for matching rows."""
    here = environment or snapshot()
    return Machine(here.device, here.driver, here.torch, versions_of(here))


def origin_of(environment: Environment) -> Origin:
    """Return the origin of rows measured in an environment."""
    return Origin(**{name: getattr(environment, name) for name in Origin.__struct_fields__})


def rows_of_timings(job: SiteJob, timings: Sequence[SiteTiming], versions: dict[str, str]) -> list[PerformanceRow]:
    """Convert a job's timings to rows, except those that were not tried (no GPU, no time left)."""
    return [_row_of_timing(job, timing, versions) for timing in timings if not was_not_tried(timing)]


def was_not_tried(timing: SiteTiming) -> bool:
    """Check whether a refusal says nothing about the kernel: no GPU, or no time left. Both may differ next time."""
    refusal = timing.refusal or ""
    return refusal == NO_GPU or refusal.startswith(("not timed:", "not run:", "timed out"))


def _row_of_timing(job: SiteJob, timing: SiteTiming, versions: dict[str, str]) -> PerformanceRow:
    key = linear_key(job.gemm, timing.candidate, job.m, job.k, job.n, job.weights)
    return PerformanceRow(
        **asdict(key),
        version=versions[key.backend],
        microseconds=_round_interval(timing.microseconds),
        speedup=_round_interval(timing.speedup),
        baseline=_round_interval(timing.baseline),
        errors={d: Errors(**{name: _round(e) for name, e in errors.items()}) for d, errors in timing.errors.items()},
        conformance=None if timing.error is None else _round(timing.error),
        tolerance=None if timing.tolerance is None else _round(timing.tolerance),
        refusal=timing.refusal,
    )


def _round(value: float) -> float:
    """Round to five significant digits: more than a clock resolves, and a third of the file size."""
    return float(f"{value:.5g}")


def _round_interval(interval: Interval | None) -> Interval | None:
    if interval is None:
        return None
    return Interval(value=_round(interval.value), low=_round(interval.low), high=_round(interval.high))


@dataclass(frozen=True)
class Imported:
    """Rows taken from a benchmark record, and how many were skipped for which reason."""

    origin: Origin
    rows: list[PerformanceRow]
    skipped: dict[str, int]  # reason -> rows


def rows_of_bench(record: KernelBench) -> Imported:
    """Convert the bare kernels and bf16 baselines of a benchmark record to rows.

    Rows whose M is not a bucket's edge are skipped, since a row stands for its whole bucket.
    """
    versions = versions_of(record.environment)
    rows: list[PerformanceRow] = []
    skipped: dict[str, int] = {}
    baselines = {row.call: row.microseconds for row in record.rows if row.backend == BASELINE}
    for row in record.rows:
        reason = _reason_to_skip(row, versions)
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


def _reason_to_skip(row: KernelRow, versions: dict[str, str]) -> str | None:
    if row.backend in _DISTRIBUTIONS:
        return f"the record does not say which version of {row.backend} it timed"
    if row.backend not in versions:
        return f"{row.backend!r} is a column of the benchmark, not a backend"
    if row.op not in registry.BACKENDS or set(row.shape) - {"m", "k", "n"} or not row.shape.get("m"):
        return f"{row.op} with shape {row.shape} is no call of the registry"
    if not row.call.partition(" ")[2]:
        return "the call is described by its shape alone"
    if row.shape["m"] != bucket_of(row.shape["m"]):
        return "M is not the edge of a bucket"
    if row.microseconds is None and (row.refusal or "").startswith("not timed"):
        return "not timed"
    return None


def shipped() -> Iterator[tuple[str, PerformanceRows]]:
    """Yield the exports that ship with the package, with their file names."""
    folder: Any = files("loka.dispatch") / "measured"
    for file in sorted(folder.iterdir(), key=lambda f: str(f.name)):
        if file.name.endswith(".json"):
            yield file.name, from_json(file.read_bytes(), PerformanceRows, source=file.name)
