"""Drift: which operand statistics moved during training, when, and whether the verdict would be different now.

Every look records its moments and its absmax; windows group them (`loka.probe.window`). For each operand, the windows
are compared in order with a reference, initially the first window. A window has moved in a feature if its mean over
looks differs from the reference by an amount that matters to a number format, and by more than four standard errors:

    absmax, std, tail = absmax / std      half an octave (log2): a static or delayed scale is off by that much
    kurtosis (+ 3)                        one octave
    zeros                                 a tenth of the elements
    histogram                             the means of log2 |x| differ by half an octave

The standard error comes from the spread of looks within windows. A window that moved becomes the new reference, so slow
and sudden changes both become dated moves, and a return is a second move. Looks of one step on different ranks are
separate looks.

A move need not matter, because scales follow absmax. To find out, a judge is called with the site as of its first
window and as of its latest, and its answers are compared.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.probe.statistics import COLUMNS, FINE, LOWEST, OCTAVES
from loka.probe.survey import Settings, Survey
from loka.probe.watch import Watch
from loka.probe.window import ROLES
from loka.records import DriftReport, Feature, Move, Role, VerdictChange

Judge = Callable[[Watch], str]
"""Returns the decision about a site as text. Two different texts count as a change."""
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
    """One window of one operand: features per look [looks, features], and the mean of log2 |x|."""

    start: int
    looks: Tensor
    level: float | None


def find_drift(watches: list[Watch], *, model: str, steps: int, judge: Judge | None) -> DriftReport:
    """Compare the windows of every site; with a judge, also its decisions about the sites that moved."""
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
    moved = {move.site for move in moves}
    changes = [] if judge is None else would_change((watch for watch in watches if watch.name in moved), judge)
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


def would_change(watches: Iterable[Watch], judge: Judge) -> list[VerdictChange]:
    """Return the sites whose decision differs between their first and their latest window."""
    changes = []
    for watch in watches:
        before, after = judge(watch.at("first")), judge(watch.at("latest"))
        if before != after:
            changes.append(VerdictChange(site=watch.name, before=before, after=after))
    return changes


def survey_judge(settings: Settings, *, seed: int) -> Judge:
    """Make a judge that evaluates a site and returns which of its GEMMs are safe."""
    survey = Survey(settings, seed=seed)

    def judge(watch: Watch) -> str:
        verdicts = survey.visit(watch, 0.0).verdicts
        return ", ".join(f"{verdict.gemm} {verdict.safety}" for verdict in verdicts)

    return judge


def spans_of(watch: Watch, role: Role) -> Iterator[Span]:
    """Yield the windows of one operand that contain a look. The last one is still open."""
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
    """Return [looks, 5]: log2 of absmax, std, tail and (kurtosis + 3), and the share of zeros; NaN for log2 of zero."""
    count, _, m2, _, m4, zeros, _, absmax, _ = (looks[:, COLUMNS.index(name)] for name in COLUMNS)
    size = count.clamp(min=1)
    variance = m2 / size
    std, kurtosis = variance.sqrt(), (m4 / size) / variance.square()
    columns = [absmax.log2(), std.log2(), (absmax / std).log2(), kurtosis.log2()]
    finite = [torch.where(column.isfinite(), column, math.nan) for column in columns]
    return torch.stack([*finite, zeros / size], 1)


def mean_level(bins: Tensor) -> float | None:
    """Return the mean log2 |x| of non-zero elements from a histogram, without the lowest octave, where zeros are."""
    counts = bins.cpu().double()[FINE : OCTAVES * FINE]
    total = float(counts.sum())
    places = torch.arange(FINE, OCTAVES * FINE, dtype=torch.float64)
    octaves, parts = places.div(FINE, rounding_mode="floor"), places % FINE
    levels = LOWEST + octaves + torch.log2(1 + (parts + 0.5) / FINE)
    return float((counts * levels).sum()) / total if total else None


NAMES: tuple[Feature, ...] = ("absmax", "std", "tail", "kurtosis", "zeros")


def compare_spans(site: str, role: Role, spans: list[Span]) -> list[Move]:
    """Find the moves of one operand in every feature."""
    moves: list[Move] = []
    for column, feature in enumerate(NAMES):
        series = [(span.start, span.looks[:, column][~span.looks[:, column].isnan()]) for span in spans]
        moves += _find_moves(site, role, feature, [(start, values) for start, values in series if len(values)])
    levels = [(span.start, torch.tensor([span.level], dtype=torch.float64)) for span in spans if span.level is not None]
    return moves + _find_moves(site, role, "histogram", levels)


def _find_moves(site: str, role: Role, feature: Feature, series: list[tuple[int, Tensor]]) -> list[Move]:
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
