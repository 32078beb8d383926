"""torch.topk. It takes any of equal scores: the ties at the edge are settled by one more pass over the scores.

Its values are always the law's, so only indices need settling: every score above the k-th value is chosen, and of those equal to it the first ones.
"""

import torch
from torch import Tensor

from loka.kernels.backend import YES, Verdict
from loka.kernels.topk import reference
from loka.kernels.topk.call import BeamTopkCall, TopkCall


def supports(call: TopkCall | BeamTopkCall, device: torch.device) -> Verdict:
    """Everything torch runs on."""
    return YES


def run(scores: Tensor, k: int, *, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """scores [R, n] -> values and int64 indices [R, k]."""
    values, indices = scores.topk(k, dim=1, sorted=True)
    if k:
        indices = _settle(scores, values, k)
        values = scores.gather(1, indices)
        values, order = values.sort(dim=1, descending=True, stable=True)
        indices = indices.gather(1, order)
    return reference.present(values, indices, in_order=sorted)


def _settle(scores: Tensor, values: Tensor, k: int) -> Tensor:
    """The indices of the k best by ascending index, ties to the lowest."""
    edge = values[:, -1:]
    unordered = scores.isnan()
    above = torch.where(edge.isnan(), False, unordered | (scores > edge))
    equal = torch.where(edge.isnan(), unordered, scores == edge)
    wanted = k - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= wanted))
    place = chosen.cumsum(1, dtype=torch.int32).to(torch.int64) - 1
    place = torch.where(chosen, place, k)  # what is not chosen lands in a column that is cut off
    index = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    return scores.new_zeros(scores.shape[0], k + 1, dtype=torch.int64).scatter(1, place, index)[:, :k]


def beams(
    logits: Tensor, beam_scores: Tensor, k: int, *, mask: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """values, beams, codes [R, k]; the scores are written down."""
    values, flat = run(reference.beam_totals(logits, beam_scores, mask, lse).flatten(1), k)
    codes = max(logits.shape[2], 1)
    return values, flat // codes, flat % codes
