"""Verdicts: whether a GEMM is safe and fast in low precision, with the reason in words.

A GEMM is safe if the upper end of some candidate's harm (`loka.probe.score`) is within its share of the margin, and
fast if the lower end of some safe candidate's speedup exceeds the limit. The margin is a relative change of the loss
allowed for the whole model, 0.02 % by default. Errors of independent units add in squares, so each of n units may cost
margin / sqrt(n). "Unsafe" means not shown to be within the margin.

Without a harm (no gradient, or an unknown loss) nothing is called safe: the verdict states the measured error and is
"not measured". A product whose error exceeds its limit is unsafe in any case.

The reason states what was measured and what decided. For an unsafe GEMM it names tested causes (`loka.probe.cause`):
which operand, which property, and how far the error falls without it. For a slow one it says where the time goes
(`loka.probe.speed`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loka.dispatch.margin import share_of_margin
from loka.probe.cause import MODS, NAMES, OPERANDS
from loka.probe.score import GIVEN_SCALES
from loka.records import Alarm, Candidate, Cause, Gemm, GemmVerdict, Interval, Safety, Speed, TensorStats

MUCH_UNDERFLOW, MUCH_SATURATION = 0.05, 0.001
PREDICTIONS = (
    8  # a linear with at most this many outputs is a prediction layer: little to gain, and it feeds the loss directly
)
ALIGNMENT_WORDS = ("multiple of", "multiples of", "aligned")

Explain = Callable[[Candidate], list[Cause]]
ExplainSlow = Callable[[Candidate], str | None]


@dataclass(frozen=True)
class Allowed:
    """Limits of a GEMM: a margin for the whole model shared by `units`, and an error, used if no harm is known."""

    margin: float
    units: int
    error: float

    @property
    def share(self) -> float:
        """Relative change of the loss allowed for one unit."""
        return share_of_margin(self.margin, self.units)


def judge(
    gemm: Gemm,
    candidates: Sequence[Candidate],
    stats: Sequence[TensorStats],
    *,
    allowed: Allowed,
    min_speedup: float,
    outputs: int,
    unscored: str | None = None,
    alarms: Sequence[Alarm] = (),
    explain: Explain | None = None,
    explain_slow: ExplainSlow | None = None,
) -> GemmVerdict:
    """Judge one GEMM of a site: its safety, its speed and the reason.

    Candidates of other GEMMs, and those with static or delayed scales, are ignored. `unscored` says why there is no
    harm, `alarms` are appended to the reason whatever the verdict, and `explain` is called only for the best of unsafe
    candidates.
    """
    measured = [
        (c, error)
        for c in candidates
        if c.gemm == gemm and c.recipe not in GIVEN_SCALES and (error := c.error) is not None
    ]
    named = "".join(f"; {alarm.text}; what helps: {alarm.help}" for alarm in alarms)
    if not measured:
        return _judge_unmeasured(gemm, candidates, named)
    scored = [(c, c.harm) for c, _ in measured if c.harm is not None]
    # harm decides if it is known: a small error of the product says nothing about the loss
    tried, limit = (scored, allowed.share) if scored else (measured, allowed.error)
    passing = [(c, size) for c, size in tried if size.high <= limit]
    best, size = min(passing or tried, key=lambda pair: pair[1].high)
    speed, speed_reason, mod = _judge_speed([c for c, _ in passing or tried], min_speedup, explain_slow)
    safety: Safety = "unsafe"
    causes: list[Cause] = []
    found = f"{_spell_error(gemm, best.error)}{_spell_origin(best)}"
    if scored:
        held, extra = f"{spell_harm(size)}; allowed {spell_share(allowed.share)}", f"; {found}"
    elif passing:
        held = f"{found}, limit {limit:g}"
        extra = f"; what that does to the loss was not measured: {unscored or 'no step was scored'}"
    else:
        held, extra = f"{found}, exceeds {limit:g}", ""
    if passing:
        others = list(dict.fromkeys(_spell_candidate(c) for c, _ in passing if c is not best))
        also = f"; also {'within' if scored else 'under'} it: {', '.join(others)}" if others else ""
        reason = f"{_spell_candidate(best)}: {held}{also}{extra}"
        safety = "safe" if scored else "not measured"
    else:
        causes = explain(best) if explain is not None else []
        words = [*(_spell_cause(c) for c in causes), *_describe_observations(gemm, best, stats)]
        if not scored and explain is not None and not causes:
            words.insert(0, "none of the tested causes explains it alone")
        because = f": {'; '.join(words)}" if words else ""
        reason = f"the best, {_spell_candidate(best)}: {held}{extra}{because}"
        mod = _suggest_mod(causes, outputs)
    reason = f"{reason}{speed_reason}{named}"
    return GemmVerdict(gemm=gemm, safety=safety, speed=speed, reason=reason, suggested_mod=mod, causes=causes)


def spell_share(value: float) -> str:
    """Format a relative change as a percentage with two significant digits."""
    return f"{100 * value:.2g}%"


def spell_harm(harm: Interval) -> str:
    """Spell out a predicted change of the loss: the typical and the largest."""
    return f"may change the loss by {spell_share(harm.value)}, at most {spell_share(harm.high)}"


def _judge_unmeasured(gemm: Gemm, candidates: Sequence[Candidate], named: str) -> GemmVerdict:
    refusals = sorted({c.refusal for c in candidates if c.gemm == gemm and c.refusal})
    reason = "; ".join(refusals) if refusals else "no candidate was evaluated"
    misaligned = any(word in reason for word in ALIGNMENT_WORDS)
    mod = MODS["align_shapes"] if misaligned else None
    return GemmVerdict(
        gemm=gemm, safety="not measured", speed="not measured", reason=f"{reason}{named}", suggested_mod=mod
    )


def _spell_candidate(candidate: Candidate) -> str:
    return candidate.recipe if candidate.backend == "reference" else f"{candidate.recipe} on {candidate.backend}"


def _spell_error(gemm: Gemm, error: Interval | None) -> str:
    assert error is not None  # it was measured
    metric = "MERE" if gemm == "fprop" else "relative L2"
    return f"{metric} {error:.3g}"


def _spell_origin(candidate: Candidate) -> str:
    words = {"rows": "real rows", "copula": "the copula", "gaussian": "the Gaussian", "normal": "N(0, 1)"}
    return f" on {words.get(candidate.distribution, candidate.distribution)}" if candidate.distribution else ""


def _spell_cause(cause: Cause) -> str:
    return (
        cause.text if cause.without is None else f"{cause.text}: {cause.error:.3g} with it, {cause.without:.3g} without"
    )


def _describe_observations(gemm: Gemm, candidate: Candidate, stats: Sequence[TensorStats]) -> list[str]:
    """Describe observations that are not tested causes."""
    notes = [
        f"{t.non_finite} non-finite values in {NAMES[t.role]}"
        for t in stats
        if t.role in OPERANDS[gemm] and t.non_finite
    ]
    if candidate.saturated is not None and candidate.saturated > MUCH_SATURATION:
        notes.append(f"{candidate.saturated:.2%} of an operand exceeds its scale and saturates")
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
    """Return (verdict, text to append to the reason, the mod that would help)."""
    timed = [(c, c.speedup) for c in candidates if c.speedup is not None]
    if not timed:
        return "not measured", "", None
    fastest, speedup = max(timed, key=lambda pair: pair[1].low)
    seen = f"{_spell_candidate(fastest)} {speedup:.2fx}"
    if speedup.low > min_speedup:
        return "fast", f"; {seen}", None
    why = explain_slow(fastest) if explain_slow is not None else None
    reason = f"; slow, {seen} does not exceed {min_speedup:g}" + (f": {why}" if why else "")
    return "slow", reason, MODS["fuse"] if why and "quantization" in why else None
