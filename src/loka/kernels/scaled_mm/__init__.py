"""scaled_mm: out = (a * scale_a) @ (b * scale_b)^T, the GEMM of two quantised operands."""

from torch import Tensor, dtype

from loka.formats import QTensor
from loka.kernels.registry import pick
from loka.kernels.scaled_mm.call import MatmulCall

__all__ = ["MatmulCall", "scaled_mm"]


def scaled_mm(a: QTensor, b: QTensor, *, out_dtype: dtype, backend: str = "auto", fast_accum: bool = False) -> Tensor:
    """Multiply a [M, K] by b [N, K] transposed, on the named backend or the first that can."""
    call = MatmulCall.of(a, b, out_dtype=out_dtype, fast_accum=fast_accum)
    chosen = pick("scaled_mm", backend, call, a.device)
    result: Tensor = chosen.backend.run(a, b, out_dtype=out_dtype, fast_accum=fast_accum)
    return result
