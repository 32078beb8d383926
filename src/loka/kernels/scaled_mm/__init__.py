"""scaled_mm: out = (a * scale_a) @ (b * scale_b)^T, the GEMM of two quantized operands."""

from dataclasses import replace

from torch import Tensor, dtype

from loka.formats import QTensor, Spec
from loka.kernels import registry
from loka.kernels.scaled_mm.call import GemmWay, MatmulCall
from loka.kernels.strides import aligned_rows

__all__ = ["ROWS", "GemmWay", "MatmulCall", "prepare", "scaled_mm"]

ROWS = 1024  # the batch size that `auto` assumes if it is unknown; the choice hardly ever depends on it


def scaled_mm(
    a: QTensor,
    b: QTensor,
    *,
    out_dtype: dtype,
    backend: str = "auto",
    fast_accum: bool = False,
    prefer: str | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return a @ b^T for quantized a [M, K] and b [N, K].

    Args:
        a: the left operand, [M, K].
        b: the right operand, [N, K]; may be a prepared weight.
        out_dtype: bf16, fp16 or float32.
        backend: a backend of the registry, or "auto" for `prefer` if it supports the call, else the first that does.
        fast_accum: allow sums to stay in the tensor cores, in less than float32 precision.
        prefer: the backend that "auto" tries first.
        bias: [N], added in the epilogue if the backend can (`adds_bias`), else afterwards, where a compiler can fuse
            it.

    Returns:
        [M, N] in `out_dtype`.

    Example:
        >>> y = scaled_mm(quantize(x, spec), quantize(w, spec), out_dtype=torch.bfloat16)
    """
    call = MatmulCall.of(a, b, out_dtype=out_dtype, fast_accum=fast_accum)
    chosen = registry.pick("scaled_mm", backend, call, a.device, prefer=prefer)
    adds = bias is not None and (can := getattr(chosen.backend, "adds_bias", None)) is not None and can(call)
    given = {} if bias is None or not adds else {"bias": bias.to(out_dtype)}
    a, b = _aligned(a), _aligned(b)
    result: Tensor = chosen.backend.run(a, b, out_dtype=out_dtype, fast_accum=fast_accum, **given)
    return result if bias is None or adds else result + bias.to(out_dtype)


def _aligned(q: QTensor) -> QTensor:
    data = aligned_rows(q.data)
    return q if data is q.data else replace(q, data=data)


def prepare(weight: QTensor, a: Spec, *, backend: str = "auto") -> QTensor:
    """Lay a weight [N, K] out once for its backend (`loka.kernels.prepared`), so that calls need not.

    If `auto` picks a different backend for some call, that call lays the weight out itself.

    Args:
        weight: the quantized weight.
        a: the Spec of the activations it will be multiplied with.
        backend: a backend of the registry, or "auto".

    Returns:
        The same weight, accepted by every backend.

    Example:
        >>> w = prepare(quantize(weight, spec), spec)
    """
    if backend == "auto":
        n, k = weight.shape
        backend = registry.first("scaled_mm", MatmulCall(ROWS, k, n, a, weight.spec), weight.device).name
    return registry.prepare("scaled_mm", backend, weight, a)
