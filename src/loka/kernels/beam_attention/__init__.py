"""beam_attention: all beams of a request attend to one shared context; and each to its own short past, found by its ancestors."""

from typing import Any

from torch import Tensor, int32, int64

from loka.kernels.beam_attention.call import AncestorAttentionCall, BeamAttentionCall
from loka.kernels.registry import pick

__all__ = ["AncestorAttentionCall", "BeamAttentionCall", "ancestor_attention", "beam_attention"]


def beam_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float | None = None, backend: str = "auto"
) -> Tensor:
    """softmax(scale q k^T) v: q [R, B, H, D] over the first lengths[r] of k, v [R, S, G, D] -> [R, B, H, D].

    Query head h reads key-value head h // (H / G). scale: 1 / sqrt(D) unless given. A request of length 0 gets zeros. Pass the same tensor as k and v where
    they are one: it is then read once.
    """
    _check(q, k, v, lengths)
    requests, beams, heads, d = q.shape
    call = BeamAttentionCall(requests, beams, heads, k.shape[2], k.shape[1], d, q.dtype, same(k, v))
    chosen = pick("beam_attention", backend, call, q.device)
    out: Tensor = chosen.backend.run(q, k, v, lengths, scale=q.shape[3] ** -0.5 if scale is None else scale)
    return out


def ancestor_attention(
    q: Tensor, k: Tensor, v: Tensor, ancestors: Tensor, *, scale: float | None = None, backend: str = "auto"
) -> Tensor:
    """The self-attention of a decode step: q [R, B, H, D] over k, v [P, R, W, H, D], the keys and values of P steps in the order they were made.

    ancestors int32 [P, R, B]: which of the W beams of step p the beam descends from (its own place for the step just made). Nothing is moved when
    beams are reordered, only this table changes.
    """
    expected = (ancestors.shape[0], q.shape[0], k.shape[2] if k.dim() == 5 else -1, *q.shape[2:])
    if q.dim() != 4 or k.shape != expected or v.shape != k.shape or ancestors.shape != (k.shape[0], *q.shape[:2]):
        shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in (("q", q), ("k", k), ("v", v), ("ancestors", ancestors)))
        raise ValueError(
            f"ancestor_attention takes q [R, B, H, D], k, v [P, R, W, H, D], ancestors [P, R, B]; got {shapes}"
        )
    if ancestors.dtype != int32:
        raise ValueError(f"ancestors must be int32, got {ancestors.dtype}")
    requests, beams, heads, d = q.shape
    call = AncestorAttentionCall(requests, beams, heads, k.shape[0], d, q.dtype)
    chosen: Any = pick("beam_attention", backend, call, q.device).backend
    out: Tensor = chosen.ancestors(q, k, v, ancestors, scale=q.shape[3] ** -0.5 if scale is None else scale)
    return out


def same(k: Tensor, v: Tensor) -> bool:
    """Whether keys and values are one tensor."""
    return k is v


def _check(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]):
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"beam_attention takes q [R, B, H, D] and k, v [R, S, G, D], got {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if lengths.shape != q.shape[:1] or lengths.dtype not in (int32, int64):
        raise ValueError(f"lengths must be int32 or int64 [{q.shape[0]}], got {lengths.dtype} {tuple(lengths.shape)}")
