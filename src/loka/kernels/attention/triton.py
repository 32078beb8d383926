"""Triton SiLU attention: bf16, fp16 and fp32, head widths up to 256, forward and backward."""

import torch
from torch import Tensor

from loka.kernels.attention.call import AttentionCall
from loka.kernels.backend import Verdict, no
from loka.kernels.strides import unit_rows
from loka.kernels.triton_device import triton_multiplies_on

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 256


def supports(call: AttentionCall, device: torch.device) -> Verdict:
    """Accept bf16, fp16 and fp32 heads that fit into shared memory, on a CUDA device or in Triton's interpreter."""
    if call.dtype not in _DTYPES:
        return no(f"reads bf16, fp16 and fp32, not {call.dtype}")
    if max(call.d_qk, call.d_v) > WIDEST:
        return no(f"head widths go up to {WIDEST}, got qk {call.d_qk} and v {call.d_v}")
    return triton_multiplies_on(device, bf16=call.dtype == torch.bfloat16)


def run(
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
) -> Tensor:
    """See `loka.kernels.attention.silu_attention`."""
    from loka.kernels.attention import triton_ops

    if divisor is not None and divisor <= 0:
        raise ValueError(f"divisor must be positive, got {divisor}; None divides by the length of each row")
    q, k, v = map(unit_rows, (q, k, v))
    asked = times if query_times is None else query_times
    times, asked = (None if t is None else t.contiguous() for t in (times, asked))
    position_bias, time_bias = (None if b is None else unit_rows(b) for b in (position_bias, time_bias))
    out: Tensor = triton_ops.silu_attention(
        q, k, v, offsets, times, asked, position_bias, time_bias, max_length, divisor or 0.0, alpha
    )
    return out
