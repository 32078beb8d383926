"""The reference for selection: a stable sort.

    order        value descending, then index ascending; NaN ranks first, so that it is not lost; -0 equals 0
    absent       -inf is never chosen; slots without a score hold value -inf and index 0
    unsorted     the same k, listed by ascending index, absent slots last

    beams        score(b, c) = beam_score[b] + (logit[b, c] - lse[b]), each operation rounded to float32;
                 lse[b] = log sum_c exp logit[b, c] over all codes;
                 codes that the mask forbids, and codes of a beam whose score is -inf, are absent

The score is a non-decreasing function of the logit, rounding included, so a kernel may compare maxima of logits only.
"""

import torch
from torch import Tensor

from loka.kernels.backend import accept_every_call

supports = accept_every_call


def run(scores: Tensor, k: int, *, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """See `loka.kernels.topk.topk`."""
    values, indices = scores.sort(dim=1, descending=True, stable=True)
    return present(values[:, :k], indices[:, :k], in_order=sorted)


def present(values: Tensor, indices: Tensor, *, in_order: bool) -> tuple[Tensor, Tensor]:
    """Turn the k best into the outputs: set the index of absent slots to 0, and sort by index if not `in_order`."""
    absent = values == float("-inf")
    if not in_order:
        indices, place = indices.masked_fill(absent, torch.iinfo(torch.int64).max).sort(dim=1)
        values, absent = values.gather(1, place), absent.gather(1, place)
    return values, indices.masked_fill(absent, 0)


def beam_totals(logits: Tensor, beam_scores: Tensor, mask: Tensor | None, lse: Tensor | None) -> Tensor:
    """Return the scores of all continuations, float32 [R, B, V]."""
    wide = logits.float()
    lse = wide.logsumexp(-1) if lse is None else lse
    totals = beam_scores[..., None] + (wide - lse[..., None])
    return totals if mask is None else totals.masked_fill(~mask, float("-inf"))


def beams(
    logits: Tensor, beam_scores: Tensor, k: int, *, mask: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `loka.kernels.topk.beam_topk`."""
    values, flat = run(beam_totals(logits, beam_scores, mask, lse).flatten(1), k)
    codes = max(logits.shape[2], 1)
    return values, flat // codes, flat % codes
