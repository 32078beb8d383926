"""masked_attention: softmax(Q K^T) V with a key mask, for batches of histories padded to one length; differentiable."""

from typing import cast

# not `import torch`: the backend `torch` is a submodule of this package
from torch import Tensor, autocast, is_autocast_enabled
from torch import bool as boolean

from loka.kernels import registry
from loka.kernels.backend import require_library
from loka.kernels.masked_attention.call import MaskedAttentionCall
from loka.kernels.registry import Selection, pick

__all__ = ["MaskedAttentionCall", "choose", "load", "masked_attention"]


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    wanted: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute softmax attention over the keys that a mask allows. Differentiable.

    Args:
        q: [B, H, T, d].
        k: [B, G, S, d]. G divides H: H / G query heads share a head of keys and values.
        v: [B, G, S, d].
        mask: bool [B, S], True for keys to attend to. The others are never read, so they may hold NaN.
        wanted: bool [B, T], True for queries whose result is used; the others are not read and give zeros. None: all.
        scale: multiplies the scores; None for 1 / sqrt(d).
        backend: a name of the registry, or "auto".

    Returns:
        [B, H, T, d] in q's dtype; zeros for a query without keys.

    Example:
        >>> mask = torch.arange(256) < lengths[:, None]
        >>> out = masked_attention(q, k, v, mask, wanted=mask)
    """
    _check(q, k, v, mask, wanted)
    run = choose(q, k, backend=backend).backend.run
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if q.device.type == "meta" or not is_autocast_enabled(q.device.type):
        return cast(Tensor, run(q, k, v, mask, wanted, scale=scale))
    with autocast(q.device.type, enabled=False):  # every backend keeps the operands' dtype
        return cast(Tensor, run(q, k, v, mask, wanted, scale=scale))


def choose(q: Tensor, k: Tensor, *, backend: str = "auto") -> Selection:
    """Return the backend that `masked_attention` runs for these operands.

    Args:
        q, k, backend: as in `masked_attention`.

    Returns:
        The backend, and why those preferred to it refused.

    Raises:
        UnsupportedError: the backend named cannot run the call.

    Example:
        >>> choose(q, k).name
    """
    call = MaskedAttentionCall(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3], q.dtype)
    return pick("masked_attention", backend, call, q.device)


def load() -> None:
    """Import all backends, because torch.compile cannot trace an import."""
    registry.load("masked_attention")
    if require_library("triton", "dev"):
        from loka.kernels.masked_attention import triton_ops  # noqa: F401


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, wanted: Tensor | None) -> None:
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] > 0
    if not fits or k.shape[1] == 0 or q.shape[1] % k.shape[1] or not q.dtype == k.dtype == v.dtype:
        seen = ", ".join(f"{name} {t.dtype} {tuple(t.shape)}" for name, t in (("q", q), ("k", k), ("v", v)))
        raise ValueError(
            f"masked attention expects q [B, H, T, d], k and v [B, G, S, d] with G dividing H and d > 0, of one type; got {seen}"
        )
    for name, t, size in (("mask", mask, k.shape[2]), ("wanted", wanted, q.shape[2])):
        if t is not None and (t.dtype != boolean or t.shape != (q.shape[0], size)):
            raise ValueError(f"{name} must be bool [{q.shape[0]}, {size}], got {t.dtype} {tuple(t.shape)}")
