"""FP8 GEMM in Triton: persistent, TMA in and out, scales of every granularity.

    out[M, N] = sum over k of  (a[m, k] * sa) * (b[n, k] * sb)

Scales that do not depend on k (tensor, row) multiply the accumulator once, at the end. Scales per 128 along K multiply
each 128-wide partial sum before it is added to a second, exact accumulator. `fast_accum=False` uses that accumulator
too, because Hopper's FP8 tensor cores accumulate with only about 14 bits. It doubles the registers, hence the narrower
tile.

A small cost model chooses the tile instead of autotuning: the choice must be the same on all ranks, in every process
and under graph capture.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.strides import cdiv
from loka.kernels.tile import tile_order
from loka.kernels.triton_compiled import describe
from loka.kernels.triton_launcher import quick

SCALAR, VECTOR, GROUPED, SQUARE = 1, 2, 3, 4
_SCALAR = tl.constexpr(1)
_VECTOR = tl.constexpr(2)
_GROUPED = tl.constexpr(3)
_SQUARE = tl.constexpr(4)


@quick
@triton.jit
def _gemm(a_desc, b_desc, c_desc, c_ptr, sa_ptr, sb_ptr, M, N, K, sa_stride, sa_stride_k, sb_stride, sb_stride_k,
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
                    part *= tl.load(sa_ptr + row * sa_stride + k * sa_stride_k, row < M, other=0.0)[:, None]
                if B_SCALE == _GROUPED:
                    part *= tl.load(sb_ptr + column * sb_stride + k * sb_stride_k, column < N, other=0.0)[None, :]
                elif B_SCALE == _SQUARE:
                    if BN <= 128:  # the tile's columns share one block
                        part *= tl.load(sb_ptr + (tile_n * BN // 128) * sb_stride + k * sb_stride_k)
                    else:
                        part *= tl.load(sb_ptr + (column // 128) * sb_stride + k * sb_stride_k, column < N, other=0.0)[
                            None, :
                        ]
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


def scale_strides(scale: Tensor) -> tuple[int, int]:
    """Return the strides of block scales; (0, 0) for row and tensor scales, which are contiguous."""
    return (scale.stride(0), scale.stride(1)) if scale.dim() == 2 else (0, 0)


def tma_ready(x: Tensor) -> Tensor:
    """Return x, or a copy if it does not start at a multiple of 16 bytes."""
    if x.data_ptr() % 16 == 0:
        return x
    rows, columns = x.shape
    return x.new_empty(rows, -(-columns // 16) * 16)[:, :columns].copy_(x)


@lru_cache(maxsize=4096)
def tile_for(m: int, n: int, processors: int, *, doubled: bool, wide_out: bool) -> tuple[int, int, int, int, int]:
    """Return the (BM, BN, warps, stages, programs per multiprocessor) that minimizes waves x time per tile.

    The time per tile is BM * BN, scaled by how well the tile feeds the tensor cores (fitted to an H200: larger tiles
    move fewer bytes per product). With two accumulators (`doubled`) two small programs share a multiprocessor: one
    promotes its partial sums while the other multiplies. A float32 result (`wide_out`) of a 256-wide tile does not fit
    into shared memory along with the pipeline.
    """
    if doubled:
        choices = [(64, 128, 4, 3, 2, 1.0), (128, 128, 8, 4, 1, 1.08), (64, 64, 4, 4, 2, 1.3)]
    else:
        choices = [(128, 128, 4, 4, 1, 1.03), (64, 128, 4, 5, 1, 1.3), (64, 64, 4, 6, 1, 1.7)]
        if not wide_out:
            choices += [(128, 256, 8, 3, 1, 1.0), (64, 256, 4, 4, 1, 1.08)]

    def cost(choice: tuple[int, int, int, int, int, float]) -> float:
        bm, bn, _, _, resident, inefficiency = choice
        tiles = cdiv(m, bm) * cdiv(n, bn)
        return cdiv(tiles, processors * resident) * resident * bm * bn * inefficiency

    return min(choices, key=cost)[:5]


@lru_cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 3 on the CPU (interpreter), so that persistent loops iterate."""
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
    tile: tuple[int, int, int, int, int] | None = None,
) -> Tensor:
    """Launch a [M, K] @ b [N, K]^T. Rows start at multiples of 16 bytes (TMA); scales are from `triton.dense_scale`."""
    m, k = a.shape
    n = b.shape[0]
    out = torch.empty(m, n, device=a.device, dtype=out_dtype)
    doubled = exact or a_source == GROUPED or b_source >= GROUPED
    count = processors(a.device)
    bm, bn, warps, stages, resident = tile or tile_for(
        m, n, count, doubled=doubled, wide_out=out_dtype == torch.float32
    )
    a, b = tma_ready(a), tma_ready(b)
    bk = 128
    tma_store = n * out.element_size() % 16 == 0
    most = count * resident  # what the kernel is compiled for, also where fewer are launched: then each has one tile
    _gemm[(min(most, cdiv(m, bm) * cdiv(n, bn)),)](
        describe(a, [bm, bk]), describe(b, [bn, bk]),
        describe(out, [bm, bn]) if tma_store else None, out, sa, sb, m, n, k,
        *scale_strides(sa), *scale_strides(sb),
        bm, bn, bk, 8, most, a_source, b_source, exact, tma_store, _TL[out_dtype],
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
