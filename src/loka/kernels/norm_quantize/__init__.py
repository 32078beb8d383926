"""norm_quantize: (residual +) LayerNorm, RMSNorm or BlockNorm (+ activation) + quantize, fused; and its gradient."""

from typing import Any, cast

import torch
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.kernels.dropout import Dropout, draws
from loka.kernels.norm_quantize.call import NormCall, NormGradient, NormGradientCall, NormResult
from loka.kernels.registry import load, pick

__all__ = ["NormCall", "NormGradient", "NormGradientCall", "NormResult", "norm_gradient", "norm_quantize"]


def norm_quantize(
    x: Tensor | QTensor,
    spec: Spec | None,
    *,
    norm: str,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    eps: float | None = None,
    scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    transpose: bool = False,
    amax: Tensor | None = None,
    dropout: Dropout | None = None,
    head: Tensor | None = None,
    backend: str = "auto",
) -> NormResult:
    """Return q = quantize(activation(norm(x + residual) * weight + bias)) for x [M, K].

    Args:
        x: a 16- or 32-bit tensor, or FP8 with one scale for the tensor or per row.
        spec: the format of q; None quantizes nothing.
        norm: "layer", "rms" (both over the whole row), or "block" (RMS of each 256 columns, without parameters).
        weight: [K], for layer and rms.
        bias: [K], for layer and rms.
        residual: [M, K], added to x first.
        activation: one of loka.kernels.activation.ACTIVATIONS.
        eps: None for 1e-5 (layer) or 1e-6 (rms, block).
        scale: the scale of a static or delayed spec, a float32 scalar.
        out_dtype: also write the output before quantization, in this dtype.
        transpose: also write q^T [K, M], contiguous along M, with the same given scale.
        amax: a float32 scalar, raised in place to the largest finite |output| before dropout and quantization.
        dropout: drops elements of the output: output * kept / (1 - p). A given scale is for the values before the
            factor 1 / (1 - p), which goes into the scale of q.
        head: [N, K] with at most eight rows, such as the weight of a ranker's last linear: also return the products of the
            output with them, before it is quantized. With `spec` and `out_dtype` None nothing else is written.
        backend: a backend of the registry, or "auto".

    Returns:
        The output both ways, h = x + residual, mean and rstd for `norm_gradient`, and the products with a head.

    Example:
        >>> kept = norm_quantize(x, Spec.parse("e4m3:row"), norm="layer", weight=w, bias=b, activation="silu")
    """
    _check_amax(amax)
    m, k = x.shape
    affine = weight is not None or bias is not None
    kept = x.spec if isinstance(x, QTensor) else None
    dtype = x.data.dtype if isinstance(x, QTensor) else x.dtype
    call = NormCall(
        m,
        k,
        spec,
        norm,
        activation,
        affine,
        residual is not None,
        dtype,
        out_dtype,
        transpose,
        kept,
        draws(dropout, x.device),
        0 if head is None else head.shape[0],
    )
    chosen = pick("norm_quantize", backend, call, x.device)
    result = chosen.backend.run(
        x,
        call,
        weight=weight,
        bias=bias,
        residual=residual,
        eps=eps,
        scale=scale,
        amax=amax,
        dropout=dropout,
        head=head,
    )
    return cast(NormResult, result)


def norm_gradient(
    dy: Tensor,
    h: Tensor | QTensor,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    norm: str,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    dh: Tensor | None = None,
    spec: Spec | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    dropout: Dropout | None = None,
    backend: str = "auto",
) -> NormGradient:
    """Return the gradient of `norm_quantize` from what it kept; with a `spec` dx is returned in FP8 both ways.

    Args:
        dy: [M, K], the gradient of the output, 16- or 32-bit.
        h: the input of the norm, as forward kept it: 16-bit, 32-bit or FP8.
        mean: forward's [M, 1], for layer norm.
        rstd: forward's [M, 1] or [M, blocks].
        norm, weight, bias, activation, dropout: as in forward.
        dh: the gradient that reaches h from the residual stream, added to dx.
        spec: FP8 with one given scale (static or delayed), for dx [M, K] and dx^T [K, M].
        scale: that scale, a float32 scalar.
        amax: a float32 scalar, raised in place to the largest finite |dx|.
        backend: a backend of the registry, or "auto".

    Returns:
        dx (= dresidual), its transpose with a `spec`, dweight and dbias.

    Example:
        >>> back = norm_gradient(dy, kept.h, kept.mean, kept.rstd, norm="layer", weight=w, bias=b, activation="silu")
    """
    _check_amax(amax)
    m, k = dy.shape
    affine = weight is not None or bias is not None
    call = NormGradientCall(
        m, k, norm, activation, affine, dh is not None, dy.dtype, spec, h.spec if isinstance(h, QTensor) else None, draws(dropout, dy.device)
    )  # fmt: skip
    chosen: Any = pick("norm_quantize", backend, call, dy.device).backend
    result = chosen.gradient(dy, h, mean, rstd, call, weight=weight, bias=bias, dh=dh, scale=scale, amax=amax, dropout=dropout)  # fmt: skip
    return cast(NormGradient, result)


def _check_amax(amax: Tensor | None) -> None:
    if amax is not None and (amax.numel() != 1 or amax.dtype != torch.float32):
        raise ValueError(f"amax is a float32 scalar that is raised in place, got {amax.dtype} {tuple(amax.shape)}")


load("norm_quantize")  # at import: torch.compile cannot trace an import inside a call
