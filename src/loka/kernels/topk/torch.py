"""torch.topk, which picks arbitrarily among equal scores; another pass over the scores resolves ties.

The values of torch.topk are always right, so only indices need work: every score above the k-th value is chosen, and of
those equal to it the first ones.
"""

import torch
from torch import Tensor

from loka.kernels.backend import accept_every_call
from loka.kernels.topk import reference

supports = accept_every_call


def run(scores: Tensor, k: int, *, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """See `loka.kernels.topk.topk`."""
    values, indices = scores.topk(k, dim=1, sorted=True)
    if k:
        indices = _resolve_ties(scores, values, k)
        values = scores.gather(1, indices)
        values, order = values.sort(dim=1, descending=True, stable=True)
        indices = indices.gather(1, order)
    return reference.present(values, indices, in_order=sorted)


def _resolve_ties(scores: Tensor, values: Tensor, k: int) -> Tensor:
    """Return the indices of the k best, ascending; of equal scores the lowest indices are chosen."""
    edge = values[:, -1:]
    unordered = scores.isnan()
    above = torch.where(edge.isnan(), False, unordered | (scores > edge))
    equal = torch.where(edge.isnan(), unordered, scores == edge)
    wanted = k - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= wanted))
    place = chosen.cumsum(1, dtype=torch.int32).to(torch.int64) - 1
    place = torch.where(chosen, place, k)  # scores that are not chosen go to an extra column, dropped below
    index = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    return scores.new_zeros(scores.shape[0], k + 1, dtype=torch.int64).scatter(1, place, index)[:, :k]


def beams(
    logits: Tensor, beam_scores: Tensor, k: int, *, mask: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `loka.kernels.topk.beam_topk`. Writes all scores to memory."""
    values, flat = run(reference.beam_totals(logits, beam_scores, mask, lse).flatten(1), k)
    codes = max(logits.shape[2], 1)
    return values, flat // codes, flat % codes
