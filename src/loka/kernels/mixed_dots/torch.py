"""torch's batched products, one after the other."""

import torch
from torch import Tensor

from loka.kernels.backend import YES, Verdict
from loka.kernels.mixed_dots.call import MixedDotsCall


def supports(call: MixedDotsCall, device: torch.device) -> Verdict:
    """Everything torch runs on."""
    return YES


def run(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, n, d], weight [k, n] in its type -> [B, n, k]."""
    return torch.bmm(x, torch.bmm(_every(weight, x), x).mT)


def gradient(dp: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """dx [B, n, d] in x's type, dW [k, n] in float32 (float64 for float64)."""
    every = _every(weight, x)
    dy = torch.bmm(dp.mT, x)
    dx = torch.bmm(dp, torch.bmm(every, x)) + torch.bmm(every.mT, dy)
    dw = torch.bmm(dy, x.mT).sum(0, dtype=torch.promote_types(x.dtype, torch.float32))  # a long sum overflows 16 bits
    return dx, dw


def _every(weight: Tensor, x: Tensor) -> Tensor:
    return weight.expand(x.shape[0], -1, -1)
