"""torch's batched matrix products, unfused."""

import torch
from torch import Tensor

from loka.kernels.backend import accept_every_call

supports = accept_every_call


def run(x: Tensor, weight: Tensor, mixing: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """See `loka.kernels.mixed_dots.mix_and_multiply`. Both weights have x's dtype."""
    products = torch.bmm(x, torch.bmm(_expand(weight, x), x).mT)
    return products, None if mixing is None else mix(x, mixing)


def gradient(
    dp: Tensor, dz: Tensor | None, x: Tensor, weight: Tensor, mixing: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dx [B, n, d] in x's dtype, and dW [k, n] and dV [m, n] in float32 (float64 for float64)."""
    expanded = _expand(weight, x)
    dy = torch.bmm(dp.mT, x)
    dx = torch.bmm(dp, torch.bmm(expanded, x)) + torch.bmm(expanded.mT, dy)
    dw = sum_products(dy, x)
    if mixing is None or dz is None:
        return dx, dw, None
    return dx + mix(dz, mixing.mT), dw, sum_products(dz, x)


def mix(x: Tensor, mixing: Tensor) -> Tensor:
    """Return V x [B, m, d] of x [B, n, d] and mixing [m, n]."""
    return torch.bmm(_expand(mixing, x), x)


def sum_products(a: Tensor, x: Tensor) -> Tensor:
    """Return the sum over examples of A X^T; in fp16 it could overflow."""
    return torch.bmm(a, x.mT).sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


def _expand(weight: Tensor, x: Tensor) -> Tensor:
    return weight.expand(x.shape[0], -1, -1)
