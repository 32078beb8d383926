"""The law of masked attention: plain torch, any float type, gradients by autograd.

    out_i = sum_j softmax_j(scale <q_i, k_j>) v_j        over the keys j that the mask names

A query that is not wanted, and one that sees no key, is answered with zeros and has no gradient. What an unseen key or value, or a query that is not wanted, holds is never read: not even a NaN gets through.
"""

import torch
from torch import Tensor

from loka.kernels.backend import YES, Verdict
from loka.kernels.masked_attention.call import MaskedAttentionCall


def supports(call: MaskedAttentionCall, device: torch.device) -> Verdict:
    """Everything."""
    return YES


def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, wanted: Tensor | None, *, scale: float) -> Tensor:
    """The law, in at least float32.

    Args:
        q: [B, H, T, d].
        k, v: [B, G, S, d], G dividing H.
        mask: bool [B, S], True for keys that are seen.
        wanted: bool [B, T], True for queries whose answer is read; None: all.
        scale: of the scores.

    Returns:
        [B, H, T, d] in q's type, zeros where nothing is seen or wanted.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    seen = mask[:, None, :, None]
    answered = mask.any(1)[:, None] if wanted is None else mask.any(1)[:, None] & wanted
    q = torch.where(answered[:, None, :, None], q, 0)
    keys, values = (torch.where(seen, t, 0).to(wide).repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    # not -inf: a row without keys would have no softmax, nor a gradient
    scores = (q.to(wide) @ keys.mT * scale).masked_fill(~mask[:, None, None, :], torch.finfo(wide).min)
    return torch.where(answered[:, None, :, None], scores.softmax(-1) @ values, 0).to(q.dtype)
