"""The reference for routing.

    logits   x W^T, summed in float32, rounded once to x's dtype, as by the model's linear layer
    s        sigmoid(logits) in float32
    chosen   the `top` largest of s + balance, NaN above every number, equal ones lowest index first
    weight   s of the chosen / their sum; balance affects the choice only

float64 stays float64. Equal scores are common: 16-bit logits of dozens of experts collide, and s saturates at 1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.kernels.backend import accept_every_call
from loka.kernels.grouped_mm.reference import permute

supports = accept_every_call


def run(x: Tensor, weight: Tensor, balance: Tensor, top: int, *, always: bool = False) -> tuple[Tensor, Tensor]:
    """See `loka.kernels.route.route`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x.to(wide), weight.to(wide)).to(x.dtype)
    scores = torch.sigmoid(logits.to(wide))
    chosen = (scores + balance).sort(dim=1, descending=True, stable=True).indices[:, :top]
    gates = scores.gather(1, chosen)
    gates = gates / gates.sum(-1, keepdim=True)
    if always:
        chosen = F.pad(chosen, (0, 1), value=weight.shape[0])
        gates = F.pad(gates, (0, 1), value=1.0)
    return chosen, gates


def run_sorted(
    x: Tensor, weight: Tensor, balance: Tensor, top: int, *, always: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return order, offsets and inverse of a `Permutation`, and the weights."""
    chosen, gates = run(x, weight, balance, top, always=always)
    return *permute(chosen, weight.shape[0] + int(always)), gates
