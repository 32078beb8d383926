"""The law: dequantise, multiply in float32, round once to the output type. Any format, any block, any device, any strides: weights need no preparing."""

import torch
from torch import Tensor

from loka.formats import QTensor
from loka.kernels.backend import YES, Verdict
from loka.kernels.scaled_mm.call import MatmulCall


def supports(call: MatmulCall, device: torch.device) -> Verdict:
    """Everything: this is emulation."""
    return YES


def run(a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """Full float32 accumulation whatever `fast_accum` allows: fast accumulation is a permission, not a demand."""
    with torch.autocast(a.device.type, enabled=False):
        product = a.dequantize() @ b.dequantize().T
        # torch 2.11 loses the gradient of a compiled autograd.Function whose result is a `.to` that changes nothing
        return product if product.dtype == out_dtype else product.to(out_dtype)
