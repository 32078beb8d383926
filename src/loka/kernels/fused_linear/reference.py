"""The fused layer in plain torch, forward and backward: defines the correct result.

    p    = a @ b^T + bias                                  float32
    rstd = 1 / sqrt(mean(p^2 over the block) + 1e-6)       blocks of 256 columns; a ragged tail over its own width
    z    = p * rstd                                        (z = p without a norm)
    y    = activation(z) * kept / (1 - rate)               `loka.kernels.dropout`; no factor without dropout

    dz   = dy * kept / (1 - rate) * activation'(z)         (dy = g' @ w' of the next layer inside a chain: `dgrad`)
    g    = rstd * (dz - z * mean(dz * z over the block))   (g = dz without a norm)

Backward sees z in the form in which it was kept (`call.kept_form`).
"""

import torch
from torch import Tensor

from loka.formats import QTensor, Spec, block_amax, quantize
from loka.formats.spec import TENSOR
from loka.kernels.activation import activate, activation_slope
from loka.kernels.backend import accept_every_call
from loka.kernels.dropout import Dropout, dropped, factor_of
from loka.kernels.fused_linear.call import (
    NORMALIZED,
    DgradCall,
    DgradResult,
    FusedCall,
    FusedResult,
    GradientCall,
    GradientResult,
    Kept,
    check_amax,
    derived_from_output,
    kept_form,
    norm_eps,
    normalized_scale,
)
from loka.kernels.fused_linear.launch import Launch

supports = accept_every_call


def _block_mean(x: Tensor, block: int) -> Tensor:
    """Return the mean over each block of columns, repeated to x's width; the tail over its own width."""
    parts = torch.split(x, block, dim=1)
    return torch.cat([part.mean(1, keepdim=True).expand(-1, part.shape[1]) for part in parts], 1)


def run(
    a: QTensor,
    b: QTensor,
    call: FusedCall,
    *,
    out_scale: Tensor | None = None,
    bias: Tensor | None = None,
    amax: Tensor | None = None,
    dropout: Dropout | None = None,
    launch: Launch | None = None,
) -> FusedResult:
    """See `loka.kernels.fused_linear`. `launch` is ignored."""
    check_amax(amax, a.device)
    p = a.dequantize() @ b.dequantize().T
    if bias is not None:
        p = p + bias.float()
    z, rstd, out = p, None, call.out
    if call.norm_block:
        mean_square = _block_mean(p.square(), call.norm_block)
        spread = torch.rsqrt(mean_square + norm_eps())
        z, rstd = p * spread, spread[:, :: call.norm_block].contiguous()
    if amax is not None:
        amax.copy_(torch.maximum(amax, block_amax(z, TENSOR).reshape(amax.shape)))
    y = dropped(activate(z, call.activation, call.slope), dropout)
    factor = 1.0 if dropout is None else factor_of(dropout.p)
    form = kept_form(call.norm_block, call.activation, out) if call.keep else "nothing"
    rstd = rstd if call.keep else None
    if dropout is not None and out_scale is None:
        y = y * factor
    if not isinstance(out, Spec):
        # torch 2.11 loses the gradient of a compiled autograd.Function whose result is a no-op `.to`
        made = y if y.dtype == out else y.to(out)
        return FusedResult(made, z=_keep(form, z, None, None), rstd=rstd)
    q = quantize(y, out, scale=out_scale)
    q_t = quantize(y.T.contiguous(), out, scale=out_scale) if call.transpose else None
    kept = _keep(form, z, q, out_scale)
    if dropout is not None and out_scale is not None:
        q, q_t = rescaled(q, factor), None if q_t is None else rescaled(q_t, factor)
    return FusedResult(q, q_t, kept, rstd)


def rescaled(q: QTensor, factor: float) -> QTensor:
    """Return q multiplied by a factor: the same codes, a larger scale."""
    return QTensor(q.data, q.scale * factor, q.spec)


def _keep(form: Kept, z: Tensor, y: QTensor | None, scale: Tensor | None) -> QTensor | Tensor | None:
    """Return z in the form that backward needs."""
    if form == "normalized":
        return quantize(z, NORMALIZED, scale=torch.tensor(normalized_scale(), device=z.device))
    if form == "scaled":
        assert y is not None
        return quantize(z, y.spec, scale=scale)
    if form == "bf16":
        return z.to(torch.bfloat16)
    return y if form == "y" else None


def gradient(
    dy: Tensor,
    z: QTensor | Tensor | None,
    rstd: Tensor | None,
    call: GradientCall,
    *,
    scale: Tensor | None = None,
    dropout: Dropout | None = None,
) -> GradientResult:
    """See `loka.kernels.fused_linear.fused_linear_gradient`."""
    g = _dropout_gradient(dy.float(), dropout) * _slope_of(z, call.norm_block, call.activation, call.slope)
    if call.norm_block:
        assert isinstance(z, QTensor)
        assert rstd is not None
        normalized = z.dequantize()
        spread = rstd.repeat_interleave(call.norm_block, 1)[:, : g.shape[1]]
        g = spread * (g - normalized * _block_mean(g * normalized, call.norm_block))
    return GradientResult(
        quantize(g, call.spec, scale=scale),
        quantize(g.T.contiguous(), call.spec_t, scale=scale),
        block_amax(g, TENSOR),
        g.sum(0) if call.bias else None,
    )


def dgrad(
    g: QTensor,
    w_t: QTensor,
    z: QTensor | Tensor | None,
    call: DgradCall,
    *,
    scale: Tensor,
    amax: Tensor | None = None,
    dropout: Dropout | None = None,
    launch: Launch | None = None,
) -> DgradResult:
    """See `loka.kernels.fused_linear.fused_linear_dgrad`. `launch` is ignored."""
    check_amax(amax, g.device)
    dy = g.dequantize() @ w_t.dequantize().T
    previous = _dropout_gradient(dy, dropout) * _slope_of(z, 0, call.activation, call.slope)
    if amax is not None:
        amax.copy_(torch.maximum(amax, block_amax(previous, TENSOR).reshape(amax.shape)))
    return DgradResult(
        quantize(previous, call.spec, scale=scale),
        quantize(previous.T.contiguous(), call.spec, scale=scale),
        previous.sum(0) if call.bias else None,
    )


def _dropout_gradient(dy: Tensor, dropout: Dropout | None) -> Tensor:
    """Return the gradient of dropout's input."""
    return dy if dropout is None else dropped(dy, dropout) * factor_of(dropout.p)


def _slope_of(z: QTensor | Tensor | None, norm_block: int, activation: str, slope: float) -> Tensor | float:
    """Return the activation's derivative from what forward kept."""
    if z is None:
        return 1.0
    held = z.dequantize() if isinstance(z, QTensor) else z.float()
    return activation_slope(held, activation, slope, from_output=derived_from_output(norm_block, activation, z))
