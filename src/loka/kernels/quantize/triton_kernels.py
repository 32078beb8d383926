"""Quantizers that run at the speed of a copy.

Three kernels cover every granularity:

* `_rows`   one scale per row. A row (up to 16384 wide) stays in registers between amax and cast: one read, one write.
* `_tiles`  a 128-wide tile in registers; scales are computed in it (1x128, 128x128), given (tensor, row), or follow
            from maxima of parts of x (dynamic tensor).
* `_both`   the same from one read for the tensor and its transpose, or for the transpose alone. Transposing bytes is
            slow (33 % of copy bandwidth on an H200), so four consecutive rows are loaded as four tiles of one layout,
            their bytes packed into 32-bit words inside a thread, and words are transposed.

Scales that no tile can compute alone, a dynamic `tensor` and a dynamic `row` of a matrix or its transpose, need the
maxima of `triton_maxima_kernels`, a read of x of its own. Bytes per element of a 16-bit x: 3 for one output, 4 for two,
and 2 more with maxima. Rows of the results start at multiples of 16 elements, so that TMA can read any width without a
copy, and their padding is written too, so that stores are whole vectors. Loads use vectors of the largest power of two
that divides the width.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.quantize.triton_maxima_kernels import load_rows, magnitude_of, prepared
from loka.kernels.strides import Maker, alignment, cdiv, empty_rows, empty_words, maker, next_power_of_2, unit_rows
from loka.kernels.tile import INTERPRETED, finite_magnitude, inverse, pack_rows, pack_rows_checked, scale_of, to_fp8
from loka.kernels.triton_bound import Bound, bind
from loka.kernels.triton_launcher import quick

GROUP = 128
# The fastest on an H200. Rows that are loaded in words of 8 bytes or less keep more, and smaller, loads in flight: up to
# 1.4 times as fast with many threads.
_BOTH_LAUNCH = {"num_warps": 8, "maxnreg": 128}
_BOTH_LAUNCH_UNALIGNED = {"num_warps": 16, "maxnreg": 64}
WIDEST_ROW = 16384  # elements one program keeps in registers

# Scale granularity of an output; NOTHING: it is not written. PARTS: one scale, from the maxima of parts of x.
NOTHING = 0
SCALAR, VECTOR, GROUPED, SQUARE, PARTS = 1, 2, 3, 4, 5
_NOTHING = tl.constexpr(0)
_SCALAR = tl.constexpr(1)
_VECTOR = tl.constexpr(2)
_GROUPED = tl.constexpr(3)
_SQUARE = tl.constexpr(4)
_PARTS = tl.constexpr(5)


@triton.jit
def _store_rows(q_ptr, x, inv, row, column, M, K, stride_q, seed,
                E5M2: tl.constexpr, STOCHASTIC: tl.constexpr, PREROUND: tl.constexpr, CLEAN: tl.constexpr):  # fmt: skip
    noise = tl.randint(seed, row[:, None] * K + column[None, :]) if STOCHASTIC else 0
    q = to_fp8(x, inv, noise, E5M2, STOCHASTIC, PREROUND, CLEAN)
    # The padding of rows is written too, so that stores are whole vectors at any width.
    tl.store(q_ptr + row[:, None] * stride_q + column[None, :], q, (row < M)[:, None] & (column < stride_q)[None, :])


@quick
@triton.jit(do_not_specialize=["K"])
def _rows(x_ptr, q_ptr, s_ptr, M, K, stride_x, stride_q, seed,
          ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ALIGN: tl.constexpr,
          E5M2: tl.constexpr, POW2: tl.constexpr, STOCHASTIC: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    K, stride_x = K // ALIGN * ALIGN, stride_x // ALIGN * ALIGN
    column = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if WHOLE:  # rows stay in registers between amax and cast
        x = load_rows(x_ptr, row, column, M, K, stride_x).to(tl.float32)
        scale = scale_of(tl.max(finite_magnitude(x), 1), E5M2, POW2)
        tl.store(s_ptr + row, scale, row < M)
        inv = inverse(scale)[:, None]
        _store_rows(q_ptr, x, inv, row, column, M, K, stride_q, seed, E5M2, STOCHASTIC, PREROUND, False)
    else:
        amax = tl.zeros((ROWS,), tl.float32)
        for start in range(0, K, BLOCK):
            x = load_rows(x_ptr, row, start + column, M, K, stride_x)
            amax = tl.maximum(amax, tl.max(finite_magnitude(x.to(tl.float32)), 1))
        scale = scale_of(amax, E5M2, POW2)
        inv = inverse(scale)[:, None]
        tl.store(s_ptr + row, scale, row < M)
        for start in range(0, K, BLOCK):
            x = load_rows(x_ptr, row, start + column, M, K, stride_x).to(tl.float32)
            _store_rows(q_ptr, x, inv, row, start + column, M, K, stride_q, seed, E5M2, STOCHASTIC, PREROUND, False)


@triton.jit
def _scale_of_parts(part_ptr, parts, s_ptr, first, COUNT: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr):
    """Return the scale of the whole tensor from the maxima of its parts; the `first` program stores it.

    Every program reads all maxima, a few hundred that L2 holds, which takes less time than another launch.
    """
    part = tl.arange(0, COUNT)
    scale = scale_of(tl.max(tl.load(part_ptr + part, part < parts, other=0.0)), E5M2, POW2)
    tl.store(s_ptr, scale, first)
    return scale


@quick
@triton.jit(do_not_specialize=["K"])
def _tiles(x_ptr, q_ptr, s_ptr, part_ptr, M, K, stride_x, stride_q, s_stride, s_stride_k, parts, seed,
           BM: tl.constexpr, BK: tl.constexpr, ALIGN: tl.constexpr, COUNT: tl.constexpr, SCALE: tl.constexpr,
           E5M2: tl.constexpr, POW2: tl.constexpr, STOCHASTIC: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    K, stride_x = K // ALIGN * ALIGN, stride_x // ALIGN * ALIGN
    wide = tl.cdiv(K, BK)
    tile = tl.num_programs(0) - 1 - tl.program_id(0) if SCALE == _PARTS else tl.program_id(0)
    tile_m = (tile // wide).to(tl.int64)
    tile_k = (tile % wide).to(tl.int64)
    row = tile_m * BM + tl.arange(0, BM)
    column = tile_k * BK + tl.arange(0, BK)
    x = load_rows(x_ptr, row, column, M, K, stride_x).to(tl.float32)
    if SCALE == _SCALAR:
        inv = inverse(tl.load(s_ptr))
    elif SCALE == _PARTS:
        inv = inverse(_scale_of_parts(part_ptr, parts, s_ptr, tl.program_id(0) == 0, COUNT, E5M2, POW2))
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
def _inverses(largest, s_ptr, index, count, tile, stride, stride_k, total,
              SCALE: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr, DOWN: tl.constexpr):  # fmt: skip
    """Return the inverse scales of some rows of a tile (DOWN) or of its columns; scales made here are stored.

    `total` is the amax of the tile (SQUARE) or the scale of the tensor (PARTS).
    """
    if SCALE == _SCALAR:
        return inverse(tl.load(s_ptr))
    elif SCALE == _PARTS:
        return inverse(total)
    elif SCALE == _VECTOR:
        made = inverse(tl.load(s_ptr + index, index < count, other=1.0))
        return made[:, None] if DOWN else made[None, :]
    elif SCALE == _GROUPED:
        scale = scale_of(largest, E5M2, POW2)
        tl.store(s_ptr + index * stride + tile * stride_k, scale, index < count)
        made = inverse(scale)
        return made[:, None] if DOWN else made[None, :]
    else:
        return inverse(scale_of(total, E5M2, POW2))


@triton.jit
def _noise(seed, row, column, K, STOCHASTIC: tl.constexpr):
    return tl.randint(seed + 1, row[:, None] * K + column[None, :]) if STOCHASTIC else 0


@quick
@triton.jit(do_not_specialize=["K"])
def _both(x_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, part_ptr, M, K, stride_x, stride_q, words, s_stride, st_stride, s_stride_k, st_stride_k, parts, seed,
          BM: tl.constexpr, BK: tl.constexpr, ALIGN: tl.constexpr, COUNT: tl.constexpr, BACKWARDS: tl.constexpr, SCALE: tl.constexpr, TSCALE: tl.constexpr,
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
    x0 = load_rows(x_ptr, row0, column, M, K, stride_x)
    x1 = load_rows(x_ptr, row1, column, M, K, stride_x)
    x2 = load_rows(x_ptr, row2, column, M, K, stride_x)
    x3 = load_rows(x_ptr, row3, column, M, K, stride_x)
    per_column = tl.zeros((BK,), tl.float32)
    if TSCALE == _GROUPED:
        low, high = (
            tl.maximum(magnitude_of(prepared(x0, FAST), FAST), magnitude_of(prepared(x1, FAST), FAST)),
            tl.maximum(magnitude_of(prepared(x2, FAST), FAST), magnitude_of(prepared(x3, FAST), FAST)),
        )
        per_column = tl.max(tl.maximum(low, high), 0)
    r0 = tl.zeros((BM // 4,), tl.float32)
    r1, r2, r3 = r0, r0, r0
    if SCALE == _GROUPED or (SCALE == _SQUARE or TSCALE == _SQUARE):
        r0, r1 = tl.max(magnitude_of(prepared(x0, FAST), FAST), 1), tl.max(magnitude_of(prepared(x1, FAST), FAST), 1)
        r2, r3 = tl.max(magnitude_of(prepared(x2, FAST), FAST), 1), tl.max(magnitude_of(prepared(x3, FAST), FAST), 1)
    square = 0.0
    if SCALE == _SQUARE or TSCALE == _SQUARE:
        square = tl.max(tl.maximum(tl.maximum(r0, r1), tl.maximum(r2, r3)))
    if SCALE == _SQUARE:
        tl.store(s_ptr + tile_m * s_stride + tile_k * s_stride_k, scale_of(square, E5M2, POW2))
    if TSCALE == _SQUARE:
        tl.store(st_ptr + tile_k * st_stride + tile_m * st_stride_k, scale_of(square, T_E5M2, T_POW2))
    total, t_total = square, square
    if SCALE == _PARTS:
        total = _scale_of_parts(part_ptr, parts, s_ptr, tile == 0, COUNT, E5M2, POW2)
    if TSCALE == _PARTS:
        t_total = _scale_of_parts(part_ptr, parts, st_ptr, tile == 0, COUNT, T_E5M2, T_POW2)
    if SCALE != _NOTHING:
        i0 = _inverses(r0, s_ptr, row0, M, tile_k, s_stride, s_stride_k, total, SCALE, E5M2, POW2, True)
        i1 = _inverses(r1, s_ptr, row1, M, tile_k, s_stride, s_stride_k, total, SCALE, E5M2, POW2, True)
        i2 = _inverses(r2, s_ptr, row2, M, tile_k, s_stride, s_stride_k, total, SCALE, E5M2, POW2, True)
        i3 = _inverses(r3, s_ptr, row3, M, tile_k, s_stride, s_stride_k, total, SCALE, E5M2, POW2, True)
    if RELOAD:
        inv = _inverses(
            per_column, st_ptr, column, K, tile_m, st_stride, st_stride_k, t_total, TSCALE, T_E5M2, T_POW2, False
        )
        x0 = load_rows(x_ptr, row0, column, M, K, stride_x)
        x1 = load_rows(x_ptr, row1, column, M, K, stride_x)
        x2 = load_rows(x_ptr, row2, column, M, K, stride_x)
        x3 = load_rows(x_ptr, row3, column, M, K, stride_x)
    if SCALE != _NOTHING:
        _store_rows(q_ptr, prepared(x0, FAST), i0, row0, column, M, K, stride_q, seed, E5M2, STOCHASTIC, PREROUND, FAST)
        _store_rows(q_ptr, prepared(x1, FAST), i1, row1, column, M, K, stride_q, seed, E5M2, STOCHASTIC, PREROUND, FAST)
        _store_rows(q_ptr, prepared(x2, FAST), i2, row2, column, M, K, stride_q, seed, E5M2, STOCHASTIC, PREROUND, FAST)
        _store_rows(q_ptr, prepared(x3, FAST), i3, row3, column, M, K, stride_q, seed, E5M2, STOCHASTIC, PREROUND, FAST)
    if not RELOAD:
        inv = _inverses(
            per_column, st_ptr, column, K, tile_m, st_stride, st_stride_k, t_total, TSCALE, T_E5M2, T_POW2, False
        )
    if FAST:
        packed = pack_rows(
            prepared(x0, FAST) * inv, prepared(x1, FAST) * inv, prepared(x2, FAST) * inv, prepared(x3, FAST) * inv
        )
    else:
        n0, n1 = _noise(seed, row0, column, K, T_STOCHASTIC), _noise(seed, row1, column, K, T_STOCHASTIC)
        n2, n3 = _noise(seed, row2, column, K, T_STOCHASTIC), _noise(seed, row3, column, K, T_STOCHASTIC)
        packed = pack_rows_checked(
            prepared(x0, FAST), prepared(x1, FAST), prepared(x2, FAST), prepared(x3, FAST),
            inv, n0, n1, n2, n3, T_E5M2, T_STOCHASTIC, PREROUND,
        )  # fmt: skip
    there = (column < K)[:, None] & (word < words)[None, :]
    tl.store(qt_ptr + column[:, None] * words + word[None, :], tl.trans(packed), there)


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


def aligned(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized [rows, columns] whose rows start at multiples of 16 elements, as TMA requires for FP8."""
    return empty_rows(rows, columns, 16, dtype, device)


def block_scales(rows: int, columns: int, source: int, device: torch.device) -> Tensor:
    """Return uninitialized scales of 1x128 (contiguous along rows, as GEMMs with TMA read them) or 128x128 blocks."""
    wide = cdiv(columns, GROUP)
    if source == GROUPED:
        return torch.empty(wide, rows, device=device, dtype=torch.float32).T
    return torch.empty(cdiv(rows, GROUP), wide, device=device, dtype=torch.float32)


def scales_maker(rows: int, columns: int, source: int, device: torch.device) -> Maker:
    """Return a maker of what `block_scales` returns."""
    wide = cdiv(columns, GROUP)
    if source == GROUPED:
        return maker((rows, wide), torch.float32, device, (1, max(rows, 1)))
    return maker((cdiv(rows, GROUP), wide), torch.float32, device)


class Output(NamedTuple):
    """How an output is written.

    Args:
        source: granularity of its scales: SCALAR, VECTOR, GROUPED, SQUARE or PARTS.
        e5m2: the format is E5M2 instead of E4M3.
        pow2: scales are powers of two.
        stochastic: rounded stochastically.
    """

    source: int
    e5m2: bool
    pow2: bool
    stochastic: bool

    def strides(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the strides of the scales of a [rows, columns] output, if they are per block."""
        return (1, rows) if self.source == GROUPED else (cdiv(columns, GROUP), 1) if self.source == SQUARE else (0, 0)


UNWANTED = Output(NOTHING, False, False, False)


def bind_rows(m: int, k: int, stride: int, wide: int, out: Output, seed: int) -> Bound:
    """Return the launch that takes x [M, K] and fills q, whose rows are `wide`, and its dynamic scales per row."""
    whole = k <= WIDEST_ROW
    block = next_power_of_2(k) if whole else 4096
    rows = max(1, min(32, 4096 // block)) if whole else 1
    return bind(
        _rows, (cdiv(m, rows),), m, k, stride, wide, seed, rows, block, whole, alignment(k, stride), *out[1:], INTERPRETED,
        num_warps=4 if block * rows <= 4096 else 8,
    )  # fmt: skip


def bind_tiles(m: int, k: int, stride: int, wide: int, out: Output, parts: int, seed: int) -> Bound:
    """Return the launch that takes x [M, K] and fills q; it also takes scales, and the maxima of parts of x (PARTS)."""
    bm = GROUP if out.source == SQUARE else 32  # shallow tiles keep more loads in flight
    return bind(
        _tiles, (cdiv(m, bm) * cdiv(k, GROUP),), m, k, stride, wide, *out.strides(m, k), parts, seed,
        bm, GROUP, alignment(k, stride), _read(parts), *out, INTERPRETED, num_warps=4 if bm == 32 else 8,
    )  # fmt: skip


def bind_both(
    m: int, k: int, stride: int, wide: int, words: int, out: Output, transposed: Output, parts: int, seed: int, *, backwards: bool
) -> Bound:  # fmt: skip
    """Return the launch that takes x [M, K] and fills q, unless it is UNWANTED, and the transpose from one read of x.

    It takes x, q, its scales, the transpose (`words` of four bytes wide), its scales, and the maxima of parts of x.
    `backwards` goes from the last tile to the first, for an x that was just read: its end is still in L2.
    """
    (s_stride, s_stride_k), (st_stride, st_stride_k) = out.strides(m, k), transposed.strides(k, m)
    align = alignment(k, stride)
    return bind(
        _both, (cdiv(m, GROUP) * cdiv(k, GROUP),),
        m, k, stride, wide if out.source != NOTHING else 0, words, s_stride, st_stride, s_stride_k, st_stride_k, parts, seed,
        GROUP, GROUP, align, _read(parts), backwards, out.source, transposed.source, *out[1:], *transposed[1:], INTERPRETED,
        views={3: torch.int32}, **(_BOTH_LAUNCH if align >= 8 else _BOTH_LAUNCH_UNALIGNED),
    )  # fmt: skip


def _read(parts: int) -> int:
    """Return how many of the maxima a program reads: mostly the same power of two, to compile it once."""
    return max(512, next_power_of_2(parts)) if parts else 0


def transpose(x: Tensor) -> Tensor:
    """Return one-byte data [M, K] as [K, M], contiguous along M."""
    m, k = x.shape
    x = unit_rows(x)
    x_t, words = empty_words(k, m, x.dtype, x.device)
    if m and k:
        _turn[(cdiv(m, GROUP) * cdiv(k, GROUP),)](
            x.view(torch.uint8), words, m, k, x.stride(0), words.shape[1],
            GROUP, GROUP, alignment(k, x.stride(0)), num_warps=4,
        )  # fmt: skip
    return x_t
