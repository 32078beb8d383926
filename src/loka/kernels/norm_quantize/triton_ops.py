"""norm_quantize as torch ops. Absent outputs come back empty: an op's signature is fixed."""

import torch
from torch import Tensor

from loka.kernels.norm_quantize import triton_kernels as kernels


def _dense(results: dict[str, Tensor | None], like: Tensor, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0, dtype=torch.float32) if results[name] is None else results[name] for name in names)


@torch.library.custom_op("loka::norm_quantize", mutates_args=())
def norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None,
    norm: int, activation: int, eps: float, dtype: torch.dtype, source: int, pow2: bool, out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q, scale, h, y, mean, rstd."""
    results = kernels.forward(
        x, residual, weight, bias, scale, norm=norm, activation=activation, eps=eps, dtype=dtype, source=source, pow2=pow2, out_dtype=out_dtype
    )  # fmt: skip
    return _dense(results, x, ("q", "scale", "h", "y", "mean", "rstd"))


@norm_quantize.register_fake
def _(x, residual, weight, bias, scale, norm, activation, eps, dtype, source, pow2, out_dtype):  # type: ignore[no-untyped-def]
    m, k = x.shape

    def empty(*shape, dtype=torch.float32):  # type: ignore[no-untyped-def]
        return x.new_empty(shape, dtype=dtype)

    return (
        kernels.aligned(m, k, dtype, x.device),
        kernels.block_scales(m, k, source, x.device)
        if source == kernels.GROUPED
        else empty(*((m, 1) if source == kernels.VECTOR else (0,))),
        empty(m, k, dtype=x.dtype) if residual is not None else empty(0),
        empty(m, k, dtype=out_dtype) if out_dtype is not None else empty(0),
        empty(m, 1) if norm == kernels.LAYER else empty(0),
        empty(m, -(-k // kernels.NORM_BLOCK) if norm == kernels.BLOCK else 1),
    )


@torch.library.custom_op("loka::norm_gradient", mutates_args=())
def norm_gradient(
    dy: Tensor, h: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor, dh: Tensor | None,
    norm: int, activation: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dweight, dbias."""
    results = kernels.backward(dy, h, weight, bias, mean, rstd, dh, norm=norm, activation=activation)
    return _dense(results, dy, ("dx", "dw", "db"))


@norm_gradient.register_fake
def _(dy, h, weight, bias, mean, rstd, dh, norm, activation):  # type: ignore[no-untyped-def]
    nothing = dy.new_empty(0, dtype=torch.float32)
    return (
        h.new_empty(h.shape),
        nothing if weight is None else weight.new_empty(weight.shape),
        nothing.clone() if bias is None else bias.new_empty(bias.shape),
    )
