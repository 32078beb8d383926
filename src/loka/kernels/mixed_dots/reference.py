"""The reference for products with mixtures, in plain torch.

Y = W X,       P = X Y^T            Y is rounded to x's dtype, as by two separate products
dY = dP^T X,   dX = dP Y + W^T dY,   dW = sum over examples of dY X^T
"""

import torch
from torch import Tensor

from loka.kernels.backend import YES, Verdict
from loka.kernels.mixed_dots.call import MixedDotsCall


def supports(call: MixedDotsCall, device: torch.device) -> Verdict:
    """Accept every call."""
    return YES


def run(x: Tensor, weight: Tensor) -> Tensor:
    """See `loka.kernels.mixed_dots.mixed_dots`. The weight has x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mixtures = (weight.to(wide.dtype) @ wide).to(x.dtype).to(wide.dtype)
    return (wide @ mixtures.mT).to(x.dtype)


def gradient(dp: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return dx [B, n, d] in x's dtype and dW [k, n] in float32 (float64 for float64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    w, g = weight.to(wide.dtype), dp.to(wide.dtype)
    mixtures = (w @ wide).to(x.dtype).to(wide.dtype)
    dy = (g.mT @ wide).to(x.dtype).to(wide.dtype)
    return (g @ mixtures + w.T @ dy).to(x.dtype), (dy @ wide.mT).sum(0)
