"""Our kernel: one program an example, its vectors in registers, all products by the tensor cores, the chosen ones written."""

import torch
from torch import Tensor

from loka.kernels.backend import Verdict, no
from loka.kernels.dots.call import DotsCall
from loka.kernels.op import invoke
from loka.kernels.triton_device import triton_multiplies_on

MOST_VECTORS = 64  # n x n sums in the registers of four warps
MOST_WIDTH = 512


def supports(call: DotsCall, device: torch.device) -> Verdict:
    """Up to 64 vectors of up to 512 numbers, 16 or 32 bits."""
    if call.n > MOST_VECTORS or call.d > MOST_WIDTH:
        return no(f"holds up to {MOST_VECTORS} vectors of {MOST_WIDTH} numbers, not {call.n} of {call.d}")
    if call.dtype == torch.float64:
        return no("multiplies 16 and 32 bits, not float64")
    return triton_multiplies_on(device, bf16=call.dtype == torch.bfloat16)


READS_HEADS = True  # vectors in front of x's are read where they lie


def run(x: Tensor, first: Tensor, second: Tensor, head: Tensor | None = None) -> Tensor:
    """[B, P]."""
    from loka.kernels.dots import triton_ops

    place = _places(first, second, x.shape[1] + (0 if head is None else head.shape[1]))
    result: Tensor = invoke(triton_ops.dots, x, head, place, first.shape[0])
    return result


def gradient(dy: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """dx [B, n, d]."""
    from loka.kernels.dots import triton_ops

    result: Tensor = invoke(triton_ops.dots_gradient, dy, x, _places(first, second, x.shape[1]))
    return result


def _places(first: Tensor, second: Tensor, n: int) -> Tensor:
    """The kernel reads one index after the other; two columns of a list of pairs do not lie so."""
    from loka.kernels.dots import triton_ops

    place: Tensor = invoke(triton_ops.places, first.contiguous(), second.contiguous(), n)
    return place
