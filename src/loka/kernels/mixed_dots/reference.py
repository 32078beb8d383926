"""The reference for products with mixtures, in plain torch.

Y = W X,       P = X Y^T,                      Z = V X      Y is rounded to x's dtype, as by two separate products
dY = dP^T X,   dX = dP Y + W^T dY + V^T dZ,   dW and dV: sums over examples of dY X^T and dZ X^T
"""

import torch
from torch import Tensor

from loka.kernels.backend import accept_every_call

supports = accept_every_call


def run(x: Tensor, weight: Tensor, mixing: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """See `loka.kernels.mixed_dots.mix_and_multiply`. Both weights have x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mixtures = (weight.to(wide.dtype) @ wide).to(x.dtype).to(wide.dtype)
    return (wide @ mixtures.mT).to(x.dtype), None if mixing is None else (mixing.to(wide.dtype) @ wide).to(x.dtype)


def gradient(
    dp: Tensor, dz: Tensor | None, x: Tensor, weight: Tensor, mixing: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dx [B, n, d] in x's dtype, and dW [k, n] and dV [m, n] in float32 (float64 for float64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    w, g = weight.to(wide.dtype), dp.to(wide.dtype)
    mixtures = (w @ wide).to(x.dtype).to(wide.dtype)
    dy = (g.mT @ wide).to(x.dtype).to(wide.dtype)
    dx, dv = g @ mixtures + w.T @ dy, None
    if mixing is not None and dz is not None:
        dx, dv = dx + mixing.to(wide.dtype).T @ dz.to(wide.dtype), (dz.to(wide.dtype) @ wide.mT).sum(0)
    return dx.to(x.dtype), (dy @ wide.mT).sum(0), dv
