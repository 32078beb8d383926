"""The reference for masked attention: plain torch, any float dtype, gradients by autograd.

    out_i = sum_j softmax_j(scale <q_i, k_j>) v_j        over the keys j with mask_j

A query that is not wanted, or that has no key, gives zeros and gets no gradient. Masked keys and values and queries
that are not wanted have no effect on the result, even if they hold NaN.
"""

import torch
from torch import Tensor

from loka.kernels.backend import accept_every_call

supports = accept_every_call


def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, wanted: Tensor | None, *, scale: float) -> Tensor:
    """See `loka.kernels.masked_attention.masked_attention`. Computes in at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    seen = mask[:, None, :, None]
    answered = mask.any(1)[:, None] if wanted is None else mask.any(1)[:, None] & wanted
    q = torch.where(answered[:, None, :, None], q, 0)
    keys, values = (torch.where(seen, t, 0).to(wide).repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    # not -inf: softmax and gradient of a row without keys would be NaN
    scores = (q.to(wide) @ keys.mT * scale).masked_fill(~mask[:, None, None, :], torch.finfo(wide).min)
    return torch.where(answered[:, None, :, None], scores.softmax(-1) @ values, 0).to(q.dtype)
