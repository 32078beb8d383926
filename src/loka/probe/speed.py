"""Time a site's candidates with `loka.measure.site`: including quantization, and paired with bf16 in every repeat.

Only candidates whose error was measured are timed, because the speed of a wrong product is meaningless. A candidate
found wrong while it is timed (with quantization and transposes) is refused as if it had failed the gate, so that a plan
for accuracy only cannot use it either. Without a GPU nothing is timed and every candidate says "not measured: no GPU",
because CPU times would be those of an emulation.

If nothing is faster, `explain_slow` finds out why: it times the bare product of the best candidate, with operands
quantized beforehand, and compares it with bf16.

    quantization = whole - bare        saved = bf16 - bare
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from msgspec.structs import replace
from torch import Tensor

from loka.dispatch import way_of
from loka.formats import QTensor
from loka.kernels import registry
from loka.kernels.backend import Backend
from loka.kernels.quantize import quantize
from loka.kernels.scaled_mm import GemmWay, MatmulCall
from loka.measure import Contender, inputs, time_together
from loka.measure.conformance import baseline_tolerance, judge_runs, law_of_values, tolerance
from loka.measure.site import SiteJob, SiteTiming, Weights, gemm_shape, time_jobs
from loka.measure.timing import CaptureError, Thunk, sets_needed
from loka.probe.watch import Watch
from loka.records import Candidate, Gemm

JUDGED_ROWS = 256  # rows of the bare product that are checked before it is timed
UNKNOWN_BACKEND = "not measured: the backend is not in the registry"
TimingKey = tuple[Gemm, tuple[int, int, int], Weights, GemmWay]  # everything a time depends on, for one device


def time_candidates(
    watch: Watch,
    gemm: Gemm,
    candidates: Sequence[Candidate],
    *,
    weights: Weights,
    repeats: int,
    seconds: float,
    timed: dict[TimingKey, SiteTiming] | None = None,
) -> list[Candidate]:
    """Return the candidates with their times, or with the reason why there are none.

    `timed` caches times for the next site of the same shape.
    """
    known = registry.BACKENDS["scaled_mm"]
    able = {i: way_of(c) for i, c in enumerate(candidates) if c.backend in known and c.error is not None}
    asked = {i: way for i, way in able.items() if way is not None}
    if not asked:
        return [_add_note(c, UNKNOWN_BACKEND) if c.refusal is None else c for c in candidates]
    timed, shape = {} if timed is None else timed, (watch.largest, watch.k, watch.n)
    keys = {i: (gemm, shape, weights, candidate) for i, candidate in asked.items()}
    # deduplicated: two recipes may run a GEMM the same way
    fresh = [key[-1] for key in dict.fromkeys(keys.values()) if key not in timed]
    job = SiteJob(gemm, *shape, tuple(fresh), weights)
    (found,) = time_jobs([job], watch.device, repeats=repeats, seconds=seconds)
    answers = timed | {(gemm, shape, weights, t.candidate): t for t in found}
    timed.update({key: answer for key, answer in answers.items() if answer.speedup is not None})
    return [
        _add_timing(c, answers[keys[i]]) if i in asked else (c if c.refusal else _add_note(c, UNKNOWN_BACKEND))
        for i, c in enumerate(candidates)
    ]


def _add_note(candidate: Candidate, note: str) -> Candidate:
    return replace(candidate, speed_note=note)


def _refuse(candidate: Candidate, reason: str) -> Candidate:
    """Return the candidate as refused, without its errors and times, which are meaningless for a wrong product."""
    c = candidate
    return Candidate(gemm=c.gemm, recipe=c.recipe, backend=c.backend, a=c.a, b=c.b, refusal=reason)


def _add_timing(candidate: Candidate, timing: SiteTiming) -> Candidate:
    if timing.wrong:
        return _refuse(candidate, f"fails the conformance gate while timed, {timing.refusal}")
    if timing.speedup is None:
        return _add_note(candidate, timing.refusal or "not measured")
    return replace(candidate, microseconds=timing.microseconds, speedup=timing.speedup)


@torch.no_grad()
def explain_slow(watch: Watch, candidate: Candidate, *, repeats: int) -> str | None:
    """Explain where the time of a candidate goes; None if that cannot be measured."""
    if candidate.microseconds is None or candidate.speedup is None:
        return None
    asked = way_of(candidate)
    assert asked is not None  # it was timed
    m, k, n = gemm_shape(candidate.gemm, watch.largest, watch.k, watch.n)
    device = watch.device
    call = asked.call(m, k, n)
    backend = registry.backend("scaled_mm", asked.backend)
    sets = [_make_set(call, backend, seed, device) for seed in range(sets_needed(2 * (m * k + k * n + m * n), device))]
    few = min(m, JUDGED_ROWS)
    first = sets[0]
    laws = {"bf16": law_of_values(first.a[:few], first.b), "bare": law_of_values(*first.exact(few))}
    allowed = {"bf16": baseline_tolerance(torch.bfloat16, k), "bare": tolerance(call)}
    rivals = []
    for name, law in laws.items():
        run = partial(_run_rows, first.thunks[name], few)
        proof = judge_runs(run, law, allowed[name], torch.bfloat16, poison=False)
        if not proof:
            return None
        rivals.append(Contender(name, [one.thunks[name] for one in sets], proof))
    try:
        timings = {t.name: t.microseconds().value for t in time_together(rivals, device, repeats=repeats)}
    except CaptureError:
        return None
    return spell_slow(k, candidate.microseconds.value, timings["bare"], timings["bf16"])


@dataclass(frozen=True)
class _Set:
    """One set of operands, in bf16 and quantized."""

    a: Tensor
    b: Tensor
    qa: QTensor
    qb: QTensor
    thunks: dict[str, Thunk]

    def exact(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return the values of the quantized operands: some rows of a, and b."""
        return self.qa.dequantize()[:rows], self.qb.dequantize()


def _make_set(call: MatmulCall, backend: Backend, seed: int, device: torch.device) -> _Set:
    a, b = (
        inputs.draw(rows, call.k, seed=2 * seed + part, device=device, dtype=torch.bfloat16)
        for part, rows in enumerate((call.m, call.n))
    )
    qa, qb = quantize(a, call.a), quantize(b, call.b)
    weight = registry.prepare_for(backend, qb, call.a)  # preparing the layout is not timed
    bare = partial(backend.run, qa, weight, out_dtype=call.out_dtype, fast_accum=call.fast_accum)
    return _Set(a, b, qa, qb, {"bf16": lambda: a @ b.T, "bare": bare})


def _run_rows(thunk: Thunk, rows: int) -> Tensor:
    out: Tensor = thunk()
    return out[:rows]


def spell_slow(k: int, whole: float, bare: float, bf16: float) -> str:
    """Spell out why a candidate is slow, from its times in microseconds."""
    cost, saved = whole - bare, bf16 - bare
    if saved <= 0:
        return f"K = {k}: the bare product ({bare:.1f} us) is no faster than bf16 ({bf16:.1f} us)"
    if cost > saved:
        return f"K = {k}: quantization ({cost:.1f} us) costs more than the GEMM saves ({saved:.1f} us)"
    return f"K = {k}: quantization ({cost:.1f} us) leaves little of what the GEMM saves ({saved:.1f} us)"
