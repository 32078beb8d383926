"""The law: loka.formats.quantize, once per output."""

import torch
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.formats import quantize as quantize_by_law
from loka.kernels.backend import YES, Verdict
from loka.kernels.quantize.call import QuantizeCall

any_alignment = True  # x is read as it lies


def supports(call: QuantizeCall, device: torch.device) -> Verdict:
    """Everything: this is plain torch."""
    return YES


def run(
    x: Tensor,
    spec: Spec | None,
    *,
    scale: Tensor | None = None,
    transpose: Spec | None = None,
    transpose_scale: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[QTensor | None, QTensor | None]:
    """Quantise x, its transpose, or both."""
    q = None if spec is None else quantize_by_law(x, spec, scale=scale, generator=generator)
    if transpose is None:
        return q, None
    return q, quantize_by_law(x.T.contiguous(), transpose, scale=transpose_scale, generator=generator)


def transpose(data: Tensor) -> Tensor:
    """Bytes moved, not converted."""
    return data.view(torch.uint8).T.contiguous().view(data.dtype)
