"""torch's batched matrix products, unfused."""

import torch
from torch import Tensor

from loka.kernels.backend import YES, Verdict
from loka.kernels.mixed_dots.call import MixedDotsCall


def supports(call: MixedDotsCall, device: torch.device) -> Verdict:
    """Accept every call."""
    return YES


def run(x: Tensor, weight: Tensor) -> Tensor:
    """See `loka.kernels.mixed_dots.mixed_dots`. The weight has x's dtype."""
    return torch.bmm(x, torch.bmm(_expand(weight, x), x).mT)


def gradient(dp: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return dx [B, n, d] in x's dtype and dW [k, n] in float32 (float64 for float64)."""
    expanded = _expand(weight, x)
    dy = torch.bmm(dp.mT, x)
    dx = torch.bmm(dp, torch.bmm(expanded, x)) + torch.bmm(expanded.mT, dy)
    dw = torch.bmm(dy, x.mT).sum(0, dtype=torch.promote_types(x.dtype, torch.float32))  # fp16 sums could overflow
    return dx, dw


def _expand(weight: Tensor, x: Tensor) -> Tensor:
    return weight.expand(x.shape[0], -1, -1)
