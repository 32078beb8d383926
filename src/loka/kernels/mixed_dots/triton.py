"""Triton mixed_dots: x is read once per pass, and mixtures are never written to memory. See `triton_kernels`."""

import torch
from torch import Tensor

from loka.kernels.backend import Verdict, no
from loka.kernels.mixed_dots.call import MixedDotsCall
from loka.kernels.mixed_dots.torch import mix, sum_products
from loka.kernels.op import invoke
from loka.kernels.triton_device import triton_multiplies_on

MOST_VECTORS, MOST_MIXTURES, MOST_RESULTS = 128, 64, 128
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


def run(x: Tensor, weight: Tensor, mixing: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """See `loka.kernels.mixed_dots.mix_and_multiply`. Both weights have x's dtype."""
    from loka.kernels.mixed_dots import triton_ops

    x, inside = x.contiguous(), mixing if _holds(x, weight, mixing) else None
    products, mixed = invoke(triton_ops.mixed_dots, x, weight.contiguous(), _contiguous(inside))
    if mixing is None:
        return products, None
    return products, mixed if inside is not None else mix(x, mixing)


def gradient(
    dp: Tensor, dz: Tensor | None, x: Tensor, weight: Tensor, mixing: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dx [B, n, d] in x's dtype, and dW [k, n] and dV [m, n] in float32."""
    from loka.kernels.mixed_dots import triton_ops

    x, inside = x.contiguous(), mixing if _holds(x, weight, mixing) else None
    given = None if inside is None else _contiguous(dz)
    dx, dw, dv = invoke(
        triton_ops.mixed_dots_gradient, dp.contiguous(), given, x, weight.contiguous(), _contiguous(inside)
    )
    if mixing is None or dz is None:
        return dx, dw, None
    if inside is not None:
        return dx, dw, dv
    return dx + mix(dz, mixing.mT), dw, sum_products(dz, x)


def _holds(x: Tensor, weight: Tensor, mixing: Tensor | None) -> bool:
    """Check whether the mixtures that are results fit into both kernels; otherwise they are a batched product."""
    from loka.kernels.mixed_dots.triton_kernels import launch_options

    if mixing is None or mixing.shape[0] > MOST_RESULTS:
        return False
    sizes = x.shape[1], x.shape[2], weight.shape[0], mixing.shape[0]
    return all(launch_options(*sizes, gradient=gradient) is not None for gradient in (False, True))


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
