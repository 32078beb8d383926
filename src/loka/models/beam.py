"""Beam search over semantic ids: the most probable ids of a OneRec model, optionally only valid ones.

    score(c_1 ... c_p) = sum_i log softmax(logits_i)[c_i];    each level keeps the `beams` best continuations

With `valid`, continuations that lead to no item get a score of -inf before the best are chosen. A request with fewer
valid ids than beams ends with beams of score -inf and item -1. Shapes never depend on data. The softmax is over the
whole codebook, or with normalize="valid" over the valid codes, for models trained with a loss over valid codes.

This is the reference implementation: it keeps log-probabilities in float32 and uses torch.topk.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from loka.models.onerec import Context, OneRec, Past, reorder

if TYPE_CHECKING:
    from loka.semantic_ids import Trie


@dataclass(frozen=True)
class Beams:
    """Ids and log-probabilities, best first, and their items if valid ids were given."""

    codes: Tensor  # int64 [B, W, levels]
    scores: Tensor  # float32 [B, W]
    items: Tensor | None = None  # int64 [B, W], -1 for a beam that is no item


@torch.no_grad()
def search(
    model: OneRec,
    context: Context,
    *,
    beams: int,
    valid: "Trie | None" = None,
    normalize: Literal["codebook", "valid"] = "codebook",
) -> Beams:
    """Return the `beams` most probable ids of every request, or fewer if there are fewer ids."""
    if beams < 1:
        raise ValueError(f"beam search needs at least one beam, got {beams}")
    if normalize not in ("codebook", "valid") or (normalize == "valid" and valid is None):
        seen = "no valid ids were given" if normalize == "valid" else "unknown"
        raise ValueError(f"normalize={normalize!r} ({seen}); expected 'codebook', or 'valid' together with valid ids")
    requests, device = context.mask.shape[0], context.mask.device
    scores = torch.zeros(requests, 1, device=device)
    nodes = torch.zeros(requests, 1, dtype=torch.int64, device=device)
    spelled = torch.empty(requests, 1, 0, dtype=torch.int64, device=device)
    past: list[Past] | None = None
    codes: Tensor | None = None
    for level in range(model.config.levels):
        logits, carried = model.step(context, codes, past)
        allowed = None if valid is None else valid.mask(nodes, level)
        if allowed is not None and normalize == "valid":
            # not -inf: a dead beam has no valid code, and a softmax over -inf alone is NaN
            logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
        total = scores[..., None] + logits.log_softmax(-1)
        if allowed is not None:
            total = total.masked_fill(~allowed, float("-inf"))
        width = total.shape[2]
        scores, best = total.flatten(1).topk(min(beams, total.shape[1] * width), dim=1)
        parents, codes = best // width, best % width
        past = reorder(carried, parents)
        spelled = torch.cat([spelled.gather(1, parents[..., None].expand(-1, -1, level)), codes[..., None]], 2)
        if valid is not None:
            nodes = torch.where(scores > float("-inf"), valid.step(nodes.gather(1, parents), codes), -1)
    return Beams(spelled, scores, None if valid is None else valid.items(nodes))
