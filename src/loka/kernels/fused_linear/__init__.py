"""fused_linear: FP8 GEMM + bias + BlockNorm + activation + FP8 output in one kernel, and its gradient."""

from typing import Any, cast

import torch
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.kernels.activation import LEAK as SLOPE
from loka.kernels.dropout import Dropout, draws
from loka.kernels.fused_linear.call import (
    NORM_BLOCK,
    NORMALIZED,
    NORMALIZED_SCALE,
    DgradCall,
    DgradResult,
    FusedCall,
    FusedResult,
    GradientCall,
    GradientResult,
    Kept,
)
from loka.kernels.fused_linear.launch import Launch, Properties, choose_launch, properties_of
from loka.kernels.registry import pick

__all__ = [
    "NORMALIZED", "NORMALIZED_SCALE", "NORM_BLOCK", "DgradCall", "DgradResult", "FusedCall", "FusedResult",
    "GradientCall", "GradientResult", "Launch", "Properties", "choose_launch", "fused_linear", "fused_linear_dgrad",
    "fused_linear_gradient", "properties_of",
]  # fmt: skip


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
    dropout: Dropout | None = None,
    launch: Launch | None = None,
    backend: str = "auto",
) -> FusedResult:
    """Return y = activation(z), z = norm(a @ b^T + bias), for quantized a [M, K] and b [N, K].

    Args:
        a: the quantized input.
        b: the quantized weight.
        out: the format of y: an FP8 Spec, or a 16- or 32-bit dtype.
        out_scale: the scale of a static or delayed `out`. Values beyond it saturate.
        bias: [N], added before the norm.
        norm_block: 256, or 0 for no norm.
        activation: one of ACTIVATIONS.
        keep: also return what backward needs of z (`call.kept_form`).
        transpose: also return y^T [N, M], the operand of the next wgrad.
        amax: a float32 scalar >= 0, raised in place to the largest finite |z|; NaN and Inf are ignored. |y| <= |z| for
            every activation here except tanh and sigmoid (bounded by 1), so one scale derived from it, the next step's
            delayed scale or a calibrated one, serves both y and z.
        slope: leaky_relu's slope below zero.
        dropout: drops elements of y after the activation: y * kept / (1 - p). `out_scale` is for the values before the
            factor 1 / (1 - p), which goes into the scale of y. `amax` and what backward keeps are not affected.
        launch: the launch configuration, one of `choose_launch`; None for the first of these. Raises ValueError if it
            cannot run the call.
        backend: a backend of the registry, or "auto".

    Returns:
        y and, if requested, its transpose and what backward needs.

    Example:
        >>> history = torch.zeros(())
        >>> spec = Spec.parse("e4m3:tensor:static")
        >>> layer = fused_linear(x, w, out=spec, out_scale=scale, norm_block=0, activation="relu", amax=history)
    """
    m, k = a.shape
    call = FusedCall(
        m,
        k,
        b.shape[0],
        a.spec,
        b.spec,
        out,
        norm_block,
        activation,
        bias is not None,
        keep,
        transpose,
        amax is not None,
        slope,
        draws(dropout, a.device),
    )
    chosen = pick("fused_linear", backend, call, a.device)
    result = chosen.backend.run(a, b, call, out_scale=out_scale, bias=bias, amax=amax, dropout=dropout, launch=launch)
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
    dropout: Dropout | None = None,
    backend: str = "auto",
) -> GradientResult:
    """Return the gradient of the GEMM's output, quantized for dgrad and, transposed, for wgrad.

    Args:
        dy: the gradient of y, [M, N].
        kept: the result of `fused_linear(..., keep=True)`. `kept.z` may be None without a norm and an activation.
        spec: the format of the gradient [M, N].
        spec_t: the format of its transpose [N, M].
        scale: the scale of static or delayed specs.
        norm_block, activation, slope, dropout: as in forward.
        bias: also return the gradient of the bias.
        backend: a backend of the registry, or "auto".

    Returns:
        The gradient both ways, its amax, and the bias gradient if requested.

    Example:
        >>> back = fused_linear_gradient(dy, kept, spec=spec, spec_t=spec, scale=scale, norm_block=0, activation="relu")
    """
    if kept.z is None and (norm_block or activation != "none"):
        raise ValueError("this result has nothing for backward; hint: fused_linear(..., keep=True)")
    m, n = dy.shape
    call = GradientCall(m, n, spec, spec_t, norm_block, activation, bias, dy.dtype, slope, draws(dropout, dy.device))
    chosen: Any = pick("fused_linear", backend, call, dy.device).backend
    return cast(GradientResult, chosen.gradient(dy, kept.z, kept.rstd, call, scale=scale, dropout=dropout))


def fused_linear_dgrad(
    g: QTensor,
    w_t: QTensor,
    z: QTensor | Tensor | None,
    *,
    spec: Spec,
    scale: Tensor,
    activation: str,
    amax: Tensor | None = None,
    bias: bool = False,
    slope: float = SLOPE,
    dropout: Dropout | None = None,
    launch: Launch | None = None,
    backend: str = "auto",
) -> DgradResult:
    """Run backward from a layer of a chain without norms to the previous one: (g @ w) * activation'(z), FP8 in and out.

    Args:
        g: [M, K], the gradient of a layer's GEMM output, with one scale for the tensor.
        w_t: [N, K], the transpose of that layer's weight, as dgrad takes it.
        z: [M, N], what the previous layer kept (`FusedResult.z`): z or y in FP8, z in bf16, None without an activation.
        spec: the format of the result, both ways: one static or delayed scale for the tensor.
        scale: that scale. Values beyond it saturate.
        activation, slope, dropout: those of the previous layer.
        amax: a float32 scalar >= 0, raised in place to the largest finite magnitude of the result, for the next scale.
        bias: also return the bias gradient of the previous layer: float32 column sums of the unquantized result.
        launch: the launch configuration; None for the first of `choose_launch`.
        backend: a backend of the registry, or "auto".

    Returns:
        The gradient of the previous layer's GEMM output, [M, N] for its dgrad and [N, M] for its wgrad; the bias
        gradient.

    Example:
        >>> spec = Spec.parse("e4m3:tensor:delayed")
        >>> back = fused_linear_dgrad(g, w_t, kept.z, spec=spec, scale=scale, activation="relu", amax=amax, bias=True)
    """
    (m, k), n = g.shape, w_t.shape[0]
    if z is not None and z.shape != (m, n):
        raise ValueError(f"z is [{m}, {n}], as g and w_t have it, got {tuple(z.shape)}")
    form: Kept = "nothing" if z is None else "scaled" if isinstance(z, QTensor) else "bf16"
    call = DgradCall(
        m, k, n, g.spec, w_t.spec, spec, activation, form, bias, amax is not None, slope, draws(dropout, g.device)
    )
    chosen: Any = pick("fused_linear", backend, call, g.device).backend
    return cast(DgradResult, chosen.dgrad(g, w_t, z, call, scale=scale, amax=amax, dropout=dropout, launch=launch))
