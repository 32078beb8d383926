"""norm_quantize: (residual +) LayerNorm, RMSNorm or BlockNorm (+ activation) + quantise in one pass, and its gradient."""

from typing import Any, cast

import torch
from torch import Tensor

from loka.formats import Spec
from loka.kernels.norm_quantize.call import NormCall, NormResult
from loka.kernels.registry import pick

__all__ = ["NormCall", "NormResult", "norm_gradient", "norm_quantize"]


def norm_quantize(
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
    backend: str = "auto",
) -> NormResult:
    """q = quantize(activation(norm(x + residual) * weight + bias)) for x [M, K]."""
    affine = weight is not None or bias is not None
    m, k = x.shape
    call = NormCall(m, k, spec, norm, activation, affine, residual is not None, x.dtype, out_dtype)
    chosen = pick("norm_quantize", backend, call, x.device)
    result = chosen.backend.run(
        x, spec, norm=norm, weight=weight, bias=bias, residual=residual, activation=activation, eps=eps, scale=scale, out_dtype=out_dtype
    )  # fmt: skip
    return cast(NormResult, result)


def norm_gradient(
    dy: Tensor,
    kept: NormResult,
    *,
    norm: str,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    dh: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx (= dresidual), dweight and dbias from the gradient of the output and, where there is a residual stream, of h."""
    m, k = dy.shape
    call = NormCall(m, k, kept.q.spec, norm, activation, weight is not None, dh is not None, kept.h.dtype)
    chosen: Any = pick("norm_quantize", backend, call, dy.device).backend
    result = chosen.gradient(
        dy, kept.h, kept.mean, kept.rstd, norm=norm, weight=weight, bias=bias, activation=activation, dh=dh
    )
    return cast(tuple[Tensor, Tensor | None, Tensor | None], result)
