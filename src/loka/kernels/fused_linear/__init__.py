"""fused_linear: FP8 GEMM + bias + BlockNorm + activation + FP8 output in one kernel, and the gradient back to the GEMMs."""

from typing import Any, cast

import torch
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.kernels.fused_linear.call import (
    NORM_BLOCK,
    NORMALIZED,
    NORMALIZED_SCALE,
    SLOPE,
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
    amax: Tensor | None = None,
    slope: float = SLOPE,
    backend: str = "auto",
) -> FusedResult:
    """y = activation(z), z = norm(a @ b^T + bias), with a [M, K], b [N, K].

    Args:
        a: the quantised input.
        b: the quantised weight.
        out: how y is written: an FP8 Spec or a dtype of 16 or 32 bits.
        out_scale: the scale of a static or delayed `out`. Values beyond it saturate.
        bias: [N], added before the norm.
        norm_block: 256, or 0 for no norm.
        activation: one of ACTIVATIONS.
        keep: also what backward needs of z. Without a norm and with an E4M3 output this is FP8 too, or y itself (`call.kept_form`).
        transpose: also y^T [N, M], the operand of the next wgrad.
        amax: one float32 number >= 0, raised in place to the largest finite |z|. |y| <= |z| for every activation here but tanh and sigmoid (bounded by 1), so one
            scale made from it serves y and z: the next step's delayed scale, or a calibrated one. NaN and Inf leave no trace in it, and stay visible in y.
        slope: of leaky_relu below zero.
        backend: by name, or "auto".

    Returns:
        y and, where asked, its transpose and what backward needs.

    Example:
        >>> history = torch.zeros(())
        >>> layer = fused_linear(x, w, out=Spec.parse("e4m3:tensor:static"), out_scale=scale, bias=bias, norm_block=0, activation="relu", amax=history)
    """
    m, k = a.shape
    call = FusedCall(m, k, b.shape[0], a.spec, b.spec, out, norm_block, activation, bias is not None, keep, transpose, amax is not None, slope)  # fmt: skip
    chosen = pick("fused_linear", backend, call, a.device)
    result = chosen.backend.run(
        a, b, out=out, out_scale=out_scale, bias=bias, norm_block=norm_block, activation=activation, keep=keep, transpose=transpose,
        amax=amax, slope=slope,
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
    slope: float = SLOPE,
    backend: str = "auto",
) -> GradientResult:
    """From dy [M, N] and what forward kept to the GEMM output's gradient, quantised for dgrad and, transposed, for wgrad.

    `kept.z` may be None where there is neither a norm nor an activation.
    """
    if kept.z is None and (norm_block or activation != "none"):
        raise ValueError("this result has nothing for backward; hint: fused_linear(..., keep=True)")
    m, n = dy.shape
    call = GradientCall(m, n, spec, spec_t, norm_block, activation, bias, dy.dtype, slope)
    chosen: Any = pick("fused_linear", backend, call, dy.device).backend
    result = chosen.gradient(
        dy, kept.z, kept.rstd, spec=spec, spec_t=spec_t, scale=scale, norm_block=norm_block, activation=activation, bias=bias, slope=slope
    )  # fmt: skip
    return cast(GradientResult, result)
