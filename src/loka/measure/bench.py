"""The kernel benchmark: check every backend of the registry, time the correct ones together, and record everything.

    1. ask every backend whether it supports each call; a refusal is a row with its reason
    2. check it against the exact result on several distributions, optionally in one child process per backend; a crash
       is a row too
    3. time all correct backends together with bf16 on the same operands (checked once more in the timing process)
    4. write rows, measured peak rates and the environment to one KernelBench record

`table` prints for every call the times of bf16 and all backends, and the roofline: the larger of bytes / copy bandwidth
and FLOPs / FP8 rate, both measured in the same run. Results slower than bf16 are kept.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import asdict

from loka.kernels import registry
from loka.measure.adapter import adapter_for
from loka.measure.conformance import worst_of
from loka.measure.device import peaks, snapshot
from loka.measure.gate import judge_backend
from loka.measure.inputs import Shape
from loka.measure.isolation import Outcome, map_isolated
from loka.measure.op import Op
from loka.measure.timing import BASELINE, DEFAULT_REPEATS, Contender, sets_needed, time_capturable
from loka.records import Interval
from loka.records.performance import KernelBench, KernelRow, Peaks


@dataclass(frozen=True)
class BenchConfig:
    """What to measure, on which device, and for how long."""

    op: str = "scaled_mm"
    shapes: Sequence[Shape] = ((2048, 1024, 1024), (8192, 1024, 1024), (8192, 4096, 4096))
    variants: Sequence[str] | None = None  # None: the adapter's defaults
    backends: Sequence[str] | None = None  # None: all of the registry except the reference, which is emulation
    device: str = "cuda"
    repeats: int = DEFAULT_REPEATS
    isolate: bool = True
    seconds: float = 600.0
    distributions: Sequence[str] = field(default=("normal", "outlier_channels"))

    def __post_init__(self) -> None:
        known = registry.BACKENDS.get(self.op)
        if known is None:
            raise ValueError(f"no op {self.op!r}; ops are {', '.join(registry.BACKENDS)}")
        unknown = [name for name in self.backends or () if name not in known]
        if unknown:
            raise ValueError(f"{self.op} has no backend {', '.join(unknown)}; backends are {', '.join(known)}")
        if self.repeats < 3 or self.seconds <= 0 or not self.shapes:
            raise ValueError(f"a benchmark needs shapes, at least 3 repeats and time, got {self}")
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError("device cuda was asked for and this machine has no usable GPU; hint: --device cpu")

    @property
    def names(self) -> tuple[str, ...]:
        """The backends to measure."""
        return tuple(self.backends or (name for name in registry.BACKENDS[self.op] if name != "reference"))


def run(config: BenchConfig, *, command: str | None = None, ceilings: Peaks | None = None) -> KernelBench:
    """Run the benchmark and return its record. `ceilings` avoids measuring the peak rates again."""
    end = time.monotonic() + config.seconds
    adapter = adapter_for(config.op)
    variants = config.variants or adapter.VARIANTS
    calls = adapter.calls(config.shapes, variants)
    checked = check_calls(config, adapter, calls, seconds=0.6 * config.seconds)
    by_call = [{name: checked[name][index] for name in config.names} for index in range(len(calls))]
    ceilings = ceilings or peaks(torch.device(config.device))
    timed = time_calls(config, adapter, calls, by_call, seconds=end - time.monotonic())
    rows = [
        row
        for call, outcomes, timing in zip(calls, by_call, timed, strict=True)
        for row in _make_rows(adapter, call, outcomes, timing, ceilings)
    ]
    methods = {outcome.value["method"] for outcome in timed if outcome.ok} - {None}
    return KernelBench(
        method=", ".join(sorted(methods)) or "nothing was timed",
        peaks=ceilings,
        rows=rows,
        environment=snapshot(command),
        notes=[
            f"conformance on {', '.join(config.distributions)}; "
            + ("each backend in a child process" if config.isolate else "in one process"),
            f"{config.repeats} interleaved repeats, medians, 95 % bootstrap intervals, speed-ups paired by repeat",
            "weights are prepared and scales of activations stored in the order each backend reads without a copy",
        ],
    )


def check_calls(
    config: BenchConfig, adapter: Op[Any], calls: Sequence[Any], *, seconds: float
) -> dict[str, list[Outcome]]:
    """Check every backend on every call. Returns the outcomes by backend, in the order of the calls."""

    def cases(name: str) -> list[dict[str, Any]]:
        common = {
            "op": config.op,
            "backend": name,
            "distributions": list(config.distributions),
            "device": config.device,
        }
        return [{**common, "call": adapter.encode(call)} for call in calls]

    if not config.isolate:
        return {name: [_run_here(check_case, case) for case in cases(name)] for name in config.names}
    # in parallel, so that the children's start and compile times overlap
    with ThreadPoolExecutor(max_workers=max(1, len(config.names))) as pool:
        running = {
            name: pool.submit(map_isolated, "loka.measure.bench:check_case", cases(name), timeout=seconds)
            for name in config.names
        }
        return {name: future.result() for name, future in running.items()}


def _run_here(function: Callable[..., Any], case: dict[str, Any]) -> Outcome:
    try:
        return Outcome(function(**case))
    except Exception as error:  # a failing backend is a row of the table, not the end of it
        return Outcome(refusal=f"{type(error).__name__}: {error}")


def check_case(
    op: str, backend: str, call: dict[str, Any], distributions: Sequence[str], device: str
) -> dict[str, Any]:
    """Check one backend on one call, on every distribution and in the gate. Returns the worst result as JSON values."""
    adapter, target = adapter_for(op), torch.device(device)
    kernel, described = registry.backend(op, backend), adapter.decode(call)
    verdict = kernel.supports(described, target)
    if not verdict:
        return {"ok": False, "reason": verdict.reason, "error": None, "tolerance": None}
    verdicts, reason = [], ""
    for distribution in distributions:
        operands = adapter.operands(described, seed=7, distribution=distribution, device=target)
        verdicts.append(adapter.check(kernel, described, operands))
        if not verdicts[-1]:
            reason = f"wrong on {distribution}: {verdicts[-1].reason}"
            break
    worst = worst_of(verdicts)
    if worst and not (judged := judge_backend(op, kernel, described, target)):
        worst, reason = judged, f"wrong {judged.reason}"
    error = worst.error if math.isfinite(worst.error) else None
    return {"ok": worst.ok, "reason": reason, "error": error, "tolerance": worst.tolerance}


def time_calls(
    config: BenchConfig,
    adapter: Op[Any],
    calls: Sequence[Any],
    checked: Sequence[dict[str, Outcome]],
    *,
    seconds: float,
) -> list[Outcome]:
    """Time the backends that passed, one call after the other, alone on the device."""
    cases: list[dict[str, Any]] = [
        {
            "op": config.op,
            "call": adapter.encode(call),
            "backends": [name for name, outcome in outcomes.items() if outcome.ok and outcome.value["ok"]],
            "device": config.device,
            "repeats": config.repeats,
        }
        for call, outcomes in zip(calls, checked, strict=True)
    ]
    if config.isolate:
        return map_isolated("loka.measure.bench:time_case", cases, timeout=max(seconds, 0.1))
    return [_run_here(time_case, case) for case in cases]


def _make_rows(
    adapter: Op[Any], call: Any, checked: dict[str, Outcome], timed: Outcome, ceilings: Peaks
) -> list[KernelRow]:
    """Make the rows of one call: bf16 first, then every backend in the requested order."""
    floor = roofline_microseconds(adapter, call, ceilings)
    common: dict[str, Any] = {"op": adapter.op, "call": str(call), "shape": adapter.shape(call)}
    rows = []
    rivals = [name for name in timed.value or () if name not in checked and name not in (BASELINE, "method")]
    for name in (BASELINE, *rivals, *checked):
        outcome = checked.get(name, Outcome({"reason": "", "error": None, "tolerance": None}))
        found = outcome.value or {"reason": outcome.refusal, "error": None, "tolerance": None}
        timing = (timed.value or {}).get(name, {"refusal": f"not timed: {timed.refusal}"})
        refusal = found["reason"] or timing.get("refusal")
        rows.append(
            KernelRow(
                **common,
                backend=name,
                refusal=refusal,
                error=found["error"],
                tolerance=found["tolerance"],
                microseconds=None if refusal else Interval(**timing["microseconds"]),
                speedup=Interval(**timing["speedup"]) if timing.get("speedup") and not refusal else None,
                roofline_microseconds=floor if name in checked else None,
                buffers=None if refusal else timing["sets"],
            )
        )
    return rows


def time_case(op: str, call: dict[str, Any], backends: Sequence[str], device: str, repeats: int) -> dict[str, Any]:
    """Time bf16 and backends together on one call. A backend that is wrong or cannot be captured gets a refusal."""
    adapter, target = adapter_for(op), torch.device(device)
    described = adapter.decode(call)
    if target.type == "cuda":
        torch.compiler.reset()  # baselines of other shapes must not count towards torch's recompilation limit
    count = sets_needed(adapter.bytes_moved(described), target)
    sets = [adapter.operands(described, seed=s, distribution="normal", device=target) for s in range(count)]
    thunks = [adapter.baseline(described, operands) for operands in sets]
    candidates = [Contender(BASELINE, thunks, adapter.check_baseline(described, sets[0]))]
    answers: dict[str, Any] = {}
    for name in backends:
        kernel = registry.backend(op, name)
        result = adapter.check(kernel, described, sets[0])
        if result:
            thunks = [adapter.thunk(kernel, described, operands) for operands in sets]
            candidates.append(Contender(name, thunks, result))
        else:
            answers[name] = {"refusal": f"wrong in the process that times: {result.reason}"}
    for name, rival, result in adapter.rivals(described, sets):
        if result:
            candidates.append(Contender(name, rival, result))
        else:
            answers[name] = {"refusal": f"wrong: {result.reason}"}
    timings, refused = time_capturable(candidates, target, repeats)
    answers.update({name: {"refusal": reason} for name, reason in refused.items()})
    base = timings.get(BASELINE)
    for name, timing in timings.items():
        speedup = None if base is None or base is timing else asdict(timing.speedup_over(base))
        answers[name] = {"microseconds": asdict(timing.microseconds()), "speedup": speedup, "sets": timing.sets}
    answers["method"] = next((timing.method for timing in timings.values()), None)
    return answers


def roofline_microseconds(adapter: Op[Any], call: Any, ceilings: Peaks) -> float | None:
    """Return a lower bound on a call's time on this machine; None for a GEMM if the FP8 rate was not measured."""
    moving = adapter.bytes_moved(call) / ceilings.copy_bytes_per_second
    operations = adapter.flops(call)
    if operations and ceilings.fp8_flops is None:
        return None
    return 1e6 * max(moving, operations / ceilings.fp8_flops if ceilings.fp8_flops else 0.0)


def table(record: KernelBench) -> str:
    """Format a record as text: one line per call, then the refusals."""
    backends = list(dict.fromkeys(row.backend for row in record.rows if row.backend != BASELINE))
    lines = [
        "  ".join([f"{'call':<58}", f"{'bf16 us':>9}", *(f"{name:>18}" for name in backends), f"{'roofline us':>11}"])
    ]
    by_call: dict[str, dict[str, KernelRow]] = {}
    for row in record.rows:
        by_call.setdefault(row.call, {})[row.backend] = row
    for call, rows in by_call.items():
        times = (f"{_format_cell(rows.get(name)):>18}" for name in backends)
        cells = [f"{call:<58}", f"{_format_cell(rows.get(BASELINE)):>9}", *times]
        floor = next((row.roofline_microseconds for row in rows.values() if row.roofline_microseconds), None)
        lines.append("  ".join([*cells, f"{floor:>11.1f}" if floor else f"{'-':>11}"]))
    refusals = dict.fromkeys(f"{row.backend}: {row.refusal}" for row in record.rows if row.refusal)
    return "\n".join([*lines, "", *(refusals or ["no refusals"])])


def _format_cell(row: KernelRow | None) -> str:
    if row is None or row.microseconds is None:
        return "-"
    return f"{row.microseconds.value:.2f}" + (f" ({row.speedup.value:.2f}x)" if row.speedup else "")
