"""Safe or not, fast or not, and why, in words.

A GEMM is safe when some candidate's error is under the limit at the upper end of its interval; fast when some safe candidate's
speed-up exceeds the limit at the lower end. What was not measured is called that. The reason names what in the operands makes low
precision hard, since that decides which rewrite of the model would help.
"""

from collections.abc import Sequence

from loka.dispatch import error_of
from loka.records import Candidate, Gemm, GemmVerdict, Role, Safety, Speed, TensorStats

OPERANDS: dict[Gemm, tuple[Role, Role]] = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
NAMES: dict[Role, str] = {"x": "the input", "w": "the weight", "dy": "the output gradient"}
HEAVY_KURTOSIS = 50.0
MUCH_UNDERFLOW = 0.05


def judge(
    gemm: Gemm,
    candidates: Sequence[Candidate],
    stats: Sequence[TensorStats],
    *,
    limit: float,
    min_speedup: float,
    outputs: int,
) -> GemmVerdict:
    """The verdict for one GEMM of a site with `outputs` output features."""
    measured = [(c, error) for c in candidates if c.gemm == gemm and (error := error_of(c)) is not None]
    if not measured:
        refusals = sorted({c.refusal for c in candidates if c.gemm == gemm and c.refusal})
        reason = "; ".join(refusals) if refusals else "no candidate was evaluated"
        return GemmVerdict(gemm=gemm, safety="not measured", speed="not measured", reason=reason)
    safe = [(c, error) for c, error in measured if error.high <= limit]
    best, error = min(safe or measured, key=lambda pair: pair[1].high)
    metric = "MERE" if gemm == "fprop" else "relative L2"
    seen = f"{best.recipe}: {metric} {error.value:.3g} [{error.low:.3g}, {error.high:.3g}]"
    if safe:
        others = [c.recipe for c, _ in safe if c is not best]
        also = f"; also under it: {', '.join(others)}" if others else ""
        reason, mod = f"{seen}, limit {limit:g}{also}", None
    else:
        causes = find_causes(gemm, best, stats)
        reason = f"the best, {seen}, exceeds {limit:g}" + (f": {'; '.join(causes)}" if causes else "")
        mod = _suggest_mod(gemm, stats, outputs)
    safety: Safety = "safe" if safe else "unsafe"
    return GemmVerdict(
        gemm=gemm,
        safety=safety,
        speed=_judge_speed([c for c, _ in safe or measured], min_speedup),
        reason=reason,
        suggested_mod=mod,
    )


def _judge_speed(candidates: Sequence[Candidate], min_speedup: float) -> Speed:
    lows = [c.speedup.low for c in candidates if c.speedup is not None]
    if not lows:
        return "not measured"
    return "fast" if max(lows) > min_speedup else "slow"


def find_causes(gemm: Gemm, candidate: Candidate, stats: Sequence[TensorStats]) -> list[str]:
    """What makes this GEMM hard, from the statistics of its operands."""
    causes = []
    for tensor in stats:
        if tensor.role not in OPERANDS[gemm]:
            continue
        name = NAMES[tensor.role]
        if tensor.outlier_channels:
            causes.append(f"{tensor.outlier_channels} outlier channels in {name}")
        if tensor.kurtosis > HEAVY_KURTOSIS:
            causes.append(f"heavy tails in {name} (kurtosis {tensor.kurtosis:.0f})")
        if tensor.non_finite:
            causes.append(f"{tensor.non_finite} non-finite values in {name}")
    if candidate.underflowed is not None and candidate.underflowed > MUCH_UNDERFLOW:
        causes.append(f"{candidate.underflowed:.0%} of an operand underflows to zero")
    return causes


def _suggest_mod(gemm: Gemm, stats: Sequence[TensorStats], outputs: int) -> str | None:
    if outputs <= 8:
        return "keep the prediction layer in high precision"
    hard = {t.role for t in stats if t.role in OPERANDS[gemm] and (t.outlier_channels or t.kurtosis > HEAVY_KURTOSIS)}
    return "block_norm: normalise the input of this linear in fixed blocks" if "x" in hard else None
