"""Safe or not, fast or not, and why, in words.

A GEMM is safe when some candidate's error is under the limit at the upper end of its interval; fast when some safe candidate's speed-up
exceeds the limit at the lower end. What was not measured is called that.

The reason says what was seen and what decided. For an unsafe GEMM it names causes that were tested (`loka.probe.cause`): which operand, what
about it, and how far the error falls without it. For a slow one it says where the time goes (`loka.probe.speed`).
"""

from collections.abc import Callable, Sequence

from loka.dispatch import error_of
from loka.probe.cause import MODS, NAMES, OPERANDS
from loka.records import Candidate, Cause, Gemm, GemmVerdict, Interval, Safety, Speed, TensorStats

MUCH_UNDERFLOW = 0.05
PREDICTIONS = 8  # a linear with so few outputs is a prediction layer: little to gain, and the loss reads it directly
ALIGNMENT_WORDS = ("multiple of", "multiples of", "aligned")

Explain = Callable[[Candidate], list[Cause]]
ExplainSlow = Callable[[Candidate], str | None]


def judge(
    gemm: Gemm,
    candidates: Sequence[Candidate],
    stats: Sequence[TensorStats],
    *,
    limit: float,
    min_speedup: float,
    outputs: int,
    explain: Explain | None = None,
    explain_slow: ExplainSlow | None = None,
) -> GemmVerdict:
    """The verdict for one GEMM of a site with `outputs` output features. `explain` is asked about the best of unsafe candidates only."""
    measured = [(c, error) for c in candidates if c.gemm == gemm and (error := error_of(c)) is not None]
    if not measured:
        return _judge_nothing(gemm, candidates)
    safe = [(c, error) for c, error in measured if error.high <= limit]
    best, error = min(safe or measured, key=lambda pair: pair[1].high)
    seen = f"{_name(best)}: {_spell(gemm, error)}{_spell_origin(best)}"
    speed, speed_reason, slow_mod = _judge_speed([c for c, _ in safe or measured], min_speedup, explain_slow)
    if safe:
        others = list(dict.fromkeys(_name(c) for c, _ in safe if c is not best))
        also = f"; also under it: {', '.join(others)}" if others else ""
        reason = f"{seen}, limit {limit:g}{also}{speed_reason}"
        return GemmVerdict(gemm=gemm, safety="safe", speed=speed, reason=reason, suggested_mod=slow_mod)
    causes = explain(best) if explain is not None else []
    words = [*(_spell_cause(c) for c in causes), *_side_notes(gemm, best, stats)]
    if explain is not None and not causes:
        words.insert(0, "none of the tested causes explains it alone")
    reason = f"the best, {seen}, exceeds {limit:g}" + (f": {'; '.join(words)}" if words else "") + speed_reason
    unsafe: Safety = "unsafe"
    mod = _suggest_mod(causes, outputs)
    return GemmVerdict(gemm=gemm, safety=unsafe, speed=speed, reason=reason, suggested_mod=mod, causes=causes)


def _judge_nothing(gemm: Gemm, candidates: Sequence[Candidate]) -> GemmVerdict:
    refusals = sorted({c.refusal for c in candidates if c.gemm == gemm and c.refusal})
    reason = "; ".join(refusals) if refusals else "no candidate was evaluated"
    misaligned = any(word in reason for word in ALIGNMENT_WORDS)
    mod = MODS["align_shapes"] if misaligned else None
    return GemmVerdict(gemm=gemm, safety="not measured", speed="not measured", reason=reason, suggested_mod=mod)


def _name(candidate: Candidate) -> str:
    return candidate.recipe if candidate.backend == "reference" else f"{candidate.recipe} on {candidate.backend}"


def _spell(gemm: Gemm, error: Interval) -> str:
    metric = "MERE" if gemm == "fprop" else "relative L2"
    return f"{metric} {error.value:.3g} [{error.low:.3g}, {error.high:.3g}]"


def _spell_origin(candidate: Candidate) -> str:
    words = {"rows": "real rows", "copula": "the copula", "gaussian": "the Gaussian", "normal": "N(0, 1)"}
    return f" on {words.get(candidate.distribution, candidate.distribution)}" if candidate.distribution else ""


def _spell_cause(cause: Cause) -> str:
    return (
        cause.text if cause.without is None else f"{cause.text}: {cause.error:.3g} with it, {cause.without:.3g} without"
    )


def _side_notes(gemm: Gemm, candidate: Candidate, stats: Sequence[TensorStats]) -> list[str]:
    """What was seen and is no tested cause."""
    notes = [
        f"{t.non_finite} non-finite values in {NAMES[t.role]}"
        for t in stats
        if t.role in OPERANDS[gemm] and t.non_finite
    ]
    if candidate.underflowed is not None and candidate.underflowed > MUCH_UNDERFLOW:
        notes.append(f"{candidate.underflowed:.0%} of an operand underflows to zero")
    return notes


def _suggest_mod(causes: Sequence[Cause], outputs: int) -> str | None:
    if outputs <= PREDICTIONS:
        return f"{MODS['protect_intermediates']}; {outputs} output{'s' * (outputs != 1)}: it is a prediction layer"
    return next((cause.mod for cause in causes if cause.mod is not None), None)


def _judge_speed(
    candidates: Sequence[Candidate], min_speedup: float, explain_slow: ExplainSlow | None
) -> tuple[Speed, str, str | None]:
    """(verdict, what to add to the reason, the mod that would help)."""
    timed = [(c, c.speedup) for c in candidates if c.speedup is not None]
    if not timed:
        return "not measured", "", None
    fastest, speedup = max(timed, key=lambda pair: pair[1].low)
    seen = f"{_name(fastest)} {speedup.value:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]"
    if speedup.low > min_speedup:
        return "fast", f"; {seen}", None
    why = explain_slow(fastest) if explain_slow is not None else None
    reason = f"; slow, {seen} does not exceed {min_speedup:g}" + (f": {why}" if why else "")
    return "slow", reason, MODS["fuse"] if why and "quantisation" in why else None
