"""norm_quantize as torch ops: forward and backward, each with and without the transpose. `amax` is raised in place."""

import torch
from torch import Tensor

from loka.kernels.norm_quantize import triton_both as both
from loka.kernels.norm_quantize import triton_kernels as kernels
from loka.kernels.op import fake_of, torch_op
from loka.kernels.quantize.triton_kernels import aligned, block_scales


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32)


norm_quantize = torch_op("norm_quantize", mutates=("amax",))(kernels.forward)


@fake_of(norm_quantize)
def _(x, x_scale, residual, weight, bias, scale, amax, norm, activation, eps, dtype, source, pow2, out_dtype, seed, p, stream, head):  # type: ignore[no-untyped-def]  # fmt: skip
    m, k = x.shape

    def empty(*shape, dtype=torch.float32):  # type: ignore[no-untyped-def]
        return x.new_empty(shape, dtype=dtype)

    made = () if seed is not None and source == kernels.SCALAR else (0,)
    return (
        aligned(m, k, dtype, x.device) if source != kernels.UNSCALED else empty(0),
        block_scales(m, k, source, x.device)
        if source == kernels.GROUPED
        else empty(*((m, 1) if source == kernels.VECTOR else made)),
        empty(m, k, dtype=x.dtype) if residual is not None else empty(0),
        empty(m, k, dtype=out_dtype) if out_dtype is not None else empty(0),
        empty(m, 1) if norm == kernels.LAYER else empty(0),
        empty(m, -(-k // kernels.NORM_BLOCK) if norm == kernels.BLOCK else 1),
        empty(m, head.shape[0]) if head is not None else empty(0),
    )


norm_gradient = torch_op("norm_gradient", mutates=("amax",))(kernels.backward)


@fake_of(norm_gradient)
def _(dy, h, h_scale, weight, bias, mean, rstd, dh, amax, norm, activation, seed, p, stream):  # type: ignore[no-untyped-def]
    return (dy.new_empty(dy.shape, dtype=h.dtype if h_scale is None else dy.dtype), *_fake_parameters(dy, weight, bias))


def _fake_parameters(dy: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return (
        _nothing(dy) if weight is None else weight.new_empty(weight.shape),
        _nothing(dy) if bias is None else bias.new_empty(bias.shape),
    )


norm_quantize_both = torch_op("norm_quantize_both", mutates=("amax",))(both.forward_both)


@fake_of(norm_quantize_both)
def _(x, x_scale, weight, bias, scale, amax, norm, activation, eps, dtype, seed, p, stream):  # type: ignore[no-untyped-def]
    m, k = x.shape
    statistics = x.new_empty((m, 1), dtype=torch.float32)
    mean = torch.empty_like(statistics) if norm == kernels.LAYER else _nothing(x)
    made = x.new_empty(() if seed is not None else 0, dtype=torch.float32)
    return aligned(m, k, dtype, x.device), aligned(k, m, dtype, x.device), made, mean, statistics


norm_gradient_both = torch_op("norm_gradient_both", mutates=("amax",))(both.backward_both)


@fake_of(norm_gradient_both)
def _(dy, h, h_scale, weight, bias, mean, rstd, scale, amax, norm, activation, dtype, seed, p, stream):  # type: ignore[no-untyped-def]
    m, k = dy.shape
    dx_t = aligned(k, m, dtype, dy.device)
    return aligned(m, k, dtype, dy.device), dx_t, *_fake_parameters(dy, weight, bias)
