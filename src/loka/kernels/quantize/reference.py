"""The reference: `loka.formats.quantize`, once per output."""

import torch
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.formats import quantize as reference_quantize
from loka.kernels.backend import accept_every_call

any_alignment = True  # x need not be aligned

supports = accept_every_call


def run(
    x: Tensor,
    spec: Spec | None,
    *,
    scale: Tensor | None = None,
    transpose: Spec | None = None,
    transpose_scale: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[QTensor | None, QTensor | None]:
    """Quantize x, its transpose, or both."""
    q = None if spec is None else reference_quantize(x, spec, scale=scale, generator=generator)
    if transpose is None:
        return q, None
    return q, reference_quantize(x.T.contiguous(), transpose, scale=transpose_scale, generator=generator)


def transpose(data: Tensor) -> Tensor:
    """Return one-byte data [M, K] as [K, M], contiguous."""
    return data.view(torch.uint8).T.contiguous().view(data.dtype)
