"""The reference: dequantize, multiply in float32, round once to the output dtype.

Takes any format, block, device and strides, so weights need no preparation.
"""

import torch
from torch import Tensor

from loka.formats import QTensor
from loka.kernels.backend import accept_every_call

supports = accept_every_call


def run(a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """Multiply with float32 accumulation. `fast_accum` is ignored: it only permits less precision."""
    with torch.autocast(a.device.type, enabled=False):
        product = a.dequantize() @ b.dequantize().T
        # torch 2.11 loses the gradient of a compiled autograd.Function whose result is a no-op `.to`
        return product if product.dtype == out_dtype else product.to(out_dtype)
