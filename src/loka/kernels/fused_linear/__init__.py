"""fused_linear: FP8 GEMM + bias + BlockNorm + activation + FP8 output in one kernel, and the gradient back to the GEMMs."""

from typing import Any, cast

import torch
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.kernels.fused_linear.call import (
    NORM_BLOCK,
    NORMALIZED,
    NORMALIZED_SCALE,
    FusedCall,
    FusedResult,
    GradientCall,
    GradientResult,
)
from loka.kernels.registry import pick

__all__ = [
    "NORMALIZED",
    "NORMALIZED_SCALE",
    "NORM_BLOCK",
    "FusedCall",
    "FusedResult",
    "GradientCall",
    "GradientResult",
    "fused_linear",
    "fused_linear_gradient",
]


def fused_linear(
    a: QTensor,
    b: QTensor,
    *,
    out: Spec | torch.dtype,
    out_scale: Tensor | None = None,
    bias: Tensor | None = None,
    norm_block: int = NORM_BLOCK,
    activation: str = "hard_swish",
    keep: bool = False,
    transpose: bool = False,
    backend: str = "auto",
) -> FusedResult:
    """y = activation(norm(a @ b^T + bias)) with a [M, K], b [N, K]."""
    m, k = a.shape
    call = FusedCall(m, k, b.shape[0], a.spec, b.spec, out, norm_block, activation, bias is not None, keep, transpose)
    chosen = pick("fused_linear", backend, call, a.device)
    result = chosen.backend.run(
        a, b, out=out, out_scale=out_scale, bias=bias, norm_block=norm_block, activation=activation, keep=keep, transpose=transpose
    )  # fmt: skip
    return cast(FusedResult, result)


def fused_linear_gradient(
    dy: Tensor,
    kept: FusedResult,
    *,
    spec: Spec,
    spec_t: Spec,
    scale: Tensor | None = None,
    norm_block: int = NORM_BLOCK,
    activation: str = "hard_swish",
    bias: bool = False,
    backend: str = "auto",
) -> GradientResult:
    """From dy [M, N] and what forward kept to the GEMM output's gradient, quantised for dgrad and, transposed, for wgrad."""
    if kept.z is None:
        raise ValueError("this result has nothing for backward; hint: fused_linear(..., keep=True)")
    m, n = dy.shape
    call = GradientCall(m, n, spec, spec_t, norm_block, activation, bias, dy.dtype)
    chosen: Any = pick("fused_linear", backend, call, dy.device).backend
    result = chosen.gradient(
        dy, kept.z, kept.rstd, spec=spec, spec_t=spec_t, scale=scale, norm_block=norm_block, activation=activation, bias=bias
    )  # fmt: skip
    return cast(GradientResult, result)
