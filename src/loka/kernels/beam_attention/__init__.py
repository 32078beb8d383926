"""beam_attention: all beams of a request attend to one shared context; and each to its own short past, found by its ancestors."""

from typing import Any

from torch import Tensor, float8_e4m3fn, int32, int64

from loka.formats import QTensor, Spec
from loka.kernels.beam_attention.call import AncestorAttentionCall, BeamAttentionCall
from loka.kernels.registry import pick

__all__ = ["AncestorAttentionCall", "BeamAttentionCall", "ancestor_attention", "beam_attention"]


def beam_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float | None = None, backend: str = "auto"
) -> Tensor:
    """softmax(scale q k^T) v: q [R, B, H, D] over the first lengths[r] of k, v [R, S, G, D] -> [R, B, H, D].

    Query head h reads key-value head h // (H / G). scale: 1 / sqrt(D) unless given. A request of length 0 gets zeros. Pass the same tensor as k and v where
    they are one: it is then read once. k and v may be float8_e4m3fn, where q is not: they count as they are, without scales.
    """
    _check(q, k, v, lengths)
    requests, beams, heads, d = q.shape
    call = BeamAttentionCall(requests, beams, heads, k.shape[2], k.shape[1], d, q.dtype, same(k, v), None if k.dtype == q.dtype else k.dtype)  # fmt: skip
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
    """The self-attention of a decode step: q [R, B, H, D] over the beam's earlier keys and values and its own of this step, k, v [R, B, H, D].

    keys, values [L, R, W, H, D] hold the steps made so far, where they were made; ancestors int32 [P, R, B] says which of the W beams of step p the
    beam descends from. Nothing is moved when beams are reordered, only this table changes. With `keep`, k and v are written into step P of keys and values in the
    same pass: the one op here that changes its operands, since caches are static memory. The result is [R, B, H, D], or under `spec` a
    QTensor [R B, H D], as the next linear takes it.
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
    """Whether keys and values are one tensor."""
    return k is v


def _check(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]):
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"beam_attention takes q [R, B, H, D] and k, v [R, S, G, D], got {shapes}")
    if k.dtype != v.dtype or k.dtype not in (q.dtype, float8_e4m3fn):
        raise ValueError(f"q, k and v must have one dtype, or k and v be float8_e4m3fn, got {q.dtype}, {k.dtype}, {v.dtype}")  # fmt: skip
    if lengths.shape != q.shape[:1] or lengths.dtype not in (int32, int64):
        raise ValueError(f"lengths must be int32 or int64 [{q.shape[0]}], got {lengths.dtype} {tuple(lengths.shape)}")
