"""attention: HSTU's attention, silu(alpha Q K^T + bias) V, over ragged rows; forward and backward."""

from typing import cast

import torch
from torch import Tensor

from loka.kernels import registry
from loka.kernels.attention.call import AttentionCall
from loka.kernels.attention.reference import locate
from loka.kernels.backend import require_library
from loka.kernels.registry import Selection, pick

__all__ = ["AttentionCall", "choose", "describe", "load", "locate", "silu_attention"]


def silu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_length: int,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times: Tensor | None = None,
    query_times: Tensor | None = None,
    divisor: float | None = None,
    alpha: float = 1.0,
    backend: str = "auto",
) -> Tensor:
    """Compute causal SiLU attention over ragged rows. Differentiable; `reference.py` has the formula.

    Args:
        q: [total, H, d_qk], all rows concatenated.
        k: [total, H, d_qk].
        v: [total, H, d_v].
        offsets: int64 [rows + 1]; row r is positions offsets[r] to offsets[r + 1].
        max_length: upper bound of the row lengths.
        position_bias: [H, entries], or [1, entries] shared by all heads, indexed by i - j.
        time_bias: [H, buckets], or [1, buckets], indexed by the bucket of query_times[i] - times[j].
        times: int64 [total], required with `time_bias`.
        query_times: int64 [total]; None for `times`.
        divisor: divides the sum over keys; None for the length of the row.
        alpha: multiplies the scores.
        backend: a name of the registry, or "auto".

    Returns:
        [total, H, d_v], in v's dtype.

    Example:
        >>> out = silu_attention(q, k, v, offsets, max_length=200, divisor=200.0)
    """
    _check(q, k, v, offsets, position_bias, time_bias, times, query_times)
    chosen = choose(q, v, offsets, max_length, backend=backend)
    out = chosen.backend.run(
        q, k, v, offsets, max_length=max_length, position_bias=position_bias, time_bias=time_bias, times=times,
        query_times=query_times, divisor=divisor, alpha=alpha,
    )  # fmt: skip
    return cast(Tensor, out)


def choose(q: Tensor, v: Tensor, offsets: Tensor, max_length: int, *, backend: str = "auto") -> Selection:
    """Return the backend that `silu_attention` runs for these operands.

    Args:
        q, v, offsets, max_length, backend: as in `silu_attention`.

    Returns:
        The backend, and why those preferred to it refused.

    Raises:
        UnsupportedError: the backend named cannot run the call.

    Example:
        >>> choose(q, v, offsets, 200).name
    """
    return pick("attention", backend, describe(q, v, offsets, max_length), q.device)


def load() -> None:
    """Import all backends, because torch.compile cannot trace an import."""
    registry.load("attention")
    if require_library("triton", "dev"):
        from loka.kernels.attention import triton_ops  # noqa: F401


def describe(q: Tensor, v: Tensor, offsets: Tensor, max_length: int) -> AttentionCall:
    """Describe a call for `supports`.

    Args:
        q, v, offsets, max_length: as in `silu_attention`.

    Returns:
        The call without its tensors.

    Example:
        >>> describe(q, v, offsets, 200)
    """
    return AttentionCall(offsets.shape[0] - 1, max_length, q.shape[1], q.shape[2], v.shape[2], q.dtype)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    times: Tensor | None,
    query_times: Tensor | None,
) -> None:
    if q.dim() != 3 or q.shape != k.shape or v.dim() != 3 or v.shape[:2] != q.shape[:2]:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"attention expects q, k [total, H, d_qk] and v [total, H, d_v], got {shapes}")
    if offsets.dim() != 1 or offsets.dtype != torch.int64:
        raise ValueError(f"offsets must be int64 [rows + 1], got {offsets.dtype} {tuple(offsets.shape)}")
    for name, bias in (("position_bias", position_bias), ("time_bias", time_bias)):
        if bias is not None and (bias.dim() != 2 or bias.shape[0] not in (1, q.shape[1])):
            raise ValueError(f"{name} must be [H = {q.shape[1]}, entries] or [1, entries], got {tuple(bias.shape)}")
    if (time_bias is None) != (times is None):
        raise ValueError("times and time_bias belong together: got one without the other")
    for name, t in (("times", times), ("query_times", query_times)):
        if t is not None and (t.shape != q.shape[:1] or t.dtype != torch.int64):
            raise ValueError(f"{name} must be int64 [total = {q.shape[0]}], got {t.dtype} {tuple(t.shape)}")
