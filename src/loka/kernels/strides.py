"""What every kernel asks of its operands: rows, or columns, that lie in memory without gaps between their numbers."""

import torch
from torch import Tensor


def unit_rows(x: Tensor) -> Tensor:
    """x with a last stride of one; copied only where it has another."""
    return x if x.stride(-1) == 1 else x.contiguous()


def token_columns(v: Tensor) -> Tensor:
    """Values [R, S, G, D] with unit stride along S, each column at a multiple of 16 elements; as they are where they lie so."""
    if v.stride(1) == 1 and v.stride(3) % 16 == 0:
        return v
    requests, s, groups, d = v.shape
    made = torch.zeros(requests, groups, d, (s + 15) // 16 * 16, dtype=v.dtype, device=v.device)
    made[..., :s] = v.permute(0, 2, 3, 1)
    return made[..., :s].permute(0, 3, 1, 2)
