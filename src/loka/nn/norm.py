"""Normalisations over the last dimension: LayerNorm, RMSNorm, BlockNorm, and the one place that chooses between them.

    LayerNorm(x) = (x - mean(x)) / sqrt(var(x) + eps) * gain + bias
    RMSNorm(x)   = x / sqrt(mean(x^2) + eps) * gain
    BlockNorm(x) = RMSNorm without gain, over fixed blocks of 256 consecutive features

BlockNorm exists for the epilogue of a GEMM: a block of 256 columns fits into one output tile, so it can be normalised there while it is
still in registers; a whole row spans several tiles and cannot. No mean is subtracted (nothing to cancel) and no gain is learned, so every
output of a full block is bounded by sqrt(256) = 16: a static FP8 scale is safe.

All three compute in float32 and return the dtype they were given, under autocast too, where torch's own layer norm would hand float32 to
everything downstream and double its memory traffic.

Not here: norms over the batch, and norms that cross the last dimension. A norm over d of a (B, n, d) tensor never mixes two of its n vectors.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.kernels.fused_linear.call import NORM_BLOCK, NORM_EPS

BLOCK, EPS = NORM_BLOCK, NORM_EPS  # part of the definition of models: the kernels have no other

NormKind = Literal["layer", "rms", "block", "none"]


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that keeps the dtype of its input under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x."""
        return super().forward(x).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` that computes in float32, gain included, and keeps the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x."""
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(y, self.normalized_shape, self.weight.to(y.dtype), self.eps).to(x.dtype)


class BlockNorm(nn.Module):
    """Parameter-free RMSNorm over blocks of 256 features. A width under 256 is one block; where 256 does not divide the width, the ragged tail is a block of its own width.

    Args:
        width: features.
        block: features of a block.
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
        """Normalise the blocks of the last dimension of x."""
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
    """x / rms(x) over the last dimension, in float32 (float64 stays), returned in the dtype of x."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def make_norm(kind: NormKind, width: int, *, bias: bool = True) -> nn.Module:
    """A normalisation by name.

    Args:
        kind: none, layer, rms or block.
        width: features.
        bias: LayerNorm's shift; the others have none.

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
