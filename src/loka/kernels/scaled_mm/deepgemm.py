"""DeepGEMM (the sgl-deep-gemm wheels): block-scaled GEMM for Hopper, fastest of all at small M.

    1x128 x 128x128 -> bf16        1x128 x 1x128 -> float32 (its kernel adds into a float32 output)

It compiles a kernel per shape on first use (seconds, then cached on disk) and needs a CUDA toolkit for that. Operands are padded to K a multiple
of 128 and N of 64; activation scales with contiguous rows and M a multiple of 4 are read in place, others are transposed by its own kernel.
Sums move to float32 every 128 products, so fast accumulation changes nothing here. Blackwell wants other scales (UE8M0): not done.
"""

from typing import Any

import torch
from torch import Tensor

from loka.formats import E4M3, Block, QTensor
from loka.kernels.backend import Verdict, no
from loka.kernels.scaled_mm.call import MatmulCall
from loka.kernels.scaled_mm.layout import aligned, cut, float_scales, fp8_gpu, library, up, with_ones

OUTER_MAJOR_SCALES = True

_GROUP, _SQUARE = Block(1, 128), Block(128, 128)
_WRITES = {(_GROUP, _SQUARE): torch.bfloat16, (_GROUP, _GROUP): torch.float32}


def supports(call: MatmulCall, device: torch.device) -> Verdict:
    """E4M3 with its two scale pairs, each with the one output type its kernel has, on Hopper."""
    if not call.a.format == call.b.format == E4M3:
        return no(f"multiplies e4m3 only, not {call.a.format} @ {call.b.format}")
    scales = float_scales(call.a, call.b)
    if not scales:
        return scales
    writes = _WRITES.get((call.a.block, call.b.block))
    if writes is None:
        return no(f"takes 1x128 x 128x128 or 1x128 x 1x128 scales, not {call.a.block} x {call.b.block}")
    if call.out_dtype != writes:
        return no(f"writes {writes} for {call.a.block} x {call.b.block}, not {call.out_dtype}")
    gpu = fp8_gpu(device, (9, 0), only=9)
    return library("deep_gemm", "deepgemm") if gpu else gpu


def run(a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """a [M, K] @ b [N, K]^T."""
    (m, k), n = a.shape, b.shape[0]
    if m == 0 or n == 0 or k == 0:
        return a.data.new_zeros(m, n, dtype=out_dtype)
    inner, columns = up(k, 128), up(n, 64)
    square = b.spec.block == _SQUARE
    scale_b = b.scale if square else with_ones(b.scale.t(), columns - n).t()
    out = _gemm(aligned(a.data, m, inner), a.scale, aligned(b.data, columns, inner), scale_b, square)
    return cut(out, m, n)


@torch.library.custom_op("loka::deepgemm_scaled_mm", mutates_args=())
def _gemm(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, square: bool) -> Tensor:
    import deep_gemm

    if square:
        out = a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)
        deep_gemm.fp8_gemm_nt((a, scale_a), (b, scale_b), out, recipe=(1, 128, 128))
        return out
    out = a.new_zeros(a.shape[0], b.shape[0], dtype=torch.float32)  # the kernel computes out += a @ b^T
    deep_gemm.fp8_gemm_nt((a, scale_a), (b, scale_b), out, c=out, recipe=(1, 1, 128))
    return out


@_gemm.register_fake
def _(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, square: bool) -> Any:
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16 if square else torch.float32)
