"""The law of norm + activation + quantise, forward and backward, in plain torch.

h    = x + residual                                    rounded to x's type: it is the residual stream
xhat = (h - mean) * rstd                               layer;  h * rstd for rms (per row) and block (per 256 columns)
p    = xhat * weight + bias
y    = activation(p);   q = quantize(y)

dp   = dy * activation'(p)
dx   = rstd * (dxhat - [mean(dxhat)] - xhat * mean(dxhat * xhat)),   dxhat = dp * weight;  the bracket for layer norm only
"""

import torch
from torch import Tensor

from loka.formats import Spec, quantize
from loka.kernels.backend import YES, Verdict
from loka.kernels.fused_linear.reference import activation_slope, apply_activation
from loka.kernels.norm_quantize.call import EPS, NORM_BLOCK, NormCall, NormResult


def supports(call: NormCall, device: torch.device) -> Verdict:
    """Everything: this is plain torch."""
    return YES


def _mean(x: Tensor, norm: str) -> Tensor:
    """Mean over what is normalised together: [M, 1], or [M, blocks]; a ragged tail over its own width."""
    width = NORM_BLOCK if norm == "block" else max(x.shape[1], 1)
    parts = [part.mean(1, keepdim=True) for part in torch.split(x, width, dim=1)]
    return torch.cat(parts, 1) if parts else x.new_zeros(x.shape[0], 1)


def _spread(value: Tensor, norm: str, columns: int) -> Tensor:
    return value.repeat_interleave(NORM_BLOCK, 1)[:, :columns] if norm == "block" else value


def _normalize(h: Tensor, norm: str, eps: float) -> tuple[Tensor, Tensor | None, Tensor]:
    mean = _mean(h, norm) if norm == "layer" else None
    centred = h if mean is None else h - mean
    rstd = torch.rsqrt(_mean(centred.square(), norm) + eps)
    return centred * _spread(rstd, norm, h.shape[1]), mean, rstd


def run(
    x: Tensor,
    spec: Spec,
    *,
    norm: str,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    eps: float | None = None,
    scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> NormResult:
    """Forward."""
    h = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    xhat, mean, rstd = _normalize(h.float(), norm, EPS[norm] if eps is None else eps)
    p = xhat if weight is None else xhat * weight.float()
    p = p if bias is None else p + bias.float()
    y = apply_activation(p, activation)
    return NormResult(quantize(y, spec, scale=scale), None if out_dtype is None else y.to(out_dtype), h, mean, rstd)


def gradient(
    dy: Tensor,
    h: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    norm: str,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    dh: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx (= dresidual), dweight, dbias. `dh` is the gradient that reaches h from the residual stream."""
    columns = h.shape[1]
    centred = h.float() if mean is None else h.float() - mean
    xhat = centred * _spread(rstd, norm, columns)
    p = xhat if weight is None else xhat * weight.float()
    p = p if bias is None else p + bias.float()
    dp = dy.float() * activation_slope(p, activation)
    dxhat = dp if weight is None else dp * weight.float()
    dx = dxhat - xhat * _spread(_mean(dxhat * xhat, norm), norm, columns)
    if norm == "layer":
        dx = dx - _mean(dxhat, norm)
    dx = dx * _spread(rstd, norm, columns)
    dx = dx if dh is None else dx + dh.float()
    dweight = None if weight is None else (dp * xhat).sum(0).to(weight.dtype)
    return dx.to(h.dtype), dweight, None if bias is None else dp.sum(0).to(bias.dtype)
