"""Empirical marginals: turn correlated normals into values distributed like the real ones (a Gaussian copula).

    x_j = F_j^-1(Phi(z_j)),    z ~ N(0, R)

with R the learned correlation and F_j the distribution of channel j among the kept rows: its order statistics, linearly
interpolated. This preserves exact zeros and the skew and tail of each channel, and never exceeds the observed range.

R is the correlation of the values, not of their normal scores, so for strongly skewed channels the copula's correlation
is a little weaker than the data's. A weight has one marginal for the whole matrix: the entries of a sample are replaced
by the actual entries of the same rank.
"""

import torch
from torch import Tensor


class Marginals:
    """Quantile functions of the channels of rows [kept, width]."""

    def __init__(self, rows: Tensor) -> None:
        finite = rows[rows.isfinite().all(1)]
        if finite.shape[0] < 2:
            raise ValueError(f"a marginal needs at least two finite rows, got {finite.shape[0]}")
        self._sorted = finite.float().sort(dim=0).values

    def apply(self, normals: Tensor) -> Tensor:
        """Map standard normals [count, width] to values with the channels' marginals."""
        levels = torch.special.ndtr(normals)
        place = levels * (self._sorted.shape[0] - 1)
        below = place.floor().long().clamp(0, self._sorted.shape[0] - 2)
        low, high = self._sorted.gather(0, below), self._sorted.gather(0, below + 1)
        return torch.lerp(low, high, place - below)


def match_ranks(sample: Tensor, actual: Tensor) -> Tensor:
    """Return the entries of `actual`, rearranged to have the same ranks as those of `sample` (same shape)."""
    order = sample.flatten().argsort()
    values = actual.detach().to(sample).flatten().sort().values
    return torch.empty_like(values).scatter_(0, order, values).view_as(sample)
