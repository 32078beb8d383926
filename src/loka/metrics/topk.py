"""Top-K metrics of recommendation: HR@K, recall@K, NDCG@K, MRR; means over queries (users).

With T the relevant items of a query and r the 0-based position of an item:

    HR@K     = 1 if any relevant item has r < K
    recall@K = #(relevant with r < K) / |T|
    NDCG@K   = sum over relevant with r < K of 1 / log2(r + 2), over the same sum for the first min(|T|, K) positions
    MRR      = 1 / (1 + r) of the best relevant item

Queries can be added in two ways:

- `update_scores(scores [B, C], target [B])`: one relevant item, the full catalog scored. Tied scores are averaged
  over all their orders (the expectation under random tie-breaking), so a model that scores everything alike gets K / C
  and not 1. For catalogs too large for one matrix, `update_ranks(better, tied)` takes the two counts that determine the
  rank; `rank_target` computes them.
- `update(recommended [B, N], targets [B, T])`: ordered lists, as beam search returns them, both padded with -1. MRR is
  then truncated at N: a target outside the list scores 0.

A query without a relevant item is left out and counted. A K above the list or catalog length raises, because HR@50 of
ten items is not HR@50.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.metrics.accumulator import Metric


@dataclass(frozen=True)
class TopKResult:
    """Means over `queries`; the dictionaries are keyed by K. `without_target` queries were left out."""

    hit_rate: dict[int, float]
    recall: dict[int, float]
    ndcg: dict[int, float]
    mrr: float
    queries: int
    without_target: int


def rank_target(scores: Tensor, target: Tensor, *, exclude: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Count the candidates that score strictly better than the target, and those that score the same, target included.

    `exclude` (bool [B, C]) removes candidates from the ranking, e.g. items already seen, but must not remove the
    target. NaN anywhere in `scores` raises, because a NaN has no rank.
    """
    _check_scores(scores, target)
    if bool(torch.isnan(scores).any()):
        raise ValueError(f"{int(torch.isnan(scores).sum())} of {scores.numel()} scores are NaN: a NaN has no rank")
    own = scores.gather(1, target[:, None])
    better, tied = scores > own, scores == own
    if exclude is not None:
        if exclude.shape != scores.shape or exclude.dtype != torch.bool:
            raise ValueError(f"exclude is {exclude.dtype} {tuple(exclude.shape)}, expected bool {tuple(scores.shape)}")
        if bool(exclude.gather(1, target[:, None]).any()):
            raise ValueError("exclude removes the target of at least one query: it cannot be ranked")
        better, tied = better & ~exclude, tied & ~exclude
    return better.sum(1), tied.sum(1)


class TopK(Metric[TopKResult]):
    """HR@K, recall@K, NDCG@K for every K, and MRR.

    Args:
        ks: the list lengths K.

    Example:
        >>> top = TopK((10,))
        >>> top.update_scores(torch.arange(20.0)[None], torch.tensor([19]))
        >>> top.compute()
    """

    def __init__(self, ks: Sequence[int] = (1, 5, 10)) -> None:
        if not ks or any(k < 1 for k in ks) or len(set(ks)) != len(ks):
            raise ValueError(f"ks={tuple(ks)}, expected distinct positive integers")
        super().__init__(ks=[int(k) for k in ks])
        self.ks = tuple(int(k) for k in ks)
        self._add_sums(torch.float64, "hit", "recall", "ndcg", shape=(len(self.ks),))
        self._add_sums(torch.float64, "reciprocal")
        self._add_sums(torch.int64, "queries", "without_target")

    def update_scores(self, scores: Tensor, target: Tensor, *, exclude: Tensor | None = None) -> None:
        """Add queries with one relevant item each: scores of the full catalog [B, C] and the target's column [B]."""
        better, tied = rank_target(scores, target, exclude=exclude)
        self._check_length(scores.shape[1], "catalogue")
        self.update_ranks(better, tied)

    def update_ranks(self, better: Tensor, tied: Tensor) -> None:
        """Add queries by the number of candidates that beat the target and that tie with it (at least 1: itself)."""
        better, tied = self._place(better, tied)
        if better.shape != tied.shape or better.dim() != 1:
            raise ValueError(f"better {tuple(better.shape)} and tied {tuple(tied.shape)} must be vectors of one length")
        if bool((better < 0).any()) or bool((tied < 1).any()):
            raise ValueError("better must be >= 0 and tied >= 1: the target ties with itself")
        if better.numel() == 0:
            return
        last = better + tied
        discounts = self._discounts(max(self.ks))
        harmonic = _prefix_sums(1.0 / torch.arange(1, int(last.max()) + 1, dtype=torch.float64, device=self.device))
        for index, k in enumerate(self.ks):
            hit = (last.clamp(max=k) - better.clamp(max=k)).double() / tied
            self._sums["hit"][index] += hit.sum()
            self._sums["recall"][index] += hit.sum()
            self._sums["ndcg"][index] += ((discounts[last.clamp(max=k)] - discounts[better.clamp(max=k)]) / tied).sum()
        self._sums["reciprocal"] += ((harmonic[last] - harmonic[better]) / tied).sum()
        self._sums["queries"] += better.numel()

    def update(self, recommended: Tensor, targets: Tensor) -> None:
        """Add ordered lists [B, N] and sets of relevant items [B, T]; -1 pads both. Repeated items in a row raise."""
        if recommended.dim() != 2 or targets.dim() != 2 or recommended.shape[0] != targets.shape[0]:
            raise ValueError(
                f"recommended {tuple(recommended.shape)} and targets {tuple(targets.shape)}: expected [B, N], [B, T]"
            )
        self._check_length(recommended.shape[1], "recommended list")
        recommended, targets = self._place(recommended, targets)
        _check_distinct(recommended, "recommended")
        _check_distinct(targets, "targets")
        size = (targets >= 0).sum(1)
        usable = size > 0
        relevant = (recommended[:, :, None] == targets[:, None, :]) & (targets[:, None, :] >= 0)
        relevant, size = relevant.any(2)[usable], size[usable]
        position = torch.arange(1, relevant.shape[1] + 1, dtype=torch.float64, device=self.device)
        gain = relevant / torch.log2(position + 1)
        ideal = self._discounts(max(self.ks))
        for index, k in enumerate(self.ks):
            found = relevant[:, :k].sum(1)
            self._sums["hit"][index] += (found > 0).sum()
            self._sums["recall"][index] += (found.double() / size).sum()
            self._sums["ndcg"][index] += (gain[:, :k].sum(1) / ideal[size.clamp(max=k)]).sum()
        if relevant.numel():
            self._sums["reciprocal"] += (relevant / position).max(1).values.sum()
        self._sums["queries"] += relevant.shape[0]
        self._sums["without_target"] += (~usable).sum()

    def compute(self) -> TopKResult:
        """Return the means over queries; NaN without queries."""
        queries = int(self._sums["queries"])

        def mean(name: str) -> dict[int, float]:
            totals = self._sums[name].tolist()
            return {k: total / queries if queries else math.nan for k, total in zip(self.ks, totals, strict=True)}

        return TopKResult(
            hit_rate=mean("hit"),
            recall=mean("recall"),
            ndcg=mean("ndcg"),
            mrr=float(self._sums["reciprocal"]) / queries if queries else math.nan,
            queries=queries,
            without_target=int(self._sums["without_target"]),
        )

    def _discounts(self, length: int) -> Tensor:
        """Return a table: entry j is the sum of 1 / log2(r + 2) over r < j, the gain of an ideal list of j items."""
        return _prefix_sums(1.0 / torch.log2(torch.arange(2, length + 2, dtype=torch.float64, device=self.device)))

    def _check_length(self, length: int, what: str) -> None:
        if max(self.ks) > length:
            raise ValueError(f"K={max(self.ks)} exceeds the {what} of {length}: ask for a smaller K or rank more items")


def _prefix_sums(terms: Tensor) -> Tensor:
    return torch.cat([terms.new_zeros(1), terms.cumsum(0)])


def _check_scores(scores: Tensor, target: Tensor) -> None:
    if scores.dim() != 2 or target.shape != scores.shape[:1]:
        raise ValueError(f"scores {tuple(scores.shape)} and target {tuple(target.shape)}: expected [B, C] and [B]")
    if target.numel() and (int(target.min()) < 0 or int(target.max()) >= scores.shape[1]):
        raise ValueError(
            f"target ranges over [{int(target.min())}, {int(target.max())}], expected [0, {scores.shape[1]})"
        )


def _check_distinct(items: Tensor, what: str) -> None:
    ordered = items.sort(1).values
    repeated = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1).sum()
    if int(repeated):
        raise ValueError(f"{int(repeated)} rows of {what} repeat an item: deduplicate them first")
