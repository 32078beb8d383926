"""Triton dots: one program per example computes all products on tensor cores and writes the chosen ones."""

import torch
from torch import Tensor

from loka.kernels.backend import Verdict, no
from loka.kernels.dots.call import DotsCall
from loka.kernels.op import invoke
from loka.kernels.triton_device import triton_multiplies_on

MOST_VECTORS = 64  # n x n accumulators must fit into the registers of four warps
MOST_WIDTH = 512


def supports(call: DotsCall, device: torch.device) -> Verdict:
    """Accept up to 64 vectors up to 512 wide, in bf16, fp16 or float32."""
    if call.n > MOST_VECTORS or call.d > MOST_WIDTH:
        return no(f"holds up to {MOST_VECTORS} vectors of {MOST_WIDTH} elements, not {call.n} of {call.d}")
    if call.dtype == torch.float64:
        return no("multiplies bf16, fp16 and float32, not float64")
    return triton_multiplies_on(device, bf16=call.dtype == torch.bfloat16)


READS_HEADS = True  # `run` takes `head`, so that it need not be concatenated with x


def run(x: Tensor, first: Tensor, second: Tensor, head: Tensor | None = None) -> Tensor:
    """See `loka.kernels.dots.dots`."""
    from loka.kernels.dots import triton_ops

    place = _places(first, second, x.shape[1] + (0 if head is None else head.shape[1]))
    result: Tensor = invoke(triton_ops.dots, x, head, place, first.shape[0])
    return result


def gradient(dy: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return dx [B, n, d]."""
    from loka.kernels.dots import triton_ops

    result: Tensor = invoke(triton_ops.dots_gradient, dy, x, _places(first, second, x.shape[1]))
    return result


def _places(first: Tensor, second: Tensor, n: int) -> Tensor:
    """Return the table of places. The indices may be strided, such as two columns of a list of pairs."""
    from loka.kernels.dots import triton_ops

    place: Tensor = invoke(triton_ops.places, first.contiguous(), second.contiguous(), n)
    return place
