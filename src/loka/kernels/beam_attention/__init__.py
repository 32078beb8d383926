"""beam_attention: the attention of a beam search.

beam_attention       all beams of a request attend to one shared context
ancestor_attention   each beam attends to its own short past, found through a table of ancestors
"""

from typing import Any

from torch import Tensor, float8_e4m3fn, int32, int64

from loka.formats import QTensor, Spec
from loka.kernels.beam_attention.call import AncestorAttentionCall, BeamAttentionCall
from loka.kernels.registry import pick

__all__ = ["AncestorAttentionCall", "BeamAttentionCall", "ancestor_attention", "beam_attention"]


def beam_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float | None = None, backend: str = "auto"
) -> Tensor:
    """Compute softmax(scale q k^T) v for all beams of each request over the request's context.

    Args:
        q: [R, B, H, D].
        k, v: [R, S, G, D] in q's dtype, or float8_e4m3fn without scales; a backend that then multiplies in FP8 rounds
            queries by e4m3:row, each head of a beam by its own scale, and 256 times the weights relative to the largest
            so far. Query head h reads key-value head h // (H / G). If k and v are equal, pass the
            same tensor twice: it is then read once.
        lengths: int32 or int64 [R]; request r attends to its first lengths[r] keys.
        scale: multiplies the scores; None for 1 / sqrt(D).
        backend: a name of the registry, or "auto".

    Returns:
        [R, B, H, D] in q's dtype, zeros for requests of length 0.

    Example:
        >>> out = beam_attention(q, k, v, lengths)
    """
    _check(q, k, v, lengths)
    requests, beams, heads, d = q.shape
    call = BeamAttentionCall(
        requests, beams, heads, k.shape[2], k.shape[1], d, q.dtype, same(k, v), None if k.dtype == q.dtype else k.dtype
    )
    chosen = pick("beam_attention", backend, call, q.device)
    out: Tensor = chosen.backend.run(q, k, v, lengths, scale=q.shape[3] ** -0.5 if scale is None else scale)
    return out


def ancestor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    ancestors: Tensor,
    *,
    keep: bool = True,
    spec: Spec | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor | QTensor:
    """Compute the self-attention of a decode step: each beam attends to its P earlier tokens and to its own new one.

    The cache is not moved when beams are reordered; only the table of ancestors changes.

    Args:
        q, k, v: [R, B, H, D], of the new tokens.
        keys, values: the cache [L, R, W, H, D], indexed by step and by the beam that the token was decoded in.
        ancestors: int32 [P, R, B]; which of the W beams of step p the beam descends from.
        keep: also write k and v into step P of the cache, in place.
        spec: how to quantize the result, or None.
        scale: multiplies the scores; None for 1 / sqrt(D).
        backend: a name of the registry, or "auto".

    Returns:
        [R, B, H, D], or with `spec` a QTensor [R B, H D], ready for the next linear.

    Example:
        >>> out = ancestor_attention(q, k, v, keys, values, ancestors)
    """
    _check_step(q, k, v, keys, values, ancestors, keep)
    requests, beams, heads, d = q.shape
    call = AncestorAttentionCall(requests, beams, heads, ancestors.shape[0], d, q.dtype, keep, spec)
    chosen: Any = pick("beam_attention", backend, call, q.device).backend
    scale = d**-0.5 if scale is None else scale
    out: Tensor | QTensor = chosen.ancestors(q, k, v, keys, values, ancestors, keep=keep, spec=spec, scale=scale)
    return out


def _check_step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, ancestors: Tensor, keep: bool) -> None:
    named = {"q": q, "k": k, "v": v, "keys": keys, "values": values, "ancestors": ancestors}
    if q.dim() != 4 or not q.shape == k.shape == v.shape or keys.dim() != 5 or keys.shape != values.shape:
        fits = False
    else:
        same_beams = (keys.shape[1], *keys.shape[3:]) == (q.shape[0], *q.shape[2:])
        fits = same_beams and ancestors.dim() == 3 and ancestors.shape[1:] == q.shape[:2]
        fits = fits and ancestors.shape[0] + int(keep) <= keys.shape[0] and (not keep or q.shape[1] <= keys.shape[2])
    if not fits:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in named.items())
        raise ValueError(
            "ancestor_attention takes q, k, v [R, B, H, D], keys, values [L, R, W, H, D] and ancestors [P, R, B], with room for "
            f"step P where it is kept; got {shapes}"
        )
    if ancestors.dtype != int32:
        raise ValueError(f"ancestors must be int32, got {ancestors.dtype}")
    if len({t.dtype for name, t in named.items() if name != "ancestors"}) > 1:
        kinds = ", ".join(f"{name} {t.dtype}" for name, t in named.items())
        raise ValueError(f"queries, keys and values must have one dtype, got {kinds}")


def same(k: Tensor, v: Tensor) -> bool:
    """Return True if keys and values are the same tensor object."""
    return k is v


def _check(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]):
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"beam_attention takes q [R, B, H, D] and k, v [R, S, G, D], got {shapes}")
    if k.dtype != v.dtype or k.dtype not in (q.dtype, float8_e4m3fn):
        raise ValueError(f"q, k and v must have one dtype, or k and v be float8_e4m3fn, got {q.dtype}, {k.dtype}, {v.dtype}")  # fmt: skip
    if lengths.shape != q.shape[:1] or lengths.dtype not in (int32, int64):
        raise ValueError(f"lengths must be int32 or int64 [{q.shape[0]}], got {lengths.dtype} {tuple(lengths.shape)}")
