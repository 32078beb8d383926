"""FP8 GEMM in Triton: persistent, TMA in and out, scales of every granularity.

    out[M, N] = sum over k of  (a[m, k] * sa) * (b[n, k] * sb)

Scales that do not depend on k (tensor, row) multiply the accumulator once, at the end. Scales per 128 along K multiply each 128-wide partial sum on its way
into a second, exact accumulator; so does `fast_accum=False`, because Hopper's FP8 tensor cores keep only about 14 bits while they accumulate. The second
accumulator doubles the registers, hence the narrower tile.

The tile is chosen by a small cost model rather than by autotuning: the choice must be the same on all ranks, in every process, and under graph capture.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loka.kernels.tile import tile_order

SCALAR, VECTOR, GROUPED, SQUARE = 1, 2, 3, 4
_SCALAR = tl.constexpr(1)
_VECTOR = tl.constexpr(2)
_GROUPED = tl.constexpr(3)
_SQUARE = tl.constexpr(4)


@triton.jit
def _gemm(a_desc, b_desc, c_desc, c_ptr, sa_ptr, sb_ptr, M, N, K, sa_stride, sb_stride,
          BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, PROGRAMS: tl.constexpr,
          A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, EXACT: tl.constexpr, TMA_STORE: tl.constexpr, OUT: tl.constexpr):  # fmt: skip
    num_m, num_n, num_k = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_order(tile, num_m, num_n, GROUP_M)
        row = tile_m * BM + tl.arange(0, BM)
        column = tile_n * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(num_k):
            a = a_desc.load([tile_m * BM, k * BK])
            b = b_desc.load([tile_n * BN, k * BK])
            if A_SCALE == _GROUPED or B_SCALE >= _GROUPED:
                part = tl.dot(a, b.T)
                if A_SCALE == _GROUPED:
                    part *= tl.load(sa_ptr + row * sa_stride + k, row < M, other=0.0)[:, None]
                if B_SCALE == _GROUPED:
                    part *= tl.load(sb_ptr + column * sb_stride + k, column < N, other=0.0)[None, :]
                elif B_SCALE == _SQUARE:
                    if BN <= 128:  # the tile's columns share one block
                        part *= tl.load(sb_ptr + (tile_n * BN // 128) * sb_stride + k)
                    else:
                        part *= tl.load(sb_ptr + (column // 128) * sb_stride + k, column < N, other=0.0)[None, :]
                acc += part
            elif EXACT:
                acc = tl.dot(a, b.T, acc, max_num_imprecise_acc=BK)
            else:
                acc = tl.dot(a, b.T, acc)
        if A_SCALE == _SCALAR:
            acc *= tl.load(sa_ptr)
        elif A_SCALE == _VECTOR:
            acc *= tl.load(sa_ptr + row, row < M, other=0.0)[:, None]
        if B_SCALE == _SCALAR:
            acc *= tl.load(sb_ptr)
        elif B_SCALE == _VECTOR:
            acc *= tl.load(sb_ptr + column, column < N, other=0.0)[None, :]
        if TMA_STORE:
            c_desc.store([tile_m * BM, tile_n * BN], acc.to(OUT))
        else:
            inside = (row < M)[:, None] & (column < N)[None, :]
            tl.store(c_ptr + row.to(tl.int64)[:, None] * N + column[None, :], acc.to(OUT), inside)


@lru_cache(maxsize=4096)
def tile_for(m: int, n: int, k: int, processors: int, *, narrow: bool) -> tuple[int, int, int, int]:
    """(BM, BN, warps, stages) that minimises waves x time per tile. `narrow` forbids 256-wide tiles (two accumulators).

    Time per tile is BM * BN, scaled by how well the tile feeds the tensor cores: measured on an H200, bigger tiles move fewer bytes per product.
    """
    choices = [(128, 128, 8, 4, 1.12), (64, 128, 4, 5, 1.35), (64, 64, 4, 6, 1.8)]
    if not narrow:
        choices += [(128, 256, 8, 3, 1.0), (64, 256, 8, 4, 1.2)]

    def cost(choice: tuple[int, int, int, int, float]) -> float:
        bm, bn, _, _, inefficiency = choice
        tiles = triton.cdiv(m, bm) * triton.cdiv(n, bn)
        return triton.cdiv(tiles, processors) * bm * bn * inefficiency

    bm, bn, warps, stages, _ = min(choices, key=cost)
    return bm, bn, warps, stages


@lru_cache
def processors(device: torch.device) -> int:
    """Number of multiprocessors; on the CPU (interpreter) a few, so that the persistent loop is exercised."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


_TL = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def gemm(
    a: Tensor,
    b: Tensor,
    sa: Tensor,
    sb: Tensor,
    *,
    a_source: int,
    b_source: int,
    exact: bool,
    out_dtype: torch.dtype,
    tile: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """a [M, K] @ b [N, K]^T. K is a multiple of 16 (TMA strides); scales are contiguous float32."""
    m, k = a.shape
    n = b.shape[0]
    out = torch.empty(m, n, device=a.device, dtype=out_dtype)
    narrow = exact or a_source == GROUPED or b_source >= GROUPED
    count = processors(a.device)
    bm, bn, warps, stages = tile or tile_for(m, n, k, count, narrow=narrow)
    bk = 128
    tma_store = n * out.element_size() % 16 == 0
    programs = min(count, triton.cdiv(m, bm) * triton.cdiv(n, bn))
    _gemm[(programs,)](
        TensorDescriptor.from_tensor(a, [bm, bk]), TensorDescriptor.from_tensor(b, [bn, bk]),
        TensorDescriptor.from_tensor(out, [bm, bn]) if tma_store else None, out, sa, sb, m, n, k,
        sa.stride(0) if a_source == GROUPED else 0, sb.stride(0) if b_source >= GROUPED else 0,
        bm, bn, bk, 8, programs, a_source, b_source, exact, tma_store, _TL[out_dtype],
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
