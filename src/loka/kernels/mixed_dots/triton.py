"""Triton mixed_dots: x is read once per pass, and mixtures are never written to memory. See `triton_kernels`."""

import torch
from torch import Tensor

from loka.kernels.backend import Verdict, no
from loka.kernels.mixed_dots.call import MixedDotsCall
from loka.kernels.op import invoke
from loka.kernels.triton_device import triton_multiplies_on

MOST_VECTORS, MOST_MIXTURES = 128, 64
MOST_NUMBERS = 128 * 256  # elements of an example, padded to powers of two, that fit into shared memory with the rest


def supports(call: MixedDotsCall, device: torch.device) -> Verdict:
    """Accept up to 128 vectors and 64 mixtures in bf16 or fp16."""
    if call.n > MOST_VECTORS or call.k > MOST_MIXTURES:
        return no(f"holds up to {MOST_VECTORS} vectors and {MOST_MIXTURES} mixtures, not {call.n} and {call.k}")
    wide = max(16, 1 << (call.d - 1).bit_length()) if call.d else 16
    if wide * max(16, 1 << (call.n - 1).bit_length()) > MOST_NUMBERS:
        return no(f"holds up to {MOST_NUMBERS} elements of an example, not {call.n} vectors of {call.d}")
    if call.dtype not in (torch.bfloat16, torch.float16):
        return no(f"multiplies bf16 and fp16, not {call.dtype}")
    return triton_multiplies_on(device, bf16=call.dtype == torch.bfloat16)


def run(x: Tensor, weight: Tensor) -> Tensor:
    """See `loka.kernels.mixed_dots.mixed_dots`. The weight has x's dtype."""
    from loka.kernels.mixed_dots import triton_ops

    result: Tensor = invoke(triton_ops.mixed_dots, x.contiguous(), weight.contiguous())
    return result


def gradient(dp: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return dx [B, n, d] in x's dtype and dW [k, n] in float32."""
    from loka.kernels.mixed_dots import triton_ops

    dx, dw = invoke(triton_ops.mixed_dots_gradient, dp.contiguous(), x.contiguous(), weight.contiguous())
    return dx, dw
