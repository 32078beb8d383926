"""DeepGEMM (the sgl-deep-gemm wheels): block-scaled GEMM for Hopper, the fastest at small M.

    1x128 x 128x128 -> bf16        1x128 x 1x128 -> float32 (its kernel adds into a float32 output)

It compiles a kernel per shape on first use (seconds, then cached on disk), which needs a CUDA toolkit. K is padded to a
multiple of 128 and N to one of 64. 1x128 scales are read in place if rows are contiguous and a multiple of 4; others
are transposed by a kernel of its own. `prepare` does both once for a weight. Sums move to float32 every 128 products,
so fast accumulation changes nothing here. Blackwell, which needs UE8M0 scales, is not supported.
"""

from typing import Any

import torch
from torch import Tensor

from loka.formats import E4M3, Block, QTensor, Spec
from loka.kernels.backend import Verdict, no
from loka.kernels.op import fake_of, torch_op
from loka.kernels.prepared import Laid, laid_out, with_layout
from loka.kernels.scaled_mm.call import MatmulCall
from loka.kernels.scaled_mm.layout import aligned, cut, float_scales, fp8_gpu, library, outer_major, up

OUTER_MAJOR_SCALES = True

_GROUP, _SQUARE = Block(1, 128), Block(128, 128)
_WRITES = {(_GROUP, _SQUARE): torch.bfloat16, (_GROUP, _GROUP): torch.float32}


def supports(call: MatmulCall, device: torch.device) -> Verdict:
    """Support E4M3 with the two scale pairs above, each with its one output dtype, on Hopper."""
    if not call.a.format == call.b.format == E4M3:
        return no(f"multiplies e4m3 only, not {call.a.format} @ {call.b.format}")
    writes = _WRITES.get((call.a.block, call.b.block))
    if writes is None:
        return no(f"takes 1x128 x 128x128 or 1x128 x 1x128 scales, not {call.a.block} x {call.b.block}")
    if call.out_dtype != writes:
        return no(f"writes {writes} for {call.a.block} x {call.b.block}, not {call.out_dtype}")
    return float_scales(call.a, call.b) and fp8_gpu(device, (9, 0), only=9) and library("deep_gemm", "deepgemm")


def prepare(weight: QTensor, a: Spec) -> QTensor:
    """Pad rows and columns to whole tiles; store 1x128 scales with contiguous rows."""
    return with_layout(weight, "deepgemm", a, _lay_out) if (a.block, weight.spec.block) in _WRITES else weight


def _lay_out(b: QTensor, a: Spec) -> Laid:
    n, k = b.shape
    rows = up(n, 64)
    scale = b.scale.contiguous() if b.spec.block == _SQUARE else outer_major(b.scale, rows)
    return aligned(b.data, rows, up(k, 128)), scale


def run(a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """See `loka.kernels.scaled_mm`."""
    (m, k), n = a.shape, b.shape[0]
    if m == 0 or n == 0 or k == 0:
        return a.data.new_zeros(m, n, dtype=out_dtype)
    w, scale_b = laid_out(b, "deepgemm", a.spec, _lay_out)
    out = _gemm(aligned(a.data, m, w.shape[1]), a.scale, w, scale_b, b.spec.block == _SQUARE)
    return cut(out, m, n)


@torch_op("deepgemm_scaled_mm")
def _gemm(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, square: bool) -> Tensor:
    import deep_gemm

    if square:
        out = a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)
        deep_gemm.fp8_gemm_nt((a, scale_a), (b, scale_b), out, recipe=(1, 128, 128))
        return out
    out = a.new_zeros(a.shape[0], b.shape[0], dtype=torch.float32)  # the kernel computes out += a @ b^T
    deep_gemm.fp8_gemm_nt((a, scale_a), (b, scale_b), out, c=out, recipe=(1, 1, 128))
    return out


@fake_of(_gemm)
def _(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, square: bool) -> Any:
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16 if square else torch.float32)
