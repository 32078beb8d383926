"""Norms over the last dimension: LayerNorm, RMSNorm, BlockNorm, and a function that creates them by name.

    LayerNorm(x) = (x - mean(x)) / sqrt(var(x) + eps) * gain + bias
    RMSNorm(x)   = x / sqrt(mean(x^2) + eps) * gain
    BlockNorm(x) = RMSNorm without gain, over fixed blocks of 256 consecutive features

BlockNorm exists for the epilogue of a GEMM: a block of 256 columns fits in one output tile, so it can be normalized
while it is still in registers; a whole row spans several tiles. It subtracts no mean and has no gain, so every output
of a full block is bounded by sqrt(256) = 16, and a static FP8 scale is safe.

All three compute in float32 and return the dtype of their input, also under autocast, where torch's own layer norm
would return float32 and double the memory traffic of everything that follows.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.kernels.fused_linear.call import NORM_BLOCK, NORM_EPS

BLOCK, EPS = NORM_BLOCK, NORM_EPS  # fixed by the definition of the models; the kernels support no others

NormKind = Literal["layer", "rms", "block", "none"]


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that keeps the dtype of its input under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of x."""
        return super().forward(x).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` that computes in float32, gain included, and keeps the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of x."""
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(y, self.normalized_shape, self.weight.to(y.dtype), self.eps).to(x.dtype)


class BlockNorm(nn.Module):
    """Parameter-free RMSNorm over blocks of 256 features; a smaller width, or a remainder, is a block of its own.

    Args:
        width: features.
        block: features per block.
        eps: added to the mean square.

    Example:
        >>> BlockNorm(512)(torch.randn(4, 512)).square().mean().round()
        tensor(1.)
    """

    def __init__(self, width: int, *, block: int = BLOCK, eps: float = EPS) -> None:
        super().__init__()
        if width < 1 or block < 1:
            raise ValueError(f"BlockNorm needs a positive width and block, got width={width} and block={block}")
        self.width, self.block, self.eps = width, min(block, width), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the blocks of the last dimension of x."""
        if x.shape[-1] != self.width:
            raise ValueError(
                f"BlockNorm({self.width}) got {x.shape[-1]} features in a tensor of shape {tuple(x.shape)}"
            )
        whole = self.width - self.width % self.block
        if whole == self.block == self.width:
            return rms_normalize(x, self.eps)
        blocks = x[..., :whole].reshape(*x.shape[:-1], whole // self.block, self.block)
        head = rms_normalize(blocks, self.eps).flatten(-2)
        if whole == self.width:
            return head
        return torch.cat([head, rms_normalize(x[..., whole:], self.eps)], -1)

    def extra_repr(self) -> str:
        """Width, block and eps."""
        return f"{self.width}, block={self.block}, eps={self.eps}"


def rms_normalize(x: Tensor, eps: float = EPS) -> Tensor:
    """Return x / rms(x) over the last dimension, computed in float32 (or float64), in the dtype of x."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def make_norm(kind: NormKind, width: int, *, bias: bool = True) -> nn.Module:
    """Return a new norm.

    Args:
        kind: "none", "layer", "rms" or "block".
        width: features.
        bias: of LayerNorm; the others have none.

    Returns:
        The module.

    Example:
        >>> make_norm("block", 256)
    """
    if kind == "layer":
        return LayerNorm(width, bias=bias)
    if kind == "rms":
        return RMSNorm(width, eps=EPS)
    if kind == "block":
        return BlockNorm(width)
    if kind == "none":
        return nn.Identity()
    raise ValueError(f"unknown norm {kind!r}; expected one of {', '.join(get_args(NormKind))}")
