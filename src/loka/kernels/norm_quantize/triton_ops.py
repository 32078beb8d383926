"""norm_quantize as torch ops: forward and backward, each with and without the transpose. `amax` is raised in place."""

import torch
from torch import Tensor

from loka.kernels.dropout import draw_from
from loka.kernels.norm_quantize import triton_both as both
from loka.kernels.norm_quantize import triton_kernels as kernels
from loka.kernels.op import fake_of, torch_op


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32)


@torch_op("norm_quantize", mutates=("amax",))
def norm_quantize(
    x: Tensor, x_scale: Tensor | None, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, amax: Tensor | None,
    norm: int, activation: int, eps: float, dtype: torch.dtype, source: int, pow2: bool, out_dtype: torch.dtype | None,
    seed: Tensor | None, p: float, stream: int, head: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q, scale, h, y, mean, rstd, dots. A given scale is returned only with dropout (a seed), times its factor."""
    results = kernels.forward(
        x, x_scale, residual, weight, bias, scale, amax,
        norm=norm, activation=activation, eps=eps, dtype=dtype, source=source, pow2=pow2, out_dtype=out_dtype,
        dropout=draw_from(seed, p, stream), head=head,
    )  # fmt: skip
    return results["q"], results["scale"], results["h"], results["y"], results["mean"], results["rstd"], results["dots"]


@fake_of(norm_quantize)
def _(x, x_scale, residual, weight, bias, scale, amax, norm, activation, eps, dtype, source, pow2, out_dtype, seed, p, stream, head):  # type: ignore[no-untyped-def]  # fmt: skip
    m, k = x.shape

    def empty(*shape, dtype=torch.float32):  # type: ignore[no-untyped-def]
        return x.new_empty(shape, dtype=dtype)

    made = () if seed is not None and source == kernels.SCALAR else (0,)
    return (
        kernels.aligned(m, k, dtype, x.device) if source != kernels.UNSCALED else empty(0),
        kernels.block_scales(m, k, source, x.device)
        if source == kernels.GROUPED
        else empty(*((m, 1) if source == kernels.VECTOR else made)),
        empty(m, k, dtype=x.dtype) if residual is not None else empty(0),
        empty(m, k, dtype=out_dtype) if out_dtype is not None else empty(0),
        empty(m, 1) if norm == kernels.LAYER else empty(0),
        empty(m, -(-k // kernels.NORM_BLOCK) if norm == kernels.BLOCK else 1),
        empty(m, head.shape[0]) if head is not None else empty(0),
    )


@torch_op("norm_gradient", mutates=("amax",))
def norm_gradient(
    dy: Tensor, h: Tensor, h_scale: Tensor | None, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor, dh: Tensor | None,
    amax: Tensor | None, norm: int, activation: int, seed: Tensor | None, p: float, stream: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dx, dweight, dbias."""
    results = kernels.backward(
        dy, h, h_scale, weight, bias, mean, rstd, dh, amax, norm=norm, activation=activation, dropout=draw_from(seed, p, stream)
    )  # fmt: skip
    return results["dx"], results["dw"], results["db"]


@fake_of(norm_gradient)
def _(dy, h, h_scale, weight, bias, mean, rstd, dh, amax, norm, activation, seed, p, stream):  # type: ignore[no-untyped-def]
    return (dy.new_empty(dy.shape, dtype=h.dtype if h_scale is None else dy.dtype), *_fake_parameters(dy, weight, bias))


def _fake_parameters(dy: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return (
        _nothing(dy) if weight is None else weight.new_empty(weight.shape),
        _nothing(dy) if bias is None else bias.new_empty(bias.shape),
    )


@torch_op("norm_quantize_both", mutates=("amax",))
def norm_quantize_both(
    x: Tensor, x_scale: Tensor | None, weight: Tensor | None, bias: Tensor | None, scale: Tensor, amax: Tensor | None,
    norm: int, activation: int, eps: float, dtype: torch.dtype, seed: Tensor | None, p: float, stream: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q, q^T, the scale times dropout's factor, mean, rstd."""
    results = both.forward_both(
        x, x_scale, weight, bias, scale, amax, norm=norm, activation=activation, eps=eps, dtype=dtype, dropout=draw_from(seed, p, stream)
    )  # fmt: skip
    return results["q"], results["q_t"], results["scale"], results["mean"], results["rstd"]


@fake_of(norm_quantize_both)
def _(x, x_scale, weight, bias, scale, amax, norm, activation, eps, dtype, seed, p, stream):  # type: ignore[no-untyped-def]
    m, k = x.shape
    statistics = x.new_empty((m, 1), dtype=torch.float32)
    mean = torch.empty_like(statistics) if norm == kernels.LAYER else _nothing(x)
    made = x.new_empty(() if seed is not None else 0, dtype=torch.float32)
    return kernels.aligned(m, k, dtype, x.device), kernels.aligned(k, m, dtype, x.device), made, mean, statistics


@torch_op("norm_gradient_both", mutates=("amax",))
def norm_gradient_both(
    dy: Tensor, h: Tensor, h_scale: Tensor | None, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor, scale: Tensor,
    amax: Tensor | None, norm: int, activation: int, dtype: torch.dtype, seed: Tensor | None, p: float, stream: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dx, dx^T, dweight, dbias."""
    results = both.backward_both(
        dy, h, h_scale, weight, bias, mean, rstd, scale, amax, norm=norm, activation=activation, dtype=dtype, dropout=draw_from(seed, p, stream)
    )  # fmt: skip
    return results["dx"], results["dx_t"], results["dw"], results["db"]


@fake_of(norm_gradient_both)
def _(dy, h, h_scale, weight, bias, mean, rstd, scale, amax, norm, activation, dtype, seed, p, stream):  # type: ignore[no-untyped-def]
    m, k = dy.shape
    dx_t = kernels.aligned(k, m, dtype, dy.device)
    return kernels.aligned(m, k, dtype, dy.device), dx_t, *_fake_parameters(dy, weight, bias)
