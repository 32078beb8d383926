"""Triton top-k as torch ops, so that torch.compile does not trace the launch code."""

import torch

from loka.kernels.op import fake_of, torch_op
from loka.kernels.topk import triton_kernels as kernels

topk = torch_op("topk")(kernels.topk)


@fake_of(topk)
def _(scores, k, in_order):  # type: ignore[no-untyped-def]
    rows = scores.shape[0]
    return scores.new_empty(rows, k), scores.new_empty(rows, k, dtype=torch.int64)


beam_topk = torch_op("beam_topk")(kernels.beam_topk)


@fake_of(beam_topk)
def _(logits, beam_scores, k, mask, lse):  # type: ignore[no-untyped-def]
    shape = (logits.shape[0], k)
    index = {"dtype": torch.int64}
    return (
        logits.new_empty(shape, dtype=torch.float32),
        logits.new_empty(shape, **index),
        logits.new_empty(shape, **index),
    )
