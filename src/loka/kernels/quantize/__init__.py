"""quantize: convert a tensor, its transpose, or both from one read, to low precision with scales."""

from typing import Any, cast

import torch
from torch import Tensor

from loka.formats import TENSOR, QTensor, Spec
from loka.kernels.quantize.call import QuantizeCall
from loka.kernels.registry import pick
from loka.kernels.strides import aligned_rows

__all__ = ["QuantizeCall", "quantize", "quantize_both", "quantize_transposed", "transpose"]


def quantize(
    x: Tensor,
    spec: Spec,
    *,
    scale: Tensor | None = None,
    backend: str = "auto",
    generator: torch.Generator | None = None,
) -> QTensor:
    """Quantize a 2-D tensor.

    Args:
        x: [M, K], floating point.
        spec: the format, scale granularity and rounding.
        scale: the scale of a static or delayed spec.
        backend: a backend of the registry, or "auto".
        generator: the source of randomness for stochastic rounding.

    Returns:
        The quantized tensor.

    Example:
        >>> q = quantize(x, Spec.parse("e4m3:row"))
    """
    chosen = pick("quantize", backend, QuantizeCall.of(x, spec), x.device)
    q, _ = chosen.backend.run(_align(x, chosen.backend), spec, scale=scale, generator=generator)
    return cast(QTensor, q)


def quantize_both(
    x: Tensor,
    spec: Spec,
    transpose: Spec,
    *,
    scale: Tensor | None = None,
    transpose_scale: Tensor | None = None,
    backend: str = "auto",
    generator: torch.Generator | None = None,
) -> tuple[QTensor, QTensor]:
    """Quantize x [M, K] as `spec` and its transpose [K, M], contiguous along M, as `transpose`, from one read of x.

    Args:
        x, backend, generator: as in `quantize`.
        spec, scale: those of x.
        transpose, transpose_scale: those of the transpose.

    Returns:
        The quantized tensor and its quantized transpose.

    Example:
        >>> q, q_t = quantize_both(x, Spec.parse("e4m3:1x128"), Spec.parse("e4m3:1x128"))
    """
    call = QuantizeCall.of(x, spec, transpose)
    chosen = pick("quantize", backend, call, x.device)
    x = _align(x, chosen.backend)
    result = chosen.backend.run(
        x, spec, scale=scale, transpose=transpose, transpose_scale=transpose_scale, generator=generator
    )
    return cast(tuple[QTensor, QTensor], result)


def quantize_transposed(
    x: Tensor,
    spec: Spec,
    *,
    scale: Tensor | None = None,
    backend: str = "auto",
    generator: torch.Generator | None = None,
) -> QTensor:
    """Quantize the transpose [K, M] of x [M, K], contiguous along M, without a transposed copy in x's precision.

    Args:
        x, spec, scale, backend, generator: as in `quantize`; spec and scale are those of the transpose.

    Returns:
        The quantized transpose.

    Example:
        >>> q_t = quantize_transposed(x, Spec.parse("e4m3:row"))
    """
    chosen = pick("quantize", backend, QuantizeCall.of(x, None, spec), x.device)
    x = _align(x, chosen.backend)
    _, q_t = chosen.backend.run(x, None, transpose=spec, transpose_scale=scale, generator=generator)
    return cast(QTensor, q_t)


def _align(x: Tensor, backend: Any) -> Tensor:
    return x if getattr(backend, "any_alignment", False) else aligned_rows(x)


def transpose(q: QTensor, *, backend: str = "auto") -> QTensor:
    """Transpose a quantized tensor with one scale, for a GEMM that contracts the other axis.

    Args:
        q: [M, K]. Any other scale granularity would need new scales and raises ValueError.
        backend: a backend of the registry, or "auto".

    Returns:
        The same values [K, M], contiguous along M.

    Example:
        >>> q_t = transpose(quantize(x, Spec.parse("e4m3:tensor")))
    """
    if q.spec.block != TENSOR:
        raise ValueError(
            f"{q.spec} has a scale per {q.spec.block}, which the transpose cannot reuse; hint: quantize_both"
        )
    call = QuantizeCall(q.shape[0], q.shape[1], q.spec)
    chosen: Any = pick("quantize", backend, call, q.device).backend
    return QTensor(chosen.transpose(q.data), q.scale, q.spec)
