"""attention: silu(alpha Q K^T + bias) V over ragged rows, the attention of HSTU; forward and backward."""

from typing import Any

import torch
from torch import Tensor

from loka.kernels.attention import reference
from loka.kernels.attention.call import AttentionCall

__all__ = ["AttentionCall", "describe", "silu_attention"]


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
    run: Any = reference.run,
) -> Tensor:
    """q, k [total, H, d_qk] and v [total, H, d_v] of ragged rows -> [total, H, d_v]; `run` is the backend's.

    position_bias [H, entries] is indexed by i - j, time_bias [H, buckets] by the bucket of query_times[i] - times[j] (int64 [total]);
    query_times defaults to times. divisor: what the sum is divided by, None for the length of the row. Rows are at most max_length long.
    """
    _check(q, k, v, offsets, position_bias, time_bias, times, query_times)
    out: Tensor = run(
        q,
        k,
        v,
        offsets,
        max_length=max_length,
        position_bias=position_bias,
        time_bias=time_bias,
        times=times,
        query_times=query_times,
        divisor=divisor,
        alpha=alpha,
    )
    return out


def describe(q: Tensor, v: Tensor, offsets: Tensor, max_length: int) -> AttentionCall:
    """The call of these operands, for `supports`."""
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
        if bias is not None and (bias.dim() != 2 or bias.shape[0] != q.shape[1]):
            raise ValueError(f"{name} must be [H = {q.shape[1]}, entries], got {tuple(bias.shape)}")
    if (time_bias is None) != (times is None):
        raise ValueError("times and time_bias belong together: got one without the other")
    for name, t in (("times", times), ("query_times", query_times)):
        if t is not None and (t.shape != q.shape[:1] or t.dtype != torch.int64):
            raise ValueError(f"{name} must be int64 [total = {q.shape[0]}], got {t.dtype} {tuple(t.shape)}")
