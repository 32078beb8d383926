"""quantize: a tensor, its transpose, or both from one read, to low precision with scales."""

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
    """Quantise a 2-D tensor."""
    chosen = pick("quantize", backend, QuantizeCall.of(x, spec), x.device)
    q, _ = chosen.backend.run(_as_it_may_lie(x, chosen.backend), spec, scale=scale, generator=generator)
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
    """Quantise x [M, K] under `spec` and its transpose [K, M], contiguous, under `transpose`."""
    call = QuantizeCall.of(x, spec, transpose)
    chosen = pick("quantize", backend, call, x.device)
    x = _as_it_may_lie(x, chosen.backend)
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
    """Quantise the transpose [K, M], contiguous, of x [M, K], without a transposed copy in x's own precision."""
    chosen = pick("quantize", backend, QuantizeCall.of(x, None, spec), x.device)
    _, q_t = chosen.backend.run(
        _as_it_may_lie(x, chosen.backend), None, transpose=spec, transpose_scale=scale, generator=generator
    )
    return cast(QTensor, q_t)


def _as_it_may_lie(x: Tensor, backend: Any) -> Tensor:
    return x if getattr(backend, "any_alignment", False) else aligned_rows(x)


def transpose(q: QTensor, *, backend: str = "auto") -> QTensor:
    """The same numbers [K, M], contiguous, for a GEMM that contracts the other axis: of a tensor with one scale, since others would need new ones."""
    if q.spec.block != TENSOR:
        raise ValueError(
            f"{q.spec} has a scale per {q.spec.block}, which runs the other way in the transpose: quantise both instead"
        )
    call = QuantizeCall(q.shape[0], q.shape[1], q.spec)
    chosen: Any = pick("quantize", backend, call, q.device).backend
    return QTensor(chosen.transpose(q.data), q.scale, q.spec)
