"""fused_linear: FP8 GEMM + bias + BlockNorm + activation + FP8 output in one kernel, and the gradient back to the GEMMs."""

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
        dropout: a draw for the elements of y, behind the activation: y * kept / (1 - p). A given scale is that of values before 1 / (1 - p), which goes into the scale of y; `amax` and what
            is kept for backward know nothing of it.
        launch: how the kernel is launched (`choose_launch` has the candidates); None for the best by the model. One that cannot run the call is refused.
        backend: by name, or "auto".

    Returns:
        y and, where asked, its transpose and what backward needs.

    Example:
        >>> history = torch.zeros(())
        >>> layer = fused_linear(x, w, out=Spec.parse("e4m3:tensor:static"), out_scale=scale, bias=bias, norm_block=0, activation="relu", amax=history)
    """
    m, k = a.shape
    call = FusedCall(m, k, b.shape[0], a.spec, b.spec, out, norm_block, activation, bias is not None, keep, transpose, amax is not None, slope, draws(dropout, a.device))  # fmt: skip
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
    """From dy [M, N] and what forward kept to the GEMM output's gradient, quantised for dgrad and, transposed, for wgrad.

    `kept.z` may be None where there is neither a norm nor an activation. `dropout`: the draw of forward.
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
    """One step of backward through a chain without norms: (g @ w) * activation'(z), FP8 in and FP8 out.

    Args:
        g: [M, K], the gradient of a layer's GEMM output, one scale for the tensor.
        w_t: [N, K], the transpose of that layer's weight, as dgrad takes it.
        z: [M, N], what the layer before kept (`FusedResult.z`): z or y in FP8, z in bf16, or None for no activation.
        spec: how the result is written, both ways: one static or delayed scale for the tensor.
        scale: that scale. Values beyond it saturate.
        activation: of the layer before.
        amax: one float32 number >= 0, raised in place to the largest finite magnitude of the result: the next step's scale comes from it.
        bias: also the gradient of the bias of the layer before: float32 column sums of the result before it is quantised.
        slope: of leaky_relu below zero.
        dropout: the draw of the layer before.
        launch: how the kernel is launched; None for the best by the model.
        backend: by name, or "auto".

    Returns:
        The gradient of the layer before's GEMM output, [M, N] for its dgrad and [N, M] for its wgrad; the bias gradient.

    Example:
        >>> step = fused_linear_dgrad(g, w_t, kept.z, spec=Spec.parse("e4m3:tensor:delayed"), scale=scale, activation="relu", amax=history, bias=True)
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
