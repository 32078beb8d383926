"""Maxima of |x| over rows, columns and the whole of x, in one read: for scales that no tile can compute alone.

Programs sweep over x together, from its beginning to its end, and each keeps the maxima of its columns in registers:

    tensor   a maximum per program, a few hundred in all. Kernels that quantize reduce them themselves (`PARTS`)
    row      a maximum per row and 128 columns
    column   a maximum per column and program that reads it

`_scales` reduces the last two and divides. There are no atomics and nothing to clear, and the result is the same in
every run. Kernels that quantize afterwards go from the end of x to its beginning: L2 still holds what was read last.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from loka.kernels.quantize.triton_pairs_kernels import larger, largest, load_pairs
from loka.kernels.scaled_mm.triton_kernels import processors
from loka.kernels.strides import Maker, alignment, cdiv, maker
from loka.kernels.tile import INTERPRETED, finite_magnitude, nan_for_inf, scale_of
from loka.kernels.triton_bound import Bound, bind
from loka.kernels.triton_launcher import quick

ROWS, COLUMNS, WARPS = 64, 128, 4  # of a chunk, and of a program
RESIDENT = 3  # programs per multiprocessor: their registers allow it, and it takes few maxima
PARTS, BLOCK = 64, 32  # maxima that a program of `_scales` reads at a time, and scales that it makes


@triton.jit
def load_rows(x_ptr, row, column, M, K, stride_x):
    """Return the elements of x at some rows and columns; 0 beyond M and K."""
    inside = (row < M)[:, None] & (column < K)[None, :]
    return tl.load(x_ptr + row[:, None] * stride_x + column[None, :], inside, other=0.0)


@triton.jit
def prepared(x, FAST: tl.constexpr):
    """Return x in float32. FAST: with NaN for Inf, so that no later step checks for special values."""
    x = x.to(tl.float32)
    return nan_for_inf(x) if FAST else x


@triton.jit
def magnitude_of(x, FAST: tl.constexpr):
    """Return |x| for an amax. FAST: Inf has been replaced by NaN, and the GPU's maximum skips NaN."""
    if FAST:
        return tl.abs(x)
    else:
        return finite_magnitude(x)


@quick
@triton.jit(do_not_specialize=["K", "sharers"])
def _maxima(x_ptr, row_ptr, column_ptr, tensor_ptr, M, K, stride_x, sharers,
            BM: tl.constexpr, BK: tl.constexpr, ALIGN: tl.constexpr,
            ROW: tl.constexpr, COLUMN: tl.constexpr, TENSOR: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Store maxima of every `sharers`-th chunk of BM rows of BK columns. The next chunk is loaded before one is used."""
    K, stride_x = K // ALIGN * ALIGN, stride_x // ALIGN * ALIGN
    wide = tl.cdiv(K, BK)
    first = tl.program_id(0) // wide
    tile_k = tl.program_id(0) % wide
    column = tile_k * BK + tl.arange(0, BK)
    within = tl.arange(0, BM).to(tl.int64)
    top = tl.zeros((BM, BK), tl.float32)
    x = load_rows(x_ptr, first * BM + within, column, M, K, stride_x)
    for chunk in range(first, tl.cdiv(M, BM), sharers):
        following = load_rows(x_ptr, (chunk + sharers) * BM + within, column, M, K, stride_x)
        magnitude = magnitude_of(prepared(x, FAST), FAST)
        if ROW:
            row = chunk * BM + within
            tl.store(row_ptr + tile_k.to(tl.int64) * M + row, tl.max(magnitude, 1), row < M)
        if COLUMN or TENSOR:
            top = tl.maximum(top, magnitude)
        x = following
    if COLUMN:
        tl.store(column_ptr + first.to(tl.int64) * K + column, tl.max(top, 0), column < K)
    if TENSOR:
        tl.store(tensor_ptr + tl.program_id(0), tl.max(top))


@quick
@triton.jit(do_not_specialize=["pairs", "sharers"])
def _maxima_of_pairs(x_ptr, row_ptr, column_ptr, tensor_ptr, M, pairs, stride_x, sharers,
                     BM: tl.constexpr, BK: tl.constexpr, ALIGN: tl.constexpr,
                     ROW: tl.constexpr, COLUMN: tl.constexpr, TENSOR: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Do the same for words of two columns, BK words wide; sizes are counted in words."""
    pairs, stride_x = pairs // ALIGN * ALIGN, stride_x // ALIGN * ALIGN
    wide = tl.cdiv(pairs, BK)
    first = tl.program_id(0) // wide
    tile_k = tl.program_id(0) % wide
    pair = tile_k * BK + tl.arange(0, BK)
    within = tl.arange(0, BM).to(tl.int64)
    top = tl.zeros((BM, BK), tl.int32)
    x = load_pairs(x_ptr, first * BM + within, pair, M, pairs, stride_x, HALF)
    for chunk in range(first, tl.cdiv(M, BM), sharers):
        following = load_pairs(x_ptr, (chunk + sharers) * BM + within, pair, M, pairs, stride_x, HALF)
        if ROW:
            row = chunk * BM + within
            even, odd = largest(x, 1, HALF)
            tl.store(row_ptr + tile_k.to(tl.int64) * M + row, tl.maximum(even, odd), row < M)
        if COLUMN or TENSOR:
            top = larger(top, x, HALF)
        x = following
    if COLUMN:
        even, odd = largest(top, 0, HALF)
        column_ptr += first.to(tl.int64) * 2 * pairs
        tl.store(column_ptr + 2 * pair, even, pair < pairs)
        tl.store(column_ptr + 2 * pair + 1, odd, pair < pairs)
    if TENSOR:
        even, odd = largest(top, None, HALF)
        tl.store(tensor_ptr + tl.program_id(0), tl.maximum(even, odd))


@triton.jit
def _reduce(part_ptr, s_ptr, parts, count, index, PARTS: tl.constexpr, BLOCK: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr):  # fmt: skip
    amax = tl.zeros((PARTS, BLOCK), tl.float32)
    for start in range(0, parts, PARTS):
        part = (start + tl.arange(0, PARTS)).to(tl.int64)
        inside = (part < parts)[:, None] & (index < count)[None, :]
        amax = tl.maximum(amax, tl.load(part_ptr + part[:, None] * count + index[None, :], inside, other=0.0))
    tl.store(s_ptr + index, scale_of(tl.max(amax, 0), E5M2, POW2), index < count)


@quick
@triton.jit
def _scales(row_ptr, s_ptr, column_ptr, st_ptr, row_parts, M, column_parts, K, PARTS: tl.constexpr, BLOCK: tl.constexpr,
            E5M2: tl.constexpr, POW2: tl.constexpr, T_E5M2: tl.constexpr, T_POW2: tl.constexpr):  # fmt: skip
    """Compute the scales of rows and of columns from maxima [parts, count]; M or K is 0 if there are none."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    above = tl.cdiv(M, BLOCK)
    if column_ptr is None:
        _reduce(row_ptr, s_ptr, row_parts, M, index, PARTS, BLOCK, E5M2, POW2)
    elif row_ptr is None:
        _reduce(column_ptr, st_ptr, column_parts, K, index, PARTS, BLOCK, T_E5M2, T_POW2)
    elif tl.program_id(0) < above:
        _reduce(row_ptr, s_ptr, row_parts, M, index, PARTS, BLOCK, E5M2, POW2)
    else:
        _reduce(column_ptr, st_ptr, column_parts, K, index - above * BLOCK, PARTS, BLOCK, T_E5M2, T_POW2)


class Maxima(NamedTuple):
    """Makers of the maxima of parts of x, None for what was not asked for, and the launch that fills them.

    Args:
        row: float32 [parts, M].
        column: float32 [parts, K].
        tensor: float32 [parts].
        sizes: how many parts each has.
        launch: takes x and the three.
    """

    row: Maker | None
    column: Maker | None
    tensor: Maker | None
    sizes: tuple[int, int, int]
    launch: Bound


def bind_maxima(m: int, k: int, stride: int, dtype: torch.dtype, device: torch.device, *, pairs: bool, row: bool, column: bool, tensor: bool) -> Maxima:  # fmt: skip
    """Return how maxima of x [M, K] are found. `pairs`: its columns can be read in pairs (`are_pairs`)."""
    wide, chunks = cdiv(k, COLUMNS), cdiv(m, ROWS)
    sharers = min(chunks, max(1, processors(device) * RESIDENT // wide))  # no second wave of few programs
    grid, align = (sharers * wide,), alignment(k, stride)

    def made(wanted: bool, *size: int) -> Maker | None:
        return maker(size, torch.float32, device) if wanted else None

    if pairs:
        launch = bind(
            _maxima_of_pairs, grid, m, k // 2, stride // 2, sharers, ROWS, COLUMNS // 2, max(align // 2, 1), row, column, tensor, dtype == torch.float16,
            views={0: torch.int32}, num_warps=WARPS,
        )  # fmt: skip
    else:
        launch = bind(_maxima, grid, m, k, stride, sharers, ROWS, COLUMNS, align, row, column, tensor, not INTERPRETED, num_warps=WARPS)  # fmt: skip
    found = made(row, wide, m), made(column, sharers, k), made(tensor, sharers * wide)
    return Maxima(*found, (wide, sharers, sharers * wide), launch)


def bind_scales(m: int, k: int, maxima: Maxima, options: tuple[bool, bool], t_options: tuple[bool, bool]) -> Bound | None:  # fmt: skip
    """Return the launch that makes the scales of rows [M] and columns [K] of which there are maxima.

    It takes the maxima of rows, their scales, the maxima of columns, and their scales. Options are (e5m2, pow2).
    """
    parts, m = (0, 0) if maxima.row is None else (maxima.sizes[0], m)
    t_parts, k = (0, 0) if maxima.column is None else (maxima.sizes[1], k)
    if not (m or k):
        return None
    return bind(_scales, (cdiv(m, BLOCK) + cdiv(k, BLOCK),), parts, m, t_parts, k, PARTS, BLOCK, *options, *t_options)


def bind_total(parts: int, e5m2: bool, pow2: bool) -> Bound:
    """Return the launch that makes the scale [] that follows from the maxima [parts] of a whole tensor.

    It takes the maxima, the scale, None and None.
    """
    return bind(_scales, (1,), parts, 1, 0, 0, 4096, 1, e5m2, pow2, False, False)
