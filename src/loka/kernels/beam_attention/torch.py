"""torch's scaled_dot_product_attention, with the beams as the query length: keys and values are shared without being repeated per beam.

The lengths become a mask [R, 1, 1, S], which keeps its flash kernel away (it takes none) and leaves the memory-efficient one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.kernels.backend import YES, Verdict
from loka.kernels.beam_attention.call import AncestorAttentionCall, BeamAttentionCall
from loka.kernels.beam_attention.reference import collect
from loka.kernels.quantize import quantize


def supports(call: BeamAttentionCall | AncestorAttentionCall, device: torch.device) -> Verdict:
    """Everything torch runs on."""
    return YES


def run(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float) -> Tensor:
    """q [R, B, H, D], k, v [R, S, G, D] -> [R, B, H, D]."""
    if k.shape[1] == 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    if k.dtype != q.dtype:
        one = v is k
        k = k.to(q.dtype)
        v = k if one else v.to(q.dtype)
    seen = torch.arange(k.shape[1], device=k.device)[None, :] < lengths[:, None]
    values = torch.where(seen[:, :, None, None], v, 0)  # a weight of 0 does not silence a NaN
    keys = values if v is k else torch.where(seen[:, :, None, None], k, 0)
    # a request without context attends to its zeros: the result is 0, where an all-masked row would be NaN
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
    """Gathered keys and values [P + 1, R, B, H, D], then the same call with one query each; quantised by the op that does it."""
    past = collect(k, v, keys, values, ancestors, keep=keep)
    past_k, past_v = (t.flatten(1, 2).permute(1, 2, 0, 3) for t in past)
    out = F.scaled_dot_product_attention(q.flatten(0, 1).unsqueeze(2), past_k, past_v, scale=scale)
    out = out.squeeze(2).reshape(q.shape)
    return out if spec is None else quantize(out.view(-1, q.shape[2] * q.shape[3]), spec)
