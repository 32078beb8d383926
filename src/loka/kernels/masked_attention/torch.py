"""torch's scaled_dot_product_attention. The mask keeps its flash kernel away, which takes none; cuDNN's and the memory-efficient one walk over padding as over everything else."""

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.kernels.backend import YES, Verdict
from loka.kernels.masked_attention.call import MaskedAttentionCall


def supports(call: MaskedAttentionCall, device: torch.device) -> Verdict:
    """Everything torch runs on."""
    return YES


def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, wanted: Tensor | None, *, scale: float) -> Tensor:
    """By scaled_dot_product_attention.

    Args:
        q: [B, H, T, d].
        k, v: [B, G, S, d], G dividing H.
        mask: bool [B, S], True for keys that are seen.
        wanted: bool [B, T], True for queries whose answer is read; None: all.
        scale: of the scores.

    Returns:
        [B, H, T, d] in q's type, zeros where nothing is seen or wanted.
    """
    some = mask.any(1)[:, None]
    q = torch.where((some if wanted is None else some & wanted)[:, None, :, None], q, 0)  # nor are these read
    if k.shape[2] == 0:
        return q * 1  # of zeros: no key is seen
    seen = mask[:, None, :, None]
    # Heads that share keys become more queries of one head: with a mask, torch's GQA only has a kernel that writes the scores to memory.
    folded = q.reshape(q.shape[0], k.shape[1], q.shape[1] // k.shape[1] * q.shape[2], q.shape[3])
    out = F.scaled_dot_product_attention(
        folded,
        torch.where(seen, k, 0),  # a weight of zero does not silence a NaN
        torch.where(seen, v, 0),
        attn_mask=(mask | ~some)[:, None, None, :],  # a row without keys sees its zeros, where it would be NaN
        scale=scale,
    ).reshape(q.shape)
    return out if wanted is None else torch.where(wanted[:, None, :, None], out, 0)
