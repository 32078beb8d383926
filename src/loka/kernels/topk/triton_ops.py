"""The Triton selections as torch ops, so that torch.compile sees a call and not Python."""

import torch
from torch import Tensor

from loka.kernels.topk import triton_kernels as kernels


@torch.library.custom_op("loka::topk", mutates_args=())
def topk(scores: Tensor, k: int, in_order: bool) -> tuple[Tensor, Tensor]:
    """values, indices [R, k]."""
    return kernels.topk(scores, k, in_order)


@topk.register_fake
def _(scores, k, in_order):  # type: ignore[no-untyped-def]
    rows = scores.shape[0]
    return scores.new_empty(rows, k), scores.new_empty(rows, k, dtype=torch.int64)


@torch.library.custom_op("loka::beam_topk", mutates_args=())
def beam_topk(
    logits: Tensor, beam_scores: Tensor, k: int, mask: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """values, beams, codes [R, k]."""
    return kernels.beam_topk(logits, beam_scores, k, mask, lse)


@beam_topk.register_fake
def _(logits, beam_scores, k, mask, lse):  # type: ignore[no-untyped-def]
    shape = (logits.shape[0], k)
    index = {"dtype": torch.int64}
    return (
        logits.new_empty(shape, dtype=torch.float32),
        logits.new_empty(shape, **index),
        logits.new_empty(shape, **index),
    )
