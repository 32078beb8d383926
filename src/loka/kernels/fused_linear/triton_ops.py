"""The fused layer and its gradient as torch ops."""

import torch

from loka.kernels.fused_linear import triton_dgrad_kernels, triton_gradient_kernels
from loka.kernels.fused_linear import triton_kernels as kernels
from loka.kernels.fused_linear.call import NORM_BLOCK
from loka.kernels.op import fake_of, torch_op
from loka.kernels.quantize.triton_kernels import GROUPED, block_scales

fused_linear = torch_op("fused_linear", mutates=("amax",))(kernels.fused_linear)


@fake_of(fused_linear)
def _(a, b, sa, sb, bias, out_scale, amax, a_source, b_source, norm, activation, slope, form, out_dtype, pow2, keep, transpose, launch, seed, p, stream):  # type: ignore[no-untyped-def]  # fmt: skip
    m, n, device = a.shape[0], b.shape[0], a.device
    grouped = form == kernels.OUT_GROUPED

    def empty(*shape, dtype=torch.float32):  # type: ignore[no-untyped-def]
        return a.new_empty(shape, dtype=dtype)

    made = empty() if seed is not None and form == kernels.OUT_STATIC else empty(0)
    return (
        kernels.aligned(m, n, out_dtype, a.device),
        block_scales(m, n, GROUPED, device) if grouped else made,
        kernels.aligned(n, m, out_dtype, a.device) if transpose else empty(0),
        block_scales(n, m, GROUPED, device) if grouped and transpose else empty(0),
        kernels.aligned(m, n, kernels.KEEP_TYPES[keep], a.device) if keep else empty(0),
        empty(m, -(-n // NORM_BLOCK)) if keep and norm else empty(0),
    )


fused_linear_gradient = torch_op("fused_linear_gradient")(triton_gradient_kernels.fused_linear_gradient)


@fake_of(fused_linear_gradient)
def _(dy, z, z_scale, rstd, scale, norm, activation, kept, slope, bias, grouped, dtype, t_dtype, pow2, t_pow2, seed, p, stream, drop):  # type: ignore[no-untyped-def]  # fmt: skip
    (m, n), device = dy.shape, dy.device
    alone = () if scale is None else (0,)  # one dynamic scale, or nothing

    def empty(*shape, dtype=torch.float32):  # type: ignore[no-untyped-def]
        return dy.new_empty(shape, dtype=dtype)

    return (
        kernels.aligned(m, n, dtype, dy.device),
        block_scales(m, n, GROUPED, device) if grouped else empty(*alone),
        kernels.aligned(n, m, t_dtype, dy.device),
        block_scales(n, m, GROUPED, device) if grouped else empty(0),
        empty(n) if bias else empty(0),
        empty(),
    )


fused_linear_dgrad = torch_op("fused_linear_dgrad", mutates=("amax",))(triton_dgrad_kernels.fused_linear_dgrad)


@fake_of(fused_linear_dgrad)
def _(g, w_t, sg, sw, z, z_scale, scale, amax, activation, kept, slope, dtype, bias, launch, seed, p, stream, drop):  # type: ignore[no-untyped-def]  # fmt: skip
    m, n = g.shape[0], w_t.shape[0]
    return (
        kernels.aligned(m, n, dtype, g.device),
        kernels.aligned(n, m, dtype, g.device),
        g.new_empty(n if bias else 0, dtype=torch.float32),
    )
