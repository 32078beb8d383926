"""The law of the fused layer, in plain torch, forward and backward.

    p    = a @ b^T + bias                                  float32
    rstd = 1 / sqrt(mean(p^2 over the block) + 1e-6)       blocks of 256 columns; a ragged tail over its own width
    z    = p * rstd                                        (z = p without a norm)
    y    = activation(z)

    dz   = dy * activation'(z)
    g    = rstd * (dz - z * mean(dz * z over the block))   (g = dz without a norm)

Backward sees z as it was kept: rounded to E4M3 with the static scale where there is a norm (values are bounded by 16), to bf16 where there is none.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import QTensor, Spec, block_amax, quantize
from loka.formats.spec import TENSOR
from loka.kernels.backend import YES, Verdict
from loka.kernels.fused_linear.call import (
    NORM_EPS,
    NORMALIZED,
    NORMALIZED_SCALE,
    FusedCall,
    FusedResult,
    GradientCall,
    GradientResult,
)


def supports(call: FusedCall | GradientCall, device: torch.device) -> Verdict:
    """Everything: this is emulation."""
    return YES


def _block_mean(x: Tensor, block: int) -> Tensor:
    """Mean over each block of columns, repeated to x's width; the tail over its own width."""
    parts = torch.split(x, block, dim=1)
    return torch.cat([part.mean(1, keepdim=True).expand(-1, part.shape[1]) for part in parts], 1)


def apply_activation(z: Tensor, activation: str) -> Tensor:
    """The activations of the fused layer."""
    table: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "silu": F.silu, "hard_swish": F.hardswish}
    return z.clone() if activation == "none" else table[activation](z)


def activation_slope(z: Tensor, activation: str) -> Tensor:
    """Derivative in closed form (torch.compile cannot trace a call of autograd), with torch's convention at the kinks."""
    if activation == "relu":
        return (z > 0).to(z.dtype)
    if activation == "silu":
        s = torch.sigmoid(z)
        return s * (1 + z * (1 - s))
    if activation == "hard_swish":
        return torch.where(z <= -3, 0.0, torch.where(z < 3, z / 3 + 0.5, 1.0)).to(z.dtype)
    return torch.ones_like(z)


def run(
    a: QTensor,
    b: QTensor,
    *,
    out: Spec | torch.dtype,
    out_scale: Tensor | None = None,
    bias: Tensor | None = None,
    norm_block: int,
    activation: str,
    keep: bool = False,
    transpose: bool = False,
) -> FusedResult:
    """Forward. A static or delayed `out` takes its scale in `out_scale`."""
    p = a.dequantize() @ b.dequantize().T
    if bias is not None:
        p = p + bias.float()
    z, rstd = p, None
    if norm_block:
        mean_square = _block_mean(p.square(), norm_block)
        spread = torch.rsqrt(mean_square + NORM_EPS)
        z, rstd = p * spread, spread[:, ::norm_block].contiguous()
    y = apply_activation(z, activation)
    kept = None
    if keep:
        scale = torch.tensor(NORMALIZED_SCALE, device=z.device)
        kept = quantize(z, NORMALIZED, scale=scale) if norm_block else z.to(torch.bfloat16)
    if not isinstance(out, Spec):
        made = (
            y if y.dtype == out else y.to(out)
        )  # a cast that does nothing costs a compiled node its gradients in torch 2.11
        return FusedResult(made, z=kept, rstd=rstd if keep else None)
    y_t = quantize(y.T.contiguous(), out, scale=out_scale) if transpose else None
    return FusedResult(quantize(y, out, scale=out_scale), y_t, kept, rstd if keep else None)


def gradient(
    dy: Tensor,
    z: QTensor | Tensor,
    rstd: Tensor | None,
    *,
    spec: Spec,
    spec_t: Spec,
    scale: Tensor | None = None,
    norm_block: int,
    activation: str,
    bias: bool = False,
) -> GradientResult:
    """Backward up to the GEMMs: the gradient of p, quantised both ways; its amax for the next delayed scale."""
    normalized = z.dequantize() if isinstance(z, QTensor) else z.float()
    g = dy.float() * activation_slope(normalized, activation)
    if norm_block:
        assert rstd is not None
        spread = rstd.repeat_interleave(norm_block, 1)[:, : g.shape[1]]
        g = spread * (g - normalized * _block_mean(g * normalized, norm_block))
    return GradientResult(
        quantize(g, spec, scale=scale),
        quantize(g.T.contiguous(), spec_t, scale=scale),
        block_amax(g, TENSOR),
        g.sum(0) if bias else None,
    )
