"""Triton masked attention: skips padding on either side of a row; bf16, fp16 and fp32, heads up to 128 wide."""

import torch
from torch import Tensor

from loka.kernels.backend import Verdict, no
from loka.kernels.masked_attention.call import MaskedAttentionCall
from loka.kernels.strides import near_rows
from loka.kernels.triton_device import triton_multiplies_on

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 128


def supports(call: MaskedAttentionCall, device: torch.device) -> Verdict:
    """Accept bf16, fp16 and fp32 heads that fit into shared memory, on a CUDA device or in Triton's interpreter."""
    if call.dtype not in _DTYPES:
        return no(f"reads bf16, fp16 and fp32, not {call.dtype}")
    if call.d > WIDEST:
        return no(f"heads are up to {WIDEST} wide, got {call.d}")
    return triton_multiplies_on(device, bf16=call.dtype == torch.bfloat16)


def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, wanted: Tensor | None, *, scale: float) -> Tensor:
    """See `loka.kernels.masked_attention.masked_attention`."""
    from loka.kernels.masked_attention import triton_ops

    q, k, v = map(near_rows, (q, k, v))
    out: Tensor = triton_ops.masked_attention(
        q, k, v, mask.contiguous(), None if wanted is None else wanted.contiguous(), scale
    )[0]
    return out
