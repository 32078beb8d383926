"""torch's scaled_dot_product_attention with beams as the query length: keys and values are not repeated per beam.

Lengths become a mask [R, 1, 1, S]. The flash kernel takes no mask, so torch uses the memory-efficient one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.kernels.backend import accept_every_call
from loka.kernels.beam_attention.reference import collect
from loka.kernels.quantize import quantize

supports = accept_every_call


def run(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float) -> Tensor:
    """See `loka.kernels.beam_attention.beam_attention`."""
    if k.shape[1] == 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    if k.dtype != q.dtype:
        one = v is k
        k = k.to(q.dtype)
        v = k if one else v.to(q.dtype)
    seen = torch.arange(k.shape[1], device=k.device)[None, :] < lengths[:, None]
    values = torch.where(seen[:, :, None, None], v, 0)  # 0 * NaN is NaN, so masking the weights is not enough
    keys = values if v is k else torch.where(seen[:, :, None, None], k, 0)
    # A request without context attends to zeros, so its result is 0; a fully masked row would be NaN.
    mask = (seen | (lengths == 0)[:, None])[:, None, None, :]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2),
        attn_mask=mask, scale=scale, enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2).contiguous()


def ancestors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    ancestors: Tensor,
    *,
    keep: bool,
    spec: Spec | None,
    scale: float,
) -> Tensor | QTensor:
    """See `loka.kernels.beam_attention.ancestor_attention`. Gathers keys and values, and quantizes in a separate op."""
    past = collect(k, v, keys, values, ancestors, keep=keep)
    past_k, past_v = (t.flatten(1, 2).permute(1, 2, 0, 3) for t in past)
    out = F.scaled_dot_product_attention(q.flatten(0, 1).unsqueeze(2), past_k, past_v, scale=scale)
    out = out.squeeze(2).reshape(q.shape)
    return out if spec is None else quantize(out.view(-1, q.shape[2] * q.shape[3]), spec)
