"""The reference for beam attention: scores, softmax and sum in float32 (float64 for float64), rounded once.

    s_bj  = scale <q_b, k_j>,  j < length of the request;     out_b = sum_j softmax(s_b)_j v_j;     0 if the length is 0

Keys and values at or beyond the length are never used, whatever they hold. `ancestors` is the same over a beam's own
past. A quantized result is quantized after rounding to the output dtype, as by a separate op.
"""

import torch
from torch import Tensor

from loka.formats import QTensor, Spec, quantize
from loka.kernels.backend import accept_every_call

supports = accept_every_call


def run(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float) -> Tensor:
    """See `loka.kernels.beam_attention.beam_attention`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = k.shape[2]
    seen = (torch.arange(k.shape[1], device=k.device)[None, :] < lengths[:, None])[:, :, None, None]
    keys, values = (torch.where(seen, t.to(wide), 0) for t in (k, v))
    queries = q.to(wide).reshape(*q.shape[:2], groups, -1, q.shape[3])
    s = torch.einsum("rbghd,rsgd->rbghs", queries, keys) * scale
    s = s.masked_fill(~seen.movedim(1, -1)[:, None], float("-inf"))
    # A request without context has only -inf scores, whose softmax is NaN. NaNs in queries are kept.
    weights = torch.where((lengths > 0)[:, None, None, None, None], torch.softmax(s, -1), 0.0)
    out = torch.einsum("rbghs,rsgd->rbghd", weights, values).flatten(2, 3)
    return out if out.dtype == q.dtype else out.to(q.dtype)


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
    """See `loka.kernels.beam_attention.ancestor_attention`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    past_k, past_v = collect(k, v, keys, values, ancestors, keep=keep)
    s = torch.einsum("rbhd,prbhd->rbhp", q.to(wide), past_k.to(wide)) * scale
    out = torch.einsum("rbhp,prbhd->rbhd", torch.softmax(s, -1), past_v.to(wide))
    out = out if out.dtype == q.dtype else out.to(q.dtype)
    return out if spec is None else quantize(out.reshape(-1, q.shape[2] * q.shape[3]), spec)


def collect(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, ancestors: Tensor, *, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return every beam's keys and values [P + 1, R, B, H, D], the new ones last; with `keep`, cache those too."""
    steps, beams = ancestors.shape[0], k.shape[1]
    where = ancestors.long()[..., None, None].expand(-1, -1, -1, *k.shape[2:])
    if keep:
        keys[steps, :, :beams].copy_(k)
        values[steps, :, :beams].copy_(v)
    if steps == 0:
        return k[None], v[None]
    return torch.cat([keys[:steps].gather(2, where), k[None]]), torch.cat([values[:steps].gather(2, where), v[None]])
