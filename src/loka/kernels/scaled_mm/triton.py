"""Our GEMM: E4M3 / E5M2 operands, tensor, row, 1x128 and (for b) 128x128 scales, exact or fast accumulation, any shape.

Scales may be stored in any order. Data is copied only if its rows do not start at multiples of 16 bytes: our own
quantizer always aligns them, the reference does not if K is not a multiple of 16, and `prepare` copies a weight once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import E4M3, E5M2, ROW, TENSOR, Block, QTensor, Spec
from loka.kernels.backend import Verdict, no
from loka.kernels.op import invoke
from loka.kernels.prepared import Laid, with_layout
from loka.kernels.scaled_mm.call import MatmulCall
from loka.kernels.triton_device import triton_runs_on

_GROUP, _SQUARE = Block(1, 128), Block(128, 128)
_SOURCES = {TENSOR: 1, ROW: 2, _GROUP: 3, _SQUARE: 4}


def supports(call: MatmulCall, device: torch.device) -> Verdict:
    """Support FP8 formats with scales that are constant along K or per 128 elements of K."""
    for spec in (call.a, call.b):
        if spec.format not in (E4M3, E5M2):
            return no(f"multiplies e4m3 and e5m2, not {spec.format}")
        if spec.scale == "e4m3":
            return no("two-level scales are not implemented here")
    if call.a.block not in (TENSOR, ROW, _GROUP):
        return no(f"a is scaled per tensor, row or 1x128, not {call.a.block}")
    if call.b.block not in _SOURCES:
        return no(f"b is scaled per tensor, row, 1x128 or 128x128, not {call.b.block}")
    return triton_runs_on(device)


def padded(q: QTensor) -> Tensor:
    """Return data as TMA requires: unit stride along K, rows at multiples of 16 bytes.

    TMA reads zeros beyond K, which add nothing to a dot product.
    """
    return _pad_rows(q.data)[:, : q.shape[1]] if _is_misaligned(q.data) else q.data


def _is_misaligned(data: Tensor) -> bool:
    return data.stride(1) != 1 or data.stride(0) % 16 != 0


def _pad_rows(data: Tensor) -> Tensor:
    return F.pad(data.contiguous().view(torch.uint8), (0, -data.shape[1] % 16)).view(data.dtype)


def dense_scale(q: QTensor) -> Tensor:
    """Return scales as the kernel reads them: tensor and row scales contiguous, block scales with any strides."""
    return q.scale if q.spec.block in (_GROUP, _SQUARE) else q.scale.contiguous()


def source(spec: Spec) -> int:
    """Return the kernel's code for the scale granularity."""
    return _SOURCES[spec.block]


def prepare(weight: QTensor, a: Spec) -> QTensor:
    """Align rows to multiples of 16 bytes; `run` sees this in the strides of `data`."""
    return with_layout(weight, "triton", a, _lay_out)


def _lay_out(b: QTensor, a: Spec) -> Laid:
    return _pad_rows(b.data) if _is_misaligned(b.data) else b.data, b.scale


def run(a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """See `loka.kernels.scaled_mm`."""
    m, k = a.shape
    n = b.shape[0]
    if m == 0 or n == 0 or k == 0:
        return a.data.new_zeros(m, n, dtype=out_dtype)
    from loka.kernels.scaled_mm import triton_ops

    scales = dense_scale(a), dense_scale(b)
    result: Tensor = invoke(
        triton_ops.scaled_mm, padded(a), padded(b), *scales, source(a.spec), source(b.spec), not fast_accum, out_dtype
    )
    return result
