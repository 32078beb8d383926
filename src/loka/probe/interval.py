"""Turn the errors of samples into an estimate with a 95 % interval."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from loka.records import DistributionError, Interval, Source

RESAMPLES = 1000
Values = tuple[float, float, float, float]  # mere, relative L2, saturated, underflowed


def summarise_draws(
    values: Sequence[Values], weights: Sequence[int], source: Source, rows: int, generator: torch.Generator
) -> DistributionError | str:
    """Summarize draws: means with a bootstrap of the mean.

    Args:
        values: of each draw.
        weights: the number of each draw's weight; draws that share one are resampled together.
        source: the distribution they are from, for the record.
        rows: of each draw, for the record.
        generator: of the bootstrap.

    Returns:
        The record, or why there is none.
    """
    table = torch.tensor(values, dtype=torch.float64)
    if not bool(table[:, :2].isfinite().all()):
        worst = table[~table[:, :2].isfinite().all(1)][0].tolist()
        return not_finite(source, worst)
    groups = torch.tensor(weights) - min(weights)
    count = int(groups.max()) + 1
    sums = torch.zeros(count, 4, dtype=torch.float64).index_add_(0, groups, table)
    sizes = torch.bincount(groups, minlength=count).double()
    index = torch.randint(count, (RESAMPLES, count), generator=generator)
    means = sums[index].sum(1) / sizes[index].sum(1, keepdim=True)
    return make_entry(source, len(values), rows, intervals_of(table.mean(0).tolist(), means))


def not_finite(source: Source, value: Sequence[float]) -> str:
    """Return the refusal text of a candidate whose error is not finite."""
    return f"the error is not finite on {source} operands (MERE {value[0]}, relative L2 {value[1]})"


def make_entry(source: Source, samples: int, rows: int, intervals: Sequence[Interval]) -> DistributionError:
    """Make the record of one source."""
    mere, l2, saturated, underflowed = intervals
    return DistributionError(
        source=source,
        samples=samples,
        rows=rows,
        mere=mere,
        relative_l2=l2,
        sqnr_db=to_decibel(l2),
        saturated=saturated,
        underflowed=underflowed,
    )


def to_decibel(l2: Interval) -> Interval | None:
    """Convert relative L2 to SQNR = -20 log10(relative L2); None if the lower end is 0."""
    if l2.low <= 0:
        return None
    return Interval(value=-20 * math.log10(l2.value), low=-20 * math.log10(l2.high), high=-20 * math.log10(l2.low))


def intervals_of(values: Sequence[float], replicates: Tensor) -> list[Interval]:
    """Return the 95 % quantile intervals of the columns of replicates, each widened to contain its value."""
    levels = torch.tensor([0.025, 0.975], dtype=torch.float64)
    lows, highs = torch.quantile(replicates, levels, dim=0).tolist()
    return [
        Interval(value=value, low=min(low, value), high=max(high, value))
        for value, low, high in zip(values, lows, highs, strict=True)
    ]
