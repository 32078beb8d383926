"""Anytime-valid intervals for running experiments, where repeated peeking invalidates a fixed-sample interval.

**Difference of means.** With estimate d and standard error s, V = 1 / s^2 is the information so far, and S = d V
behaves like a Brownian motion in V with the true difference as its drift. Robbins' normal mixture over drifts N(0,
tau^2) gives a martingale, and Ville's inequality an interval that covers the truth at all times simultaneously with
probability 1 - alpha:

    |d - truth| <= sqrt((V + 1 / tau^2) log((1 + tau^2 V) / alpha^2)) / V

`tau` is the difference of interest, fixed in advance; it determines where the interval is tightest, not whether it is
valid. The interval is asymptotic (a time-uniform central limit theorem), so it is reported only from `LEAST` units per
arm.

**Sample ratio.** The same for counts: the Bayes factor of a Dirichlet mixture over ratios against the intended ratio is
a martingale under the latter, and 1 / factor is a p-value at any time.

References: Robbins 1970; Waudby-Smith et al., "Time-uniform central limit theory", 2021; Lindon and Malek,
"Anytime-valid inference for multinomial count data", 2022.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loka.metrics.compare import Verdict, decide

LEAST = 100  # units per arm below which the result is inconclusive
CONCENTRATION = 100.0  # of the Dirichlet mixture: larger values concentrate it around the intended ratio
WEAK = 0.25  # relative standard error of the baseline's mean above which a relative change is meaningless


@dataclass(frozen=True)
class Moments:
    """Number of units in an arm, and the mean and variance of their values.

    Args:
        units: number of units.
        mean: mean of their values.
        variance: unbiased variance of their values.

    Example:
        >>> Moments.of([1.0, 2.0, 3.0])
        Moments(units=3, mean=2.0, variance=1.0)
    """

    units: int
    mean: float
    variance: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Moments":
        """Summarize a sample of values."""
        n = len(values)
        mean = math.fsum(values) / n if n else 0.0
        return cls(n, mean, math.fsum((v - mean) ** 2 for v in values) / (n - 1) if n > 1 else 0.0)


@dataclass(frozen=True)
class SequentialComparison:
    """Candidate compared with baseline, relative to the baseline's mean. `low`, `high`: None without enough data."""

    estimate: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    reason: str


def compare_anytime(
    candidate: Moments,
    baseline: Moments,
    *,
    margin: float,
    lower_is_better: bool = False,
    alpha: float = 0.05,
    tau: float | None = None,
) -> SequentialComparison:
    """Compare the means of two arms, with an interval that is valid however often it is computed.

    Args:
        candidate, baseline: summary of the independent units (users) of each arm.
        margin: largest relative change that does not matter.
        lower_is_better: True for a loss.
        alpha: probability that the interval is ever wrong.
        tau: relative change for which the interval is tightest; by default the margin.

    Returns:
        Relative change, interval and verdict.

    Example:
        >>> compare_anytime(Moments(5000, 1.10, 1.0), Moments(5000, 1.0, 1.0), margin=0.02).verdict
        'better'
    """
    if not (margin > 0 and math.isfinite(margin)):
        raise ValueError(
            f"margin={margin}, expected a positive number: the largest relative change that does not matter"
        )
    if not 0 < alpha < 1:
        raise ValueError(f"alpha={alpha}, expected a probability in (0, 1)")
    width = margin if tau is None else tau
    if not width > 0:
        raise ValueError(f"tau={tau}, expected a positive relative change")
    fewest = min(candidate.units, baseline.units)
    if fewest < LEAST:
        return SequentialComparison(None, None, None, "inconclusive", f"{fewest} units in an arm, {LEAST} are needed")
    noise = baseline.variance / baseline.units
    if not baseline.mean > 0 or math.sqrt(noise) > WEAK * baseline.mean:
        return SequentialComparison(
            None, None, None, "inconclusive", "the baseline's mean is too near zero for a relative change"
        )
    ratio = candidate.mean / baseline.mean
    squared = candidate.variance / candidate.units / baseline.mean**2 + ratio**2 * noise / baseline.mean**2
    if squared == 0:
        return SequentialComparison(ratio - 1, None, None, "inconclusive", "every unit has the same value")
    information = 1 / squared
    radius = math.sqrt((information + width**-2) * math.log((1 + width**2 * information) / alpha**2)) / information
    low, high = ratio - 1 - radius, ratio - 1 + radius
    verdict = decide(low, high, margin=margin, lower_is_better=lower_is_better)
    return SequentialComparison(ratio - 1, low, high, verdict, f"{100 * (1 - alpha):g} % at all times")


def check_ratio_anytime(observed: Sequence[int], ratio: Sequence[float]) -> float:
    """Return a p-value for counts per arm against the intended ratio, valid at any time.

    Args:
        observed: units per arm so far.
        ratio: positive numbers; they are normalized.

    Returns:
        The p-value.

    Example:
        >>> check_ratio_anytime([5010, 4990], [1, 1]) > 0.5, check_ratio_anytime([5400, 4600], [1, 1]) < 0.001
        (True, True)
    """
    if len(observed) != len(ratio) or len(observed) < 2 or any(n < 0 for n in observed):
        raise ValueError(f"counts {tuple(observed)} and ratios {tuple(ratio)}: expected as many, at least two")
    if not all(math.isfinite(part) and part > 0 for part in ratio):
        raise ValueError(f"ratio {tuple(ratio)}: expected positive finite parts")
    shares = [part / sum(ratio) for part in ratio]
    prior = [CONCENTRATION * share for share in shares]
    total = sum(observed)
    factor = math.lgamma(CONCENTRATION) - math.lgamma(CONCENTRATION + total)
    for count, weight, share in zip(observed, prior, shares, strict=True):
        factor += math.lgamma(weight + count) - math.lgamma(weight) - count * math.log(share)
    return math.exp(min(0.0, -factor))
