"""Beam-set overlap: how many of the reference's beams a cheaper model still finds.

For each query and each n: with A the first n beams of the reference and B those of the candidate, as sets,

    overlap@n = |A and B| / max(|A|, |B|)        jaccard@n = |A and B| / |A or B|

averaged over queries. For full beams max(|A|, |B|) = n. A beam is an item id ([B, N]) or a tuple of codes ([B, N,
levels]); a negative id, or a tuple with a negative code, is padding. Repeated beams count once. A query where both sets
are empty is left out and counted. Order inside the first n does not matter here; for order use `TopK` with the
reference's list as targets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.metrics.accumulator import Metric


@dataclass(frozen=True)
class BeamOverlapResult:
    """Means over queries, and numbers of queries used and left out because both sets were empty; all keyed by n."""

    overlap: dict[int, float]
    jaccard: dict[int, float]
    queries: dict[int, int]
    empty: dict[int, int]


class BeamOverlap(Metric[BeamOverlapResult]):
    """Overlap of two beam sets at every n.

    Args:
        ns: numbers of leading beams to compare.

    Example:
        >>> overlap = BeamOverlap([1, 10])
        >>> overlap.update(torch.arange(10)[None], torch.arange(10).flip(0)[None])
        >>> overlap.compute()
    """

    def __init__(self, ns: Sequence[int]) -> None:
        if not ns or any(n < 1 for n in ns) or len(set(ns)) != len(ns):
            raise ValueError(f"ns={tuple(ns)}, expected distinct positive integers")
        super().__init__(ns=[int(n) for n in ns])
        self.ns = tuple(int(n) for n in ns)
        self._add_sums(torch.float64, "overlap", "jaccard", shape=(len(self.ns),))
        self._add_sums(torch.int64, "queries", "empty", shape=(len(self.ns),))

    def update(self, reference: Tensor, candidate: Tensor) -> None:
        """Add a batch of beams, best first: [B, N] ids or [B, N, levels] codes; both with the same B (and levels)."""
        if reference.dim() not in (2, 3) or reference.dim() != candidate.dim():
            raise ValueError(
                f"reference {tuple(reference.shape)}, candidate {tuple(candidate.shape)}: expected [B, N(, levels)]"
            )
        if reference.shape[0] != candidate.shape[0] or reference.shape[2:] != candidate.shape[2:]:
            raise ValueError(
                f"reference {tuple(reference.shape)} and candidate {tuple(candidate.shape)} differ in B or levels"
            )
        if reference.is_floating_point() or candidate.is_floating_point():
            raise ValueError(f"beams have dtype {reference.dtype} and {candidate.dtype}, expected integer ids or codes")
        width = min(reference.shape[1], candidate.shape[1])
        if max(self.ns) > width:
            raise ValueError(f"n={max(self.ns)} exceeds the beam width {width}: ask for a smaller n")
        reference, candidate = self._place(reference, candidate)
        first, second, kinds = _number_beams(reference, candidate)
        for index, n in enumerate(self.ns):
            self._add(index, first[:, :n], second[:, :n], kinds)

    def _add(self, index: int, first: Tensor, second: Tensor, kinds: int) -> None:
        batch = first.shape[0]
        a, b = _distinct_keys(first, kinds), _distinct_keys(second, kinds)
        shared = _count_rows(a[torch.isin(a, b)], kinds, batch)
        size_a, size_b = _count_rows(a, kinds, batch), _count_rows(b, kinds, batch)
        used = torch.maximum(size_a, size_b) > 0
        hits, a_n, b_n = shared[used].double(), size_a[used], size_b[used]
        self._sums["overlap"][index] += (hits / torch.maximum(a_n, b_n)).sum()
        self._sums["jaccard"][index] += (hits / (a_n + b_n - hits)).sum()
        self._sums["queries"][index] += used.sum()
        self._sums["empty"][index] += (~used).sum()

    def compute(self) -> BeamOverlapResult:
        """Return the means over queries; NaN without queries."""
        counts = self._sums["queries"].tolist()

        def mean(name: str) -> dict[int, float]:
            totals = self._sums[name].tolist()
            return {n: t / c if c else math.nan for n, t, c in zip(self.ns, totals, counts, strict=True)}

        return BeamOverlapResult(
            overlap=mean("overlap"),
            jaccard=mean("jaccard"),
            queries=dict(zip(self.ns, counts, strict=True)),
            empty=dict(zip(self.ns, self._sums["empty"].tolist(), strict=True)),
        )


def _number_beams(reference: Tensor, candidate: Tensor) -> tuple[Tensor, Tensor, int]:
    """Number the distinct beams of both batches densely from 0, -1 for padding; also returns how many there are."""
    both = torch.cat([reference, candidate], dim=1).long()
    flat = both.flatten(0, 1) if both.dim() == 3 else both.reshape(-1, 1)
    padding = (flat < 0).any(1).reshape(both.shape[:2])
    kinds, inverse = torch.unique(flat, dim=0, return_inverse=True)
    dense = torch.where(padding, -1, inverse.reshape(both.shape[:2]))
    return dense[:, : reference.shape[1]], dense[:, reference.shape[1] :], max(int(kinds.shape[0]), 1)


def _distinct_keys(beams: Tensor, kinds: int) -> Tensor:
    """Return row * kinds + beam for every distinct, unpadded beam."""
    rows = torch.arange(beams.shape[0], device=beams.device)[:, None]
    keys: Tensor = torch.unique((rows * kinds + beams)[beams >= 0])
    return keys


def _count_rows(keys: Tensor, kinds: int, batch: int) -> Tensor:
    return torch.bincount(keys // kinds, minlength=batch)
