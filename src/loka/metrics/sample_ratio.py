"""Sample-ratio mismatch: check whether the actual traffic split matches the intended one.

Pearson's chi-square over the arms, chi2 = sum (observed - expected)^2 / expected, with k - 1 degrees of freedom; the
p-value is the upper regularized incomplete gamma function Q((k-1)/2, chi2/2). A split that fails this test has a bug in
assignment or logging, and no metric of the experiment can be trusted, so the usual threshold is strict (0.001): a false
alarm once in a thousand experiments.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SampleRatio:
    """Result of `check_sample_ratio`. Prints as one line."""

    observed: tuple[int, ...]
    expected: tuple[float, ...]
    chi_square: float
    p_value: float
    threshold: float

    @property
    def mismatch(self) -> bool:
        """Whether the split differs from the intended ratio: p_value < threshold."""
        return self.p_value < self.threshold

    def __str__(self) -> str:
        seen = " / ".join(f"{count:,}" for count in self.observed)
        asked = " / ".join(f"{count:,.1f}" for count in self.expected)
        verdict = "MISMATCH, do not read the metrics" if self.mismatch else "no mismatch found"
        return f"sample ratio {seen} (expected {asked}): chi2 {self.chi_square:.3f}, p {self.p_value:.3g}: {verdict}"


def check_sample_ratio(observed: Sequence[int], ratio: Sequence[float], *, threshold: float = 0.001) -> SampleRatio:
    """Test counts per arm against the intended ratio.

    Args:
        observed: units per arm.
        ratio: any positive numbers; they are normalized.
        threshold: p-value below which the split counts as mismatched.

    Returns:
        The p-value, and whether the arms are mismatched.

    Example:
        >>> check_sample_ratio([5010, 4990], [1, 1]).mismatch
        False
    """
    if len(observed) != len(ratio) or len(observed) < 2:
        raise ValueError(f"{len(observed)} counts and {len(ratio)} ratios: expected the same number, at least two")
    if any(count < 0 for count in observed) or sum(observed) == 0:
        raise ValueError(f"counts {tuple(observed)}: expected non-negative ones, not all zero")
    if not all(math.isfinite(part) and part > 0 for part in ratio):
        raise ValueError(f"ratio {tuple(ratio)}: expected positive finite parts")
    if not 0 < threshold < 1:
        raise ValueError(f"threshold={threshold}, expected a probability in (0, 1)")
    total = sum(observed)
    expected = tuple(total * part / sum(ratio) for part in ratio)
    chi_square = sum((seen - want) ** 2 / want for seen, want in zip(observed, expected, strict=True))
    shape = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    p_value = float(torch.special.gammaincc(shape, torch.tensor(chi_square / 2, dtype=torch.float64)))
    return SampleRatio(tuple(int(count) for count in observed), expected, chi_square, p_value, threshold)
