"""Drift: which operands moved while the model trained, when, and whether the verdict would be another one now.

Every look leaves its moments and its absmax; windows group them (`loka.probe.window`). For each operand the windows are walked in order against a
reference, the first window. A window has moved in a feature when its mean over looks differs from the reference's by more than a size that
matters to a number format, and by more than four standard errors:

    absmax, std, tail = absmax / std      half an octave (log2): a static or delayed scale is off by that much
    kurtosis (+ 3)                        one octave
    zeros                                 a tenth of the elements
    histogram                             the means of log2 |x| differ by half an octave

The standard error is that of looks inside windows. A window that moved becomes the new reference, so slow and sudden changes both end up as dated
moves, and what returns is a second move. Between ranks looks of one step are separate looks.

A move need not matter: scales follow absmax. Whether it does is asked of a judge, which is given the site as its first window showed it and as its
latest does, and whose answers are compared.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.probe.statistics import COLUMNS, FINE, LOWEST, OCTAVES
from loka.probe.survey import Settings, Survey
from loka.probe.watch import Watch
from loka.probe.window import ROLES
from loka.records import DriftReport, Feature, Move, Role, VerdictChange

Judge = Callable[[Watch], str]
"""What would be decided about a site that looks like this; any two answers that differ are a change."""
SIGMAS = 4.0
MATTERS: dict[Feature, float] = {
    "absmax": 0.5,
    "std": 0.5,
    "tail": 0.5,
    "kurtosis": 1.0,
    "zeros": 0.1,
    "histogram": 0.5,
}


@dataclass(frozen=True)
class Span:
    """One window of one operand: features by look [looks, features], and the mean of log2 |x|."""

    start: int
    looks: Tensor
    level: float | None


def find_drift(watches: list[Watch], *, model: str, steps: int, judge: Judge | None = None) -> DriftReport:
    """Compare windows of every site; with a judge, also its answers for the sites that moved."""
    moves: list[Move] = []
    too_short, length = [], 0
    for watch in watches:
        learned = watch.learned
        if learned is None or len(learned.windows.marks) < 2:
            too_short.append(watch.name)
            continue
        length = max(length, learned.windows.length)
        for role in ROLES:
            moves += compare_spans(watch.name, role, list(spans_of(watch, role)))
    changes = [] if judge is None else would_change(watches, judge, sites={move.site for move in moves})
    return DriftReport(
        model=model,
        steps=steps,
        window_steps=length,
        sites=len(watches) - len(too_short),
        too_short=too_short,
        moves=sorted(moves, key=lambda move: (move.step, move.site)),
        judged=judge is not None,
        changes=changes,
    )


def would_change(watches: list[Watch], judge: Judge, *, sites: set[str] | None = None) -> list[VerdictChange]:
    """Sites that the judge decides differently about on their latest rows than on their first."""
    changes = []
    for watch in watches:
        if (
            watch.learned is None
            or len(watch.learned.windows.marks) < 2
            or (sites is not None and watch.name not in sites)
        ):
            continue
        before, after = judge(watch.at("first")), judge(watch.at("latest"))
        if before != after:
            changes.append(VerdictChange(site=watch.name, before=before, after=after))
    return changes


def survey_judge(settings: Settings, *, seed: int = 0) -> Judge:
    """The verdict of an evaluation: which GEMMs are safe."""
    survey = Survey(settings, seed=seed)

    def judge(watch: Watch) -> str:
        verdicts = survey.visit(watch, 0.0).verdicts
        return ", ".join(f"{verdict.gemm} {verdict.safety}" for verdict in verdicts)

    return judge


def spans_of(watch: Watch, role: Role) -> Iterator[Span]:
    """The windows of one operand that hold any look; the one still running is the last."""
    learned = watch.learned
    assert learned is not None
    windows, statistics = learned.windows, learned.statistics[role]
    looks, bins = statistics.looks, torch.zeros_like(statistics.raw_bins)
    first, start = 0, windows.start or 0
    ends = [(mark.looks[role], mark.bins[role], mark.step) for mark in windows.marks]
    for last, cumulative, step in [*ends, (len(looks), statistics.raw_bins, start)]:
        if last > first:
            yield Span(start, features_of(looks[first:last]), mean_level(cumulative - bins))
        first, bins, start = last, cumulative, step


def features_of(looks: Tensor) -> Tensor:
    """[looks, 5]: log2 absmax, log2 std, log2 tail, log2 (kurtosis + 3), share of zeros; NaN where there is nothing to take a logarithm of."""
    count, _, m2, _, m4, zeros, _, absmax, _ = (looks[:, COLUMNS.index(name)] for name in COLUMNS)
    size = count.clamp(min=1)
    variance = m2 / size
    std, peak = variance.sqrt(), absmax
    kurtosis = (m4 / size) / variance.square()
    columns = [peak.log2(), std.log2(), (peak / std).log2(), kurtosis.log2()]
    finite = [torch.where(column.isfinite(), column, math.nan) for column in columns]
    return torch.stack([*finite, zeros / size], 1)


def mean_level(bins: Tensor) -> float | None:
    """Mean log2 |x| of the elements that are not zero, from their histogram; the lowest octave, where zeros are counted too, is left out."""
    counts = bins.cpu().double()[FINE : OCTAVES * FINE]
    total = float(counts.sum())
    places = torch.arange(FINE, OCTAVES * FINE, dtype=torch.float64)
    octaves, parts = places.div(FINE, rounding_mode="floor"), places % FINE
    levels = LOWEST + octaves + torch.log2(1 + (parts + 0.5) / FINE)
    return float((counts * levels).sum()) / total if total else None


NAMES: tuple[Feature, ...] = ("absmax", "std", "tail", "kurtosis", "zeros")


def compare_spans(site: str, role: Role, spans: list[Span]) -> list[Move]:
    """Moves of one operand, feature by feature."""
    moves: list[Move] = []
    for column, feature in enumerate(NAMES):
        series = [(span.start, span.looks[:, column][~span.looks[:, column].isnan()]) for span in spans]
        moves += _walk(site, role, feature, [(start, values) for start, values in series if len(values)])
    levels = [(span.start, torch.tensor([span.level], dtype=torch.float64)) for span in spans if span.level is not None]
    return moves + _walk(site, role, "histogram", levels)


def _walk(site: str, role: Role, feature: Feature, series: list[tuple[int, Tensor]]) -> list[Move]:
    moves: list[Move] = []
    if not series:
        return moves
    freedom = sum(len(values) - 1 for _, values in series)
    within = sum(float((values - values.mean()).square().sum()) for _, values in series)
    spread = math.sqrt(within / freedom) if freedom else None
    since, reference = series[0]
    for step, values in series[1:]:
        change = float(values.mean() - reference.mean())
        error = None if spread is None else spread * math.sqrt(1 / len(values) + 1 / len(reference))
        sigmas = abs(change) / error if error else None
        if abs(change) >= MATTERS[feature] and (sigmas is None or sigmas >= SIGMAS):
            before, after = float(reference.mean()), float(values.mean())
            moves.append(
                Move(
                    site=site,
                    role=role,
                    feature=feature,
                    since=since,
                    step=step,
                    before=before,
                    after=after,
                    sigmas=sigmas,
                )
            )
            since, reference = step, values
    return moves
