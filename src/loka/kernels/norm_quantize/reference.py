"""Norm + activation + quantize in plain torch, forward and backward: defines the correct result.

h    = x + residual                rounded to x's dtype, since it is the residual stream; an FP8 x is dequantized
xhat = (h - mean) * rstd           layer;  h * rstd for rms (per row) and block (per 256 columns)
p    = xhat * weight + bias
y    = activation(p);   q = quantize(y);   amax = max(amax, largest finite |y|);   dots = y head^T

dp   = dy * activation'(p)
dx   = rstd * (dxhat - [mean(dxhat)] - xhat * mean(dxhat * xhat)),   dxhat = dp * weight;  [] for layer norm only

With dropout (`loka.kernels.dropout`) y and dy are multiplied by kept / (1 - rate), y after its amax is taken. Backward
reads x as it was kept: an FP8 x is the rounded one, while mean and rstd are those of forward.
"""

from typing import Any

import torch
from torch import Tensor

from loka.formats import TENSOR, QTensor, block_amax, quantize
from loka.kernels.activation import activate, activation_slope
from loka.kernels.backend import accept_every_call
from loka.kernels.dropout import Dropout, dropped, factor_of
from loka.kernels.fused_linear.call import NORM_BLOCK
from loka.kernels.norm_quantize.call import EPS, NormCall, NormGradient, NormGradientCall, NormResult

supports = accept_every_call


def _mean(x: Tensor, norm: str) -> Tensor:
    """Return the mean over each norm group, [M, 1] or [M, blocks]; a ragged tail over its own width."""
    width = NORM_BLOCK if norm == "block" else max(x.shape[1], 1)
    parts = [part.mean(1, keepdim=True) for part in torch.split(x, width, dim=1)]
    return torch.cat(parts, 1) if parts else x.new_zeros(x.shape[0], 1)


def _spread(value: Tensor, norm: str, columns: int) -> Tensor:
    return value.repeat_interleave(NORM_BLOCK, 1)[:, :columns] if norm == "block" else value


def _wide(x: Tensor | QTensor) -> Tensor:
    return x.dequantize() if isinstance(x, QTensor) else x.float()


def _normalize(h: Tensor, norm: str, eps: float) -> tuple[Tensor, Tensor | None, Tensor]:
    mean = _mean(h, norm) if norm == "layer" else None
    centred = h if mean is None else h - mean
    rstd = torch.rsqrt(_mean(centred.square(), norm) + eps)
    return centred * _spread(rstd, norm, h.shape[1]), mean, rstd


def _affine(xhat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    p = xhat if weight is None else xhat * weight.float()
    return p if bias is None else p + bias.float()


def _raise_amax(amax: Tensor | None, values: Tensor) -> None:
    if amax is not None:
        amax.copy_(torch.maximum(amax, block_amax(values, TENSOR).to(amax.device)))


def run(
    x: Tensor | QTensor,
    call: NormCall,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    dropout: Dropout | None = None,
    head: Tensor | None = None,
) -> NormResult:
    """See `loka.kernels.norm_quantize`."""
    spec, norm = call.spec, call.norm
    h: Any = x if residual is None else (_wide(x) + residual.float()).to(x.dtype)  # type: ignore[union-attr]
    xhat, mean, rstd = _normalize(_wide(h), norm, EPS[norm] if eps is None else eps)
    y = activate(_affine(xhat, weight, bias), call.activation)
    _raise_amax(amax, y)
    factor = 1.0 if dropout is None else factor_of(dropout.p)
    y = dropped(y, dropout)
    wide = y if dropout is None else y * factor
    quantized = y if scale is not None else wide
    q = None if spec is None else quantize(quantized, spec, scale=scale)
    q_t = quantize(quantized.T.contiguous(), spec, scale=scale) if call.transpose and spec is not None else None
    if dropout is not None and scale is not None:
        q, q_t = (None if made is None else QTensor(made.data, made.scale * factor, made.spec) for made in (q, q_t))
    dots = None if head is None else wide @ head.float().T
    return NormResult(q, None if call.out_dtype is None else wide.to(call.out_dtype), h, mean, rstd, q_t, dots)


def gradient(
    dy: Tensor,
    h: Tensor | QTensor,
    mean: Tensor | None,
    rstd: Tensor,
    call: NormGradientCall,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    dh: Tensor | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    dropout: Dropout | None = None,
) -> NormGradient:
    """See `loka.kernels.norm_quantize.norm_gradient`."""
    norm, spec, columns = call.norm, call.spec, dy.shape[1]
    wide = _wide(h)
    centred = wide if mean is None else wide - mean
    xhat = centred * _spread(rstd, norm, columns)
    arriving = dy.float() if dropout is None else dropped(dy.float(), dropout) * factor_of(dropout.p)
    dp = arriving * activation_slope(_affine(xhat, weight, bias), call.activation)
    dxhat = dp if weight is None else dp * weight.float()
    dx = dxhat - xhat * _spread(_mean(dxhat * xhat, norm), norm, columns)
    if norm == "layer":
        dx = dx - _mean(dxhat, norm)
    dx = dx * _spread(rstd, norm, columns)
    dx = dx if dh is None else dx + dh.float()
    _raise_amax(amax, dx)
    dweight = None if weight is None else (dp * xhat).sum(0).to(weight.dtype)
    dbias = None if bias is None else dp.sum(0).to(bias.dtype)
    if spec is None:
        return NormGradient(dx.to(dy.dtype if isinstance(h, QTensor) else h.dtype), None, dweight, dbias)
    dx_t = quantize(dx.T.contiguous(), spec, scale=scale)
    return NormGradient(quantize(dx, spec, scale=scale), dx_t, dweight, dbias)
