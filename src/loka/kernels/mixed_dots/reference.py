"""The law of products with mixtures, in plain torch.

Y = W X,  P = X Y^T            Y is rounded to the type of x, as two products one after the other would

dY = dP^T X,   dX = dP Y + W^T dY,   dW = sum over examples of dY X^T
"""

import torch
from torch import Tensor

from loka.kernels.backend import YES, Verdict
from loka.kernels.mixed_dots.call import MixedDotsCall


def supports(call: MixedDotsCall, device: torch.device) -> Verdict:
    """Everything."""
    return YES


def run(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, n, d], weight [k, n] in its type -> [B, n, k]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mixtures = (weight.to(wide.dtype) @ wide).to(x.dtype).to(wide.dtype)
    return (wide @ mixtures.mT).to(x.dtype)


def gradient(dp: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """dx [B, n, d] in x's type, dW [k, n] in float32 (float64 for float64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    w, g = weight.to(wide.dtype), dp.to(wide.dtype)
    mixtures = (w @ wide).to(x.dtype).to(wide.dtype)
    dy = (g.mT @ wide).to(x.dtype).to(wide.dtype)
    return (g @ mixtures + w.T @ dy).to(x.dtype), (dy @ wide.mT).sum(0)
