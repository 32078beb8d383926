"""Time what is green, side by side, and hold it against a bar."""

import traceback
from collections.abc import Callable
from typing import Any

import torch
from generative_kernels_plan import Plan, say

from loka.formats import QTensor
from loka.measure.conformance import Conformance
from loka.measure.timing import CaptureError, Contender, Timing, time_together
from loka.records.performance import KernelRow


def fit(plan: Plan, op: str, call: str, shape: dict[str, int], ways: dict[str, tuple[list[Callable[[], Any]], Conformance]],
        base: str) -> dict[str, Timing]:  # fmt: skip
    """Time together what is green and can be captured; write a row for each way."""
    refused = {name: verdict.reason for name, (_, verdict) in ways.items() if not verdict}
    candidates = [Contender(name, thunks, verdict) for name, (thunks, verdict) in ways.items() if verdict]
    timings: list[Timing] = []
    while candidates:
        try:
            timings = time_together(candidates, plan.device, repeats=plan.repeats)
            break
        except CaptureError as error:
            culprit = next(c for c in candidates if str(error).startswith(f"{c.name} "))
            refused[culprit.name] = str(error)
            candidates = [c for c in candidates if c is not culprit]
        except Exception as error:
            traceback.print_exc()
            refused |= {c.name: f"the run of all failed: {type(error).__name__}: {error}" for c in candidates}
            candidates = []
            if plan.device.type == "cuda":
                torch.cuda.synchronize()
    found = {t.name: t for t in timings}
    for name, (thunks, verdict) in ways.items():
        timing = found.get(name)
        speedup = timing.speedup_over(found[base]) if timing and base in found and name != base else None
        interval = timing.microseconds() if timing else None
        plan.rows_out.append(KernelRow(
            op=op, call=call, shape=shape, backend=name, refusal=refused.get(name), microseconds=interval, speedup=speedup,
            error=verdict.error if verdict.error < float("inf") else None, tolerance=verdict.tolerance, buffers=len(thunks),
        ))  # fmt: skip
        shown = f"{interval.value:9.1f} us" if interval else f"        - {refused.get(name, '')[:120]}"
        print(f"  {name:<46}{shown}" + (f"  {speedup.value:5.2f}x" if speedup else ""), flush=True)
    return found


def guarded(run: Callable[[], Any], judge: Callable[[Any], Conformance]) -> Conformance:
    """A verdict, whatever happens."""
    try:
        return judge(run())
    except Exception as error:
        return Conformance(False, float("inf"), 0.0, f"{type(error).__name__}: {str(error)[:300]}")


def close(law: torch.Tensor, allowed: float) -> Callable[[Any], Conformance]:
    """Relative L2 distance to a result in high precision."""

    def judge(found: Any) -> Conformance:
        values = found.dequantize() if isinstance(found, QTensor) else found
        error = float((values.double() - law.double()).norm() / law.double().norm())
        ok = error <= allowed
        return Conformance(ok, error, allowed, "" if ok else f"relative L2 error {error:.3g}, allowed {allowed:g}")

    return judge


def bar(plan: Plan, what: str, value: float | None, floor: float) -> None:
    if value is None:
        say(plan, f"bar not measured: {what} (>= {floor})")
    else:
        say(plan, f"{'met   ' if value >= floor else 'MISSED'} {value:5.2f} (>= {floor}) {what}")


def over(times: dict[str, Timing], name: str, base: str) -> float | None:
    return times[name].speedup_over(times[base]).value if name in times and base in times else None


def fastest(times: dict[str, Timing], prefix: str) -> str | None:
    names = [name for name in times if name.startswith(prefix)]
    return min(names, key=lambda name: times[name].microseconds().value) if names else None
