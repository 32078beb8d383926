"""The fused layer and its gradient as torch ops."""

import torch
from torch import Tensor

from loka.kernels.dropout import draw_from
from loka.kernels.fused_linear import triton_dgrad_kernels, triton_gradient_kernels
from loka.kernels.fused_linear import triton_kernels as kernels
from loka.kernels.op import fake_of, torch_op


@torch_op("fused_linear", mutates=("amax",))
def fused_linear(
    a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None, out_scale: Tensor | None, amax: Tensor | None,
    a_source: int, b_source: int, norm: bool, activation: int, slope: float, form: int, out_dtype: torch.dtype,
    pow2: bool, keep: int, transpose: bool, launch: list[int] | None, seed: Tensor | None, p: float, stream: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return y, y_scale, y_t, yt_scale, z, rstd; `amax` is raised in place.

    A given scale is returned as y_scale only with dropout (a seed), which multiplies it by a factor. No argument is
    named `out`: torch's compiler treats a call with one as mutating everything and merges nothing across it, not even
    the quantizations of an input that several chains read.
    """
    results = kernels.fused(
        a, b, sa, sb, bias, out_scale, a_source=a_source, b_source=b_source, norm=norm, activation=activation,
        out=form, out_dtype=out_dtype, pow2=pow2, keep=keep, transpose=transpose, amax=amax, slope=slope, launch=launch,
        dropout=draw_from(seed, p, stream),
    )  # fmt: skip
    return results["y"], results["y_scale"], results["y_t"], results["yt_scale"], results["z"], results["rstd"]


@fake_of(fused_linear)
def _(a, b, sa, sb, bias, out_scale, amax, a_source, b_source, norm, activation, slope, form, out_dtype, pow2, keep, transpose, launch, seed, p, stream):  # type: ignore[no-untyped-def]  # fmt: skip
    m, n, device = a.shape[0], b.shape[0], a.device
    grouped = form == kernels.OUT_GROUPED

    def empty(*shape, dtype=torch.float32):  # type: ignore[no-untyped-def]
        return a.new_empty(shape, dtype=dtype)

    made = empty() if seed is not None and form == kernels.OUT_STATIC else empty(0)
    return (
        kernels.aligned(m, n, out_dtype, a.device),
        kernels.block_scales(m, n, kernels.GROUPED, device) if grouped else made,
        kernels.aligned(n, m, out_dtype, a.device) if transpose else empty(0),
        kernels.block_scales(n, m, kernels.GROUPED, device) if grouped and transpose else empty(0),
        kernels.aligned(m, n, kernels.KEEP_TYPES[keep], a.device) if keep else empty(0),
        empty(m, -(-n // kernels.NORM_BLOCK)) if keep and norm else empty(0),
    )


@torch_op("fused_linear_gradient")
def fused_linear_gradient(
    dy: Tensor, z: Tensor | None, z_scale: Tensor | None, rstd: Tensor | None, scale: Tensor | None,
    norm: bool, activation: int, kept: int, slope: float, bias: bool, grouped: bool, dtype: torch.dtype, t_dtype: torch.dtype, pow2: bool, t_pow2: bool,
    seed: Tensor | None, p: float, stream: int, drop: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return g, g_scale, g_t, gt_scale, bias, amax.

    An op's outputs may alias nothing, so a given scale is not returned, and a shared one only as g_scale.
    """
    results = triton_gradient_kernels.gradient(
        dy, z, z_scale, rstd, scale, norm=norm, activation=activation, kept=kept, slope=slope, bias=bias, grouped=grouped,
        dtype=dtype, t_dtype=t_dtype, pow2=pow2, t_pow2=t_pow2, dropout=draw_from(seed, p, stream), drop=drop,
    )  # fmt: skip
    g_scale = results["g_scale"] if scale is None else None
    gt_scale = results["gt_scale"] if grouped else None
    return results["g"], g_scale, results["g_t"], gt_scale, results["bias"], results["amax"]


@fake_of(fused_linear_gradient)
def _(dy, z, z_scale, rstd, scale, norm, activation, kept, slope, bias, grouped, dtype, t_dtype, pow2, t_pow2, seed, p, stream, drop):  # type: ignore[no-untyped-def]  # fmt: skip
    (m, n), device = dy.shape, dy.device
    alone = () if scale is None else (0,)  # one dynamic scale, or nothing

    def empty(*shape, dtype=torch.float32):  # type: ignore[no-untyped-def]
        return dy.new_empty(shape, dtype=dtype)

    return (
        kernels.aligned(m, n, dtype, dy.device),
        kernels.block_scales(m, n, kernels.GROUPED, device) if grouped else empty(*alone),
        kernels.aligned(n, m, t_dtype, dy.device),
        kernels.block_scales(n, m, kernels.GROUPED, device) if grouped else empty(0),
        empty(n) if bias else empty(0),
        empty(),
    )


@torch_op("fused_linear_dgrad", mutates=("amax",))
def fused_linear_dgrad(
    g: Tensor, w_t: Tensor, sg: Tensor, sw: Tensor, z: Tensor | None, z_scale: Tensor | None, scale: Tensor, amax: Tensor | None,
    activation: int, kept: int, slope: float, dtype: torch.dtype, bias: bool, launch: list[int] | None,
    seed: Tensor | None, p: float, stream: int, drop: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return g, g_t and the bias gradient of the previous layer; `amax` is raised in place."""
    results = triton_dgrad_kernels.dgrad(
        g, w_t, sg, sw, z, z_scale, scale, amax, activation=activation, kept=kept, slope=slope, dtype=dtype, bias=bias, launch=launch,
        dropout=draw_from(seed, p, stream), drop=drop,
    )  # fmt: skip
    return results["g"], results["g_t"], results["bias"]


@fake_of(fused_linear_dgrad)
def _(g, w_t, sg, sw, z, z_scale, scale, amax, activation, kept, slope, dtype, bias, launch, seed, p, stream, drop):  # type: ignore[no-untyped-def]  # fmt: skip
    m, n = g.shape[0], w_t.shape[0]
    return (
        kernels.aligned(m, n, dtype, g.device),
        kernels.aligned(n, m, dtype, g.device),
        g.new_empty(n if bias else 0, dtype=torch.float32),
    )
