"""Quantizers that run at the speed of a copy.

Four kernels cover every granularity:

* `_rows`   one scale per row. A row (up to 16384 wide) stays in registers between amax and cast: one read, one write.
            It can also collect the amax of the columns.
* `_tiles`  a 128-wide tile in registers; scales are computed in it (1x128, 128x128) or given (tensor, row).
* `_both`   the same from one read for the tensor and its transpose, or for the transpose alone. Transposing bytes is
            slow (33 % of copy bandwidth on an H200), so four consecutive rows are loaded as four tiles of one layout,
            their bytes packed into 32-bit words inside a thread, and words are transposed.
* `_amax`   row, column and tensor amax in one read, for scales that no tile can compute alone: dynamic `tensor`, and
            `row` of the transpose.

Bytes per element of a 16-bit x: 3 for one output, 4 for two. Dynamic `tensor` reads x twice (5, or 6). So does `row`
with any transpose: rows first, 2 + 1, then the transpose alone, 2 + 1, from the end of x to its beginning, so that it
finds in L2 what the first pass read last. Rows of the results start at multiples of 16 elements, so that TMA can read
any width without a copy, and their padding is written too, so that stores are whole vectors. Loads use vectors of the
largest power of two that divides the width.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.scaled_mm.triton_kernels import processors
from loka.kernels.strides import cdiv, empty_rows, empty_words, next_power_of_2, unit_rows
from loka.kernels.tile import (
    INTERPRETED,
    finite_magnitude,
    inverse,
    nan_for_inf,
    pack_rows,
    pack_rows_checked,
    scale_of,
    to_fp8,
)
from loka.kernels.triton_launcher import quick

GROUP = 128
# The fastest on an H200. 168 registers let three programs share a multiprocessor. Rows that are loaded in words of 8 bytes
# or less keep more, and smaller, loads in flight: up to 1.4 times as fast with many threads.
_BOTH_LAUNCH = {"num_warps": 4, "maxnreg": 168}
_BOTH_LAUNCH_UNALIGNED = {"num_warps": 16, "maxnreg": 64}
_ROWS_PROGRAMS = 5  # per multiprocessor if `_rows` collects column maxima: what its registers allow
_AMAX_TILE, _AMAX_LAUNCH = (128, 256, 16), {"num_warps": 4}  # rows, columns, rows at a time
WIDEST_ROW = 16384  # elements one program keeps in registers

# Scale granularity of an output; NOTHING: it is not written.
NOTHING = 0
SCALAR, VECTOR, GROUPED, SQUARE = 1, 2, 3, 4
_NOTHING = tl.constexpr(0)
_SCALAR = tl.constexpr(1)
_VECTOR = tl.constexpr(2)
_GROUPED = tl.constexpr(3)
_SQUARE = tl.constexpr(4)


@triton.jit
def _load_rows(x_ptr, row, column, M, K, stride_x):
    inside = (row < M)[:, None] & (column < K)[None, :]
    return tl.load(x_ptr + row[:, None] * stride_x + column[None, :], inside, other=0.0)


@triton.jit
def _magnitude(x, FAST: tl.constexpr):
    """Return |x| for an amax. FAST: Inf has been replaced by NaN, and the GPU's maximum skips NaN."""
    if FAST:
        return tl.abs(x)
    else:
        return finite_magnitude(x)


@triton.jit
def _store_rows(q_ptr, x, inv, row, column, M, K, stride_q, seed,
                E5M2: tl.constexpr, STOCHASTIC: tl.constexpr, PREROUND: tl.constexpr, CLEAN: tl.constexpr):  # fmt: skip
    noise = tl.randint(seed, row[:, None] * K + column[None, :]) if STOCHASTIC else 0
    q = to_fp8(x, inv, noise, E5M2, STOCHASTIC, PREROUND, CLEAN)
    # The padding of rows is written too, so that stores are whole vectors at any width.
    tl.store(q_ptr + row[:, None] * stride_q + column[None, :], q, (row < M)[:, None] & (column < stride_q)[None, :])


@quick
@triton.jit(do_not_specialize=["K"])
def _rows(x_ptr, q_ptr, s_ptr, c_ptr, M, K, stride_x, stride_q, seed,
          ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ALIGN: tl.constexpr, COLUMNS: tl.constexpr,
          E5M2: tl.constexpr, POW2: tl.constexpr, STOCHASTIC: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    K, stride_x = K // ALIGN * ALIGN, stride_x // ALIGN * ALIGN
    column = tl.arange(0, BLOCK)
    if COLUMNS:  # a persistent loop over rows that also collects the column maxima, stored in x's dtype
        top = tl.zeros((ROWS, BLOCK), tl.float32)
        for chunk in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
            row = (chunk * ROWS + tl.arange(0, ROWS)).to(tl.int64)
            magnitude = _row(
                x_ptr, q_ptr, s_ptr, row, column, M, K, stride_x, stride_q, seed, E5M2, POW2, STOCHASTIC, PREROUND
            )
            top = tl.maximum(top, magnitude)
        tl.store(c_ptr + tl.program_id(0).to(tl.int64) * K + column, tl.max(top, 0), column < K)
    elif WHOLE:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        _row(x_ptr, q_ptr, s_ptr, row, column, M, K, stride_x, stride_q, seed, E5M2, POW2, STOCHASTIC, PREROUND)
    else:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        amax = tl.zeros((ROWS,), tl.float32)
        for start in range(0, K, BLOCK):
            x = _load_rows(x_ptr, row, start + column, M, K, stride_x)
            amax = tl.maximum(amax, tl.max(finite_magnitude(x.to(tl.float32)), 1))
        scale = scale_of(amax, E5M2, POW2)
        inv = inverse(scale)[:, None]
        tl.store(s_ptr + row, scale, row < M)
        for start in range(0, K, BLOCK):
            x = _load_rows(x_ptr, row, start + column, M, K, stride_x).to(tl.float32)
            _store_rows(q_ptr, x, inv, row, start + column, M, K, stride_q, seed, E5M2, STOCHASTIC, PREROUND, False)


@triton.jit
def _row(x_ptr, q_ptr, s_ptr, row, column, M, K, stride_x, stride_q, seed,
         E5M2: tl.constexpr, POW2: tl.constexpr, STOCHASTIC: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """Quantize rows that stay in registers between amax and cast; return the magnitudes, 0 where not finite."""
    x = _load_rows(x_ptr, row, column, M, K, stride_x).to(tl.float32)
    magnitude = finite_magnitude(x)
    scale = scale_of(tl.max(magnitude, 1), E5M2, POW2)
    tl.store(s_ptr + row, scale, row < M)
    _store_rows(q_ptr, x, inverse(scale)[:, None], row, column, M, K, stride_q, seed, E5M2, STOCHASTIC, PREROUND, False)
    return magnitude


@quick
@triton.jit(do_not_specialize=["K"])
def _tiles(x_ptr, q_ptr, s_ptr, M, K, stride_x, stride_q, s_stride, s_stride_k, seed,
           BM: tl.constexpr, BK: tl.constexpr, ALIGN: tl.constexpr, SCALE: tl.constexpr,
           E5M2: tl.constexpr, POW2: tl.constexpr, STOCHASTIC: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    K, stride_x = K // ALIGN * ALIGN, stride_x // ALIGN * ALIGN
    wide = tl.cdiv(K, BK)
    tile_m = (tl.program_id(0) // wide).to(tl.int64)
    tile_k = (tl.program_id(0) % wide).to(tl.int64)
    row = tile_m * BM + tl.arange(0, BM)
    column = tile_k * BK + tl.arange(0, BK)
    x = _load_rows(x_ptr, row, column, M, K, stride_x).to(tl.float32)
    if SCALE == _SCALAR:
        inv = inverse(tl.load(s_ptr))
    elif SCALE == _VECTOR:
        inv = inverse(tl.load(s_ptr + row, row < M, other=1.0))[:, None]
    elif SCALE == _GROUPED:
        scale = scale_of(tl.max(finite_magnitude(x), 1), E5M2, POW2)
        tl.store(s_ptr + row * s_stride + tile_k * s_stride_k, scale, row < M)
        inv = inverse(scale)[:, None]
    else:
        scale = scale_of(tl.max(finite_magnitude(x)), E5M2, POW2)
        tl.store(s_ptr + tile_m * s_stride + tile_k * s_stride_k, scale)
        inv = inverse(scale)
    _store_rows(q_ptr, x, inv, row, column, M, K, stride_q, seed, E5M2, STOCHASTIC, PREROUND, False)


@triton.jit
def _inverses(largest, s_ptr, index, count, tile, stride, stride_k, square,
              SCALE: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr, DOWN: tl.constexpr):  # fmt: skip
    """Return the inverse scales of some rows of a tile (DOWN) or of its columns; scales made here are stored."""
    if SCALE == _SCALAR:
        return inverse(tl.load(s_ptr))
    elif SCALE == _VECTOR:
        made = inverse(tl.load(s_ptr + index, index < count, other=1.0))
        return made[:, None] if DOWN else made[None, :]
    elif SCALE == _GROUPED:
        scale = scale_of(largest, E5M2, POW2)
        tl.store(s_ptr + index * stride + tile * stride_k, scale, index < count)
        made = inverse(scale)
        return made[:, None] if DOWN else made[None, :]
    else:
        return inverse(scale_of(square, E5M2, POW2))


@triton.jit
def _noise(seed, row, column, K, STOCHASTIC: tl.constexpr):
    return tl.randint(seed + 1, row[:, None] * K + column[None, :]) if STOCHASTIC else 0


@quick
@triton.jit(do_not_specialize=["K"])
def _both(x_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, M, K, stride_x, stride_q, words, s_stride, st_stride, s_stride_k, st_stride_k, seed,
          BM: tl.constexpr, BK: tl.constexpr, ALIGN: tl.constexpr, BACKWARDS: tl.constexpr, SCALE: tl.constexpr, TSCALE: tl.constexpr,
          E5M2: tl.constexpr, POW2: tl.constexpr, STOCHASTIC: tl.constexpr,
          T_E5M2: tl.constexpr, T_POW2: tl.constexpr, T_STOCHASTIC: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    K, stride_x, words = K // ALIGN * ALIGN, stride_x // ALIGN * ALIGN, words // 4 * 4
    tile = tl.num_programs(0) - 1 - tl.program_id(0) if BACKWARDS else tl.program_id(0)
    wide = tl.cdiv(K, BK)
    tile_m = (tile // wide).to(tl.int64)
    tile_k = (tile % wide).to(tl.int64)
    word = tile_m * (BM // 4) + tl.arange(0, BM // 4)
    column = tile_k * BK + tl.arange(0, BK)
    # The common case, E4M3 rounded to nearest: once Inf is replaced by NaN, no later step checks for special values.
    FAST: tl.constexpr = not (PREROUND or STOCHASTIC or T_STOCHASTIC or E5M2 or T_E5M2)
    # A tile that makes its scales is loaded twice, the second time from L1. Keeping it in registers allowed only two
    # programs per multiprocessor, and spilled.
    RELOAD: tl.constexpr = SCALE == _GROUPED or TSCALE == _GROUPED
    # Rows 4i .. 4i + 3 in four tiles of one layout: their bytes are packed into words without leaving the thread.
    row0, row1, row2, row3 = 4 * word, 4 * word + 1, 4 * word + 2, 4 * word + 3
    x0 = _load_rows(x_ptr, row0, column, M, K, stride_x)
    x1 = _load_rows(x_ptr, row1, column, M, K, stride_x)
    x2 = _load_rows(x_ptr, row2, column, M, K, stride_x)
    x3 = _load_rows(x_ptr, row3, column, M, K, stride_x)
    per_column = tl.zeros((BK,), tl.float32)
    if TSCALE == _GROUPED:
        low, high = (
            tl.maximum(_magnitude(_prepared(x0, FAST), FAST), _magnitude(_prepared(x1, FAST), FAST)),
            tl.maximum(_magnitude(_prepared(x2, FAST), FAST), _magnitude(_prepared(x3, FAST), FAST)),
        )
        per_column = tl.max(tl.maximum(low, high), 0)
    r0 = tl.zeros((BM // 4,), tl.float32)
    r1, r2, r3 = r0, r0, r0
    if SCALE == _GROUPED or (SCALE == _SQUARE or TSCALE == _SQUARE):
        r0, r1 = tl.max(_magnitude(_prepared(x0, FAST), FAST), 1), tl.max(_magnitude(_prepared(x1, FAST), FAST), 1)
        r2, r3 = tl.max(_magnitude(_prepared(x2, FAST), FAST), 1), tl.max(_magnitude(_prepared(x3, FAST), FAST), 1)
    square = 0.0
    if SCALE == _SQUARE or TSCALE == _SQUARE:
        square = tl.max(tl.maximum(tl.maximum(r0, r1), tl.maximum(r2, r3)))
    if SCALE == _SQUARE:
        tl.store(s_ptr + tile_m * s_stride + tile_k * s_stride_k, scale_of(square, E5M2, POW2))
    if TSCALE == _SQUARE:
        tl.store(st_ptr + tile_k * st_stride + tile_m * st_stride_k, scale_of(square, T_E5M2, T_POW2))
    if SCALE != _NOTHING:
        i0 = _inverses(r0, s_ptr, row0, M, tile_k, s_stride, s_stride_k, square, SCALE, E5M2, POW2, True)
        i1 = _inverses(r1, s_ptr, row1, M, tile_k, s_stride, s_stride_k, square, SCALE, E5M2, POW2, True)
        i2 = _inverses(r2, s_ptr, row2, M, tile_k, s_stride, s_stride_k, square, SCALE, E5M2, POW2, True)
        i3 = _inverses(r3, s_ptr, row3, M, tile_k, s_stride, s_stride_k, square, SCALE, E5M2, POW2, True)
    if RELOAD:
        inv = _inverses(
            per_column, st_ptr, column, K, tile_m, st_stride, st_stride_k, square, TSCALE, T_E5M2, T_POW2, False
        )
        x0 = _load_rows(x_ptr, row0, column, M, K, stride_x)
        x1 = _load_rows(x_ptr, row1, column, M, K, stride_x)
        x2 = _load_rows(x_ptr, row2, column, M, K, stride_x)
        x3 = _load_rows(x_ptr, row3, column, M, K, stride_x)
    if SCALE != _NOTHING:
        _store_rows(
            q_ptr, _prepared(x0, FAST), i0, row0, column, M, K, stride_q, seed, E5M2, STOCHASTIC, PREROUND, FAST
        )
        _store_rows(
            q_ptr, _prepared(x1, FAST), i1, row1, column, M, K, stride_q, seed, E5M2, STOCHASTIC, PREROUND, FAST
        )
        _store_rows(
            q_ptr, _prepared(x2, FAST), i2, row2, column, M, K, stride_q, seed, E5M2, STOCHASTIC, PREROUND, FAST
        )
        _store_rows(
            q_ptr, _prepared(x3, FAST), i3, row3, column, M, K, stride_q, seed, E5M2, STOCHASTIC, PREROUND, FAST
        )
    if not RELOAD:
        inv = _inverses(
            per_column, st_ptr, column, K, tile_m, st_stride, st_stride_k, square, TSCALE, T_E5M2, T_POW2, False
        )
    if FAST:
        packed = pack_rows(
            _prepared(x0, FAST) * inv, _prepared(x1, FAST) * inv, _prepared(x2, FAST) * inv, _prepared(x3, FAST) * inv
        )
    else:
        n0, n1 = _noise(seed, row0, column, K, T_STOCHASTIC), _noise(seed, row1, column, K, T_STOCHASTIC)
        n2, n3 = _noise(seed, row2, column, K, T_STOCHASTIC), _noise(seed, row3, column, K, T_STOCHASTIC)
        packed = pack_rows_checked(
            _prepared(x0, FAST), _prepared(x1, FAST), _prepared(x2, FAST), _prepared(x3, FAST),
            inv, n0, n1, n2, n3, T_E5M2, T_STOCHASTIC, PREROUND,
        )  # fmt: skip
    there = (column < K)[:, None] & (word < words)[None, :]
    tl.store(qt_ptr + column[:, None] * words + word[None, :], tl.trans(packed), there)


@triton.jit
def _prepared(x, FAST: tl.constexpr):
    x = x.to(tl.float32)
    return nan_for_inf(x) if FAST else x


@quick
@triton.jit(do_not_specialize=["K"])
def _turn(x_ptr, t_ptr, M, K, stride_x, words, BM: tl.constexpr, BK: tl.constexpr, ALIGN: tl.constexpr):
    """Transpose bytes [M, K] to [K, M], four rows packed into words as in `_both`."""
    K, stride_x, words = K // ALIGN * ALIGN, stride_x // ALIGN * ALIGN, words // 4 * 4
    wide = tl.cdiv(K, BK)
    word = (tl.program_id(0) // wide).to(tl.int64) * (BM // 4) + tl.arange(0, BM // 4)
    column = (tl.program_id(0) % wide).to(tl.int64) * BK + tl.arange(0, BK)
    packed = tl.zeros((BM // 4, BK), tl.int32)
    for byte in tl.static_range(4):
        row = 4 * word + byte
        inside = (row < M)[:, None] & (column < K)[None, :]
        x = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], inside, other=0)
        packed |= x.to(tl.int32) << (8 * byte)
    there = (column < K)[:, None] & (word < words)[None, :]
    tl.store(t_ptr + column[:, None] * words + word[None, :], tl.trans(packed), there)


@quick
@triton.jit(do_not_specialize=["K"])
def _amax(x_ptr, row_ptr, column_ptr, tensor_ptr, M, K, stride_x,
          BM: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr,
          ROW: tl.constexpr, COLUMN: tl.constexpr, TENSOR: tl.constexpr):  # fmt: skip
    """Store the maxima of a tile, one partial result per tile: no atomics, nothing to clear, deterministic.

    Column maxima are kept per element over chunks of ROWS rows and reduced once, at the end; reducing every chunk took
    half of the time.
    """
    K, stride_x = K // ALIGN * ALIGN, stride_x // ALIGN * ALIGN
    wide = tl.cdiv(K, BK)
    tile_m = (tl.program_id(0) // wide).to(tl.int64)
    tile_k = (tl.program_id(0) % wide).to(tl.int64)
    column = tile_k * BK + tl.arange(0, BK)
    top = tl.zeros((ROWS, BK), tl.float32)
    for start in range(0, BM, ROWS):
        row = tile_m * BM + start + tl.arange(0, ROWS)
        magnitude = finite_magnitude(_load_rows(x_ptr, row, column, M, K, stride_x).to(tl.float32))
        if ROW:
            tl.store(row_ptr + tile_k * M + row, tl.max(magnitude, 1), row < M)
        if COLUMN or TENSOR:
            top = tl.maximum(top, magnitude)
    if COLUMN:
        tl.store(column_ptr + tile_m * K + column, tl.max(top, 0), column < K)
    if TENSOR:
        tl.store(tensor_ptr + tl.program_id(0), tl.max(top))


@quick
@triton.jit
def _scales(
    partial_ptr, s_ptr, parts, count, PARTS: tl.constexpr, BLOCK: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr
):
    """Compute scales from partial maxima [parts, count]."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.zeros((PARTS, BLOCK), tl.float32)
    for start in range(0, parts, PARTS):
        part = (start + tl.arange(0, PARTS)).to(tl.int64)
        inside = (part < parts)[:, None] & (index < count)[None, :]
        some = tl.load(partial_ptr + part[:, None] * count + index[None, :], inside, other=0.0)
        amax = tl.maximum(amax, some.to(tl.float32))
    tl.store(s_ptr + index, scale_of(tl.max(amax, 0), E5M2, POW2), index < count)


def aligned(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized [rows, columns] whose rows start at multiples of 16 elements, as TMA requires for FP8."""
    return empty_rows(rows, columns, 16, dtype, device)


def block_scales(rows: int, columns: int, source: int, device: torch.device) -> Tensor:
    """Return uninitialized scales of 1x128 (contiguous along rows, as GEMMs with TMA read them) or 128x128 blocks."""
    wide = cdiv(columns, GROUP)
    if source == GROUPED:
        return torch.empty(wide, rows, device=device, dtype=torch.float32).T
    return torch.empty(cdiv(rows, GROUP), wide, device=device, dtype=torch.float32)


def _strides(scale: Tensor | None) -> tuple[int, int]:
    return (scale.stride(0), scale.stride(1)) if scale is not None and scale.dim() == 2 else (0, 0)


def _fp8(e5m2: bool) -> torch.dtype:
    return torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn


def alignment(*operands: Tensor | None) -> int:
    """Return the power of two, at most 16, that divides the width and row stride of every operand.

    Without it the compiler moves one element at a time if the width is not a multiple of 16, at a fifth of the speed.
    """
    return math.gcd(16, *(n for x in operands if x is not None for n in (x.shape[1], x.stride(0))))


def quantize_rows(x: Tensor, *, e5m2: bool, pow2: bool, stochastic: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Quantize with per-row scales; x [M, K] has unit stride along K."""
    return _launch_rows(x, None, e5m2=e5m2, pow2=pow2, stochastic=stochastic, seed=seed)


def quantize_rows_and_columns(
    x: Tensor, *, e5m2: bool, pow2: bool, stochastic: bool, seed: int, t_e5m2: bool, t_pow2: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize with per-row scales, and compute column scales for the transpose from the same read.

    Returns q, its scales [M, 1] and the column scales [K]. Rows have up to WIDEST_ROW columns.
    """
    m, k = x.shape
    programs = min(processors(x.device) * _ROWS_PROGRAMS, cdiv(max(m, 1), _rows_at_a_time(k)))
    tops = torch.empty(programs, k, device=x.device, dtype=x.dtype)
    q, scale = _launch_rows(x, tops, e5m2=e5m2, pow2=pow2, stochastic=stochastic, seed=seed)
    columns = _empty_scales(k, m and k, x.device)
    if m and k:
        _scales[(cdiv(k, 32),)](tops, columns, programs, k, 256, 32, t_e5m2, t_pow2)
    return q, scale, columns


def _rows_at_a_time(k: int) -> int:
    return max(1, min(32, 4096 // next_power_of_2(max(k, 1))))


def _launch_rows(
    x: Tensor, tops: Tensor | None, *, e5m2: bool, pow2: bool, stochastic: bool, seed: int
) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    q = aligned(m, k, _fp8(e5m2), x.device)
    scale = torch.empty(m, 1, device=x.device, dtype=torch.float32)
    if m == 0 or k == 0:
        return q, scale.fill_(1.0)
    whole = k <= WIDEST_ROW
    block = next_power_of_2(k) if whole else 4096
    rows = _rows_at_a_time(k) if whole else 1
    programs = cdiv(m, rows) if tops is None else tops.shape[0]
    _rows[(programs,)](
        x, q, scale, tops, m, k, x.stride(0), q.stride(0), seed,
        rows, block, whole, alignment(x), tops is not None,
        e5m2, pow2, stochastic, INTERPRETED, num_warps=4 if block * rows <= 4096 else 8,
    )  # fmt: skip
    return q, scale


def global_scales(
    x: Tensor, *, row: bool, column: bool, tensor: bool, options: list[tuple[bool, bool]]
) -> list[Tensor]:
    """Return the requested scales that need all of x, from one read: per row [M], per column [K], of the tensor [1].

    `options` holds (e5m2, pow2) for each requested scale, in that order.
    """
    m, k = x.shape
    bm, bk, rows = _AMAX_TILE
    high, wide = cdiv(m, bm), cdiv(k, bk)
    sizes = [(wide, m) if row else None, (high, k) if column else None, (high * wide, 1) if tensor else None]
    partial = [None if size is None else torch.empty(size, device=x.device, dtype=torch.float32) for size in sizes]
    if m and k:
        _amax[(high * wide,)](
            x, *partial, m, k, x.stride(0), bm, bk, rows, alignment(x), row, column, tensor, **_AMAX_LAUNCH
        )
    scales = []
    for part, (e5m2, pow2) in zip([part for part in partial if part is not None], options, strict=True):
        count = part.shape[1]
        scale = _empty_scales(count, m and k, x.device)
        if m and k:
            block = 64 if count > 1 else 1
            parts = 64 if count > 1 else 4096
            _scales[(cdiv(count, block),)](part, scale, part.shape[0], count, parts, block, e5m2, pow2)
        scales.append(scale)
    return scales


def _empty_scales(count: int, elements: int, device: torch.device) -> Tensor:
    """Return uninitialized scales for a kernel to fill; ones if x is empty and no kernel runs."""
    return (torch.empty if elements else torch.ones)(count, device=device, dtype=torch.float32)


def quantize_tiles(
    x: Tensor, *, source: int, scale: Tensor | None, e5m2: bool, pow2: bool, stochastic: bool, seed: int
) -> tuple[Tensor, Tensor]:
    """Quantize x [M, K] by tiles, with scales that are given or made in the tile."""
    m, k = x.shape
    wide = cdiv(k, GROUP)
    q = aligned(m, k, _fp8(e5m2), x.device)
    if scale is None:
        scale = block_scales(m, k, source, x.device)
    if m and k:
        bm = GROUP if source == SQUARE else 32  # shallow tiles keep more loads in flight
        _tiles[(cdiv(m, bm) * wide,)](
            x, q, scale, m, k, x.stride(0), q.stride(0), *_strides(scale), seed,
            bm, GROUP, alignment(x), source, e5m2, pow2, stochastic, INTERPRETED, num_warps=4 if bm == 32 else 8,
        )  # fmt: skip
    return q, scale


def quantize_both(
    x: Tensor,
    *,
    source: int,
    scale: Tensor | None,
    e5m2: bool,
    pow2: bool,
    stochastic: bool,
    t_source: int,
    t_scale: Tensor | None,
    t_e5m2: bool,
    t_pow2: bool,
    t_stochastic: bool,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q [M, K], the transpose qt [K, M], and their scales, from one read of x."""
    m, k = x.shape
    q = aligned(m, k, _fp8(e5m2), x.device)
    scale = block_scales(m, k, source, x.device) if scale is None else scale
    qt, t_scale = _launch_both(
        x, q, scale, source, (e5m2, pow2, stochastic), t_scale, t_source, (t_e5m2, t_pow2, t_stochastic), seed
    )
    return q, scale, qt, t_scale


def quantize_transposed(
    x: Tensor, *, source: int, scale: Tensor | None, e5m2: bool, pow2: bool, stochastic: bool, seed: int, backwards: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the transpose qt [K, M] alone, and its scales.

    `backwards` goes from the last tile to the first, for an x that was just read: its end is still in L2.
    """
    none = None, None, NOTHING, (False, False, False)
    return _launch_both(x, *none, scale, source, (e5m2, pow2, stochastic), seed, backwards=backwards)


def _launch_both(
    x: Tensor, q: Tensor | None, scale: Tensor | None, source: int, options: tuple[bool, bool, bool],
    t_scale: Tensor | None, t_source: int, t_options: tuple[bool, bool, bool], seed: int, *, backwards: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch `_both`, which writes q unless its source is NOTHING; options are (e5m2, pow2, stochastic)."""
    m, k = x.shape
    qt, words = empty_words(k, m, _fp8(t_options[0]), x.device)
    t_scale = block_scales(k, m, t_source, x.device) if t_scale is None else t_scale
    if m and k:
        strides = [stride for pair in zip(_strides(scale), _strides(t_scale), strict=True) for stride in pair]
        align = alignment(x)
        launch = _BOTH_LAUNCH if align >= 8 else _BOTH_LAUNCH_UNALIGNED
        _both[(cdiv(m, GROUP) * cdiv(k, GROUP),)](
            x, q, scale, words, t_scale, m, k, x.stride(0), 0 if q is None else q.stride(0), words.shape[1], *strides, seed, GROUP, GROUP, align, backwards, source, t_source,
            *options, *t_options, INTERPRETED, **launch,
        )  # fmt: skip
    return qt, t_scale


def transpose(x: Tensor) -> Tensor:
    """Return one-byte data [M, K] as [K, M], contiguous along M."""
    m, k = x.shape
    x = unit_rows(x)
    x_t, words = empty_words(k, m, x.dtype, x.device)
    if m and k:
        _turn[(cdiv(m, GROUP) * cdiv(k, GROUP),)](
            x.view(torch.uint8), words, m, k, x.stride(0), words.shape[1],
            GROUP, GROUP, alignment(x), num_warps=4,
        )  # fmt: skip
    return x_t
