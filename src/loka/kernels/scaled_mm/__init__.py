"""scaled_mm: out = (a * scale_a) @ (b * scale_b)^T, the GEMM of two quantised operands."""

from dataclasses import replace

from torch import Tensor, dtype

from loka.formats import QTensor, Spec
from loka.kernels import registry
from loka.kernels.scaled_mm.call import GemmWay, MatmulCall
from loka.kernels.strides import aligned_rows

__all__ = ["ROWS", "GemmWay", "MatmulCall", "prepare", "scaled_mm"]

ROWS = 1024  # `auto` is asked for a batch of this size where nobody knows it; the choice hardly ever depends on it


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
    """Multiply a [M, K] by b [N, K] transposed, on the named backend; with `auto` on the preferred one, or the first that can. b may be a prepared weight.

    A bias [N] is added where the product is made by a backend that can (`adds_bias`), otherwise behind it, where a compiler joins it to what follows.
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
    """The weight [N, K] laid out for its backend, once, so that products with operands of Spec `a` do no such work (`loka.kernels.prepared`).

    The result is the same weight to every backend: should `auto` take another one for some call, that call lays the weight out itself.
    """
    if backend == "auto":
        n, k = weight.shape
        backend = registry.first("scaled_mm", MatmulCall(ROWS, k, n, a, weight.spec), weight.device).name
    return registry.prepare("scaled_mm", backend, weight, a)
