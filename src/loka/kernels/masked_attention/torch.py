"""torch's scaled_dot_product_attention.

Its flash kernel takes no mask; the cuDNN and memory-efficient kernels do, but compute padding like everything else.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.kernels.backend import accept_every_call

supports = accept_every_call


def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, wanted: Tensor | None, *, scale: float) -> Tensor:
    """See `loka.kernels.masked_attention.masked_attention`."""
    some = mask.any(1)[:, None]
    q = torch.where((some if wanted is None else some & wanted)[:, None, :, None], q, 0)
    if k.shape[2] == 0:
        return q * 1  # all zeros: there are no keys
    seen = mask[:, None, :, None]
    # Fold heads that share keys into more queries of one head: with a mask, torch runs GQA only by a kernel that writes
    # the scores to memory.
    folded = q.reshape(q.shape[0], k.shape[1], q.shape[1] // k.shape[1] * q.shape[2], q.shape[3])
    out = F.scaled_dot_product_attention(
        folded,
        torch.where(seen, k, 0),  # 0 * NaN is NaN, so masking the weights is not enough
        torch.where(seen, v, 0),
        attn_mask=(mask | ~some)[:, None, None, :],  # a row without keys attends to zeros; fully masked it would be NaN
        scale=scale,
    ).reshape(q.shape)
    return out if wanted is None else torch.where(wanted[:, None, :, None], out, 0)
