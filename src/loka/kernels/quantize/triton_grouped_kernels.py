"""A 16-bit matrix and its transpose to E4M3 with a scale per 1x128 of each, from one read.

Both need the maxima of a tile of 128 x 128 before its first element can be written, so the tile waits in registers. It
is loaded as words of two columns (`triton_pairs_kernels`), which are taken apart twice, for q and for its transpose: keeping
the parts spilled. As in `_both` of `triton_kernels`, four consecutive rows are four tiles of one layout.
"""

import torch
import triton
import triton.language as tl

from loka.kernels.quantize.triton_pairs_kernels import apart, larger, largest, load_pairs
from loka.kernels.strides import alignment, cdiv
from loka.kernels.tile import INTERPRETED, inverse, pack_rows, pack_rows_checked, scale_of, to_fp8
from loka.kernels.triton_bound import Bound, bind
from loka.kernels.triton_launcher import quick

_TILE = 128
_LAUNCH = {"num_warps": 4, "maxnreg": 168}


@triton.jit
def _again(words, PREROUND: tl.constexpr):
    """Return words that the compiler takes for others, so that it keeps them and not the parts taken from them."""
    if PREROUND:
        return words
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _store_pairs(q_ptr, words, inv, row, pair, rows, stride, filled, HALF: tl.constexpr, PREROUND: tl.constexpr):
    """Cast words and store them, two bytes each. The padding of rows is written too."""
    low, high = apart(words, HALF)
    if PREROUND:
        first = to_fp8(low, inv, 0, False, False, True).to(tl.uint8, bitcast=True).to(tl.int32)
        second = to_fp8(high, inv, 0, False, False, True).to(tl.uint8, bitcast=True).to(tl.int32)
        q = (first | (second << 8)).to(tl.int16)
    else:
        q = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low * inv, high * inv], dtype=tl.int16, is_pure=True, pack=1,
        )  # fmt: skip
    tl.store(q_ptr + row[:, None] * stride + pair[None, :], q, (row < rows)[:, None] & (pair < filled)[None, :])


@triton.jit
def _store_words(qt_ptr, x0, x1, x2, x3, inv, column, word, columns, high, stride, PREROUND: tl.constexpr):
    """Cast four rows, pack them into words, and store the words transposed."""
    if PREROUND:
        packed = pack_rows_checked(x0, x1, x2, x3, inv, 0, 0, 0, 0, False, False, True)
    else:
        packed = pack_rows(x0 * inv, x1 * inv, x2 * inv, x3 * inv)
    there = (column < columns)[:, None] & (word < high)[None, :]
    tl.store(qt_ptr + column[:, None] * stride + word[None, :], tl.trans(packed), there)


@triton.jit
def _made(largest, s_ptr, index, count, stride, POW2: tl.constexpr):
    """Store the scales of some rows or columns and return their inverses."""
    scale = scale_of(largest, False, POW2)
    tl.store(s_ptr + index * stride, scale, index < count)
    return inverse(scale)


@quick
@triton.jit
def _grouped(x_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, M, pairs, stride_x, stride_q, words, s_stride, s_stride_k, st_stride, st_stride_k,
             TILE: tl.constexpr, ALIGN: tl.constexpr, HALF: tl.constexpr, POW2: tl.constexpr, T_POW2: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    pairs, stride_x, stride_q, words = (
        pairs // ALIGN * ALIGN,
        stride_x // ALIGN * ALIGN,
        stride_q // 8 * 8,
        words // 4 * 4,
    )
    wide = tl.cdiv(pairs, TILE // 2)
    tile_m = tl.program_id(0) // wide
    tile_k = tl.program_id(0) % wide
    # Pointers and sizes of the tile, so that everything below is counted from its corner, in 32 bits.
    x_ptr += tile_m.to(tl.int64) * TILE * stride_x + tile_k * (TILE // 2)
    q_ptr += tile_m.to(tl.int64) * TILE * stride_q + tile_k * (TILE // 2)
    qt_ptr += tile_k.to(tl.int64) * TILE * words + tile_m * (TILE // 4)
    s_ptr += tile_m.to(tl.int64) * TILE * s_stride + tile_k.to(tl.int64) * s_stride_k
    st_ptr += tile_k.to(tl.int64) * TILE * st_stride + tile_m.to(tl.int64) * st_stride_k
    rows, filled = M - tile_m * TILE, stride_q - tile_k * (TILE // 2)
    high, across = words - tile_m * (TILE // 4), pairs - tile_k * (TILE // 2)
    word, pair = tl.arange(0, TILE // 4), tl.arange(0, TILE // 2)
    row0, row1, row2, row3 = 4 * word, 4 * word + 1, 4 * word + 2, 4 * word + 3
    x0 = load_pairs(x_ptr, row0, pair, rows, across, stride_x, HALF)
    x1 = load_pairs(x_ptr, row1, pair, rows, across, stride_x, HALF)
    x2 = load_pairs(x_ptr, row2, pair, rows, across, stride_x, HALF)
    x3 = load_pairs(x_ptr, row3, pair, rows, across, stride_x, HALF)
    i0 = _rows_of(x0, s_ptr, row0, rows, s_stride, HALF, POW2)
    i1 = _rows_of(x1, s_ptr, row1, rows, s_stride, HALF, POW2)
    i2 = _rows_of(x2, s_ptr, row2, rows, s_stride, HALF, POW2)
    i3 = _rows_of(x3, s_ptr, row3, rows, s_stride, HALF, POW2)
    even, odd = largest(larger(larger(x0, x1, HALF), larger(x2, x3, HALF), HALF), 0, HALF)
    ie = _made(even, st_ptr, 2 * pair, 2 * across, st_stride, T_POW2)[None, :]
    io = _made(odd, st_ptr, 2 * pair + 1, 2 * across, st_stride, T_POW2)[None, :]
    _store_pairs(q_ptr, x0, i0, row0, pair, rows, stride_q, filled, HALF, PREROUND)
    _store_pairs(q_ptr, x1, i1, row1, pair, rows, stride_q, filled, HALF, PREROUND)
    _store_pairs(q_ptr, x2, i2, row2, pair, rows, stride_q, filled, HALF, PREROUND)
    _store_pairs(q_ptr, x3, i3, row3, pair, rows, stride_q, filled, HALF, PREROUND)
    x0, x1, x2, x3 = _again(x0, PREROUND), _again(x1, PREROUND), _again(x2, PREROUND), _again(x3, PREROUND)
    a0, b0 = apart(x0, HALF)
    a1, b1 = apart(x1, HALF)
    a2, b2 = apart(x2, HALF)
    a3, b3 = apart(x3, HALF)
    _store_words(qt_ptr, a0, a1, a2, a3, ie, 2 * pair, word, 2 * across, high, words, PREROUND)
    _store_words(qt_ptr, b0, b1, b2, b3, io, 2 * pair + 1, word, 2 * across, high, words, PREROUND)


@triton.jit
def _rows_of(words, s_ptr, row, rows, stride, HALF: tl.constexpr, POW2: tl.constexpr):
    """Store the scales of a tile's rows and return their inverses."""
    low, high = largest(words, 1, HALF)
    return _made(tl.maximum(low, high), s_ptr, row, rows, stride, POW2)[:, None]


def bind_grouped(m: int, k: int, stride: int, dtype: torch.dtype, wide: int, words: int, pow2: bool, t_pow2: bool) -> Bound:  # fmt: skip
    """Return the launch that takes x [M, K] and fills q, its scales per 1x128, the transpose, and its scales.

    `wide` is the row stride of q, `words` that of the transpose in words of four bytes. Scales are contiguous along rows.
    """
    align = max(alignment(k, stride) // 2, 1)
    return bind(
        _grouped, (cdiv(m, _TILE) * cdiv(k, _TILE),), m, k // 2, stride // 2, wide // 2, words, 1, m, 1, k,
        _TILE, align, dtype == torch.float16, pow2, t_pow2, INTERPRETED, views={0: torch.int32, 1: torch.int16, 3: torch.int32}, **_LAUNCH,
    )  # fmt: skip
