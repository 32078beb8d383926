"""Codes of E4M3 and E5M2 in registers, four to a word, for the kernels that pack.

    to nearest        by the conversion of the hardware, two elements at a time
    stochastically    by integer arithmetic, see `_code_above`: seven instructions per element, and three for its random
                      bits (seven rounds of Philox for eight elements)

A thread should have many elements of a block, since what is computed once per block is computed by every thread that
has some of it. So tiles come as two halves [R, B / 2] of R blocks, and these as four quarters, one for each byte of a
word.
"""

import triton
import triton.language as tl

from loka.formats.philox import MULTIPLY, ROUNDS, WEYL
from loka.kernels.tile import INTERPRETED, finite_magnitude, nan_for_inf, pack_rows, to_fp8

_INTERPRETED, _ROUNDS = tl.constexpr(INTERPRETED), tl.constexpr(ROUNDS)
_MULTIPLY0, _MULTIPLY1 = tl.constexpr(MULTIPLY[0]), tl.constexpr(MULTIPLY[1])
_WEYL0, _WEYL1 = tl.constexpr(WEYL[0]), tl.constexpr(WEYL[1])


@triton.jit
def quarters(x):
    """Return four [R, H / 4] tensors of [R, H]: tensor k has the elements 4 i + k."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def in_order(first, second):
    """Return [R, 2 W] of the words [R, W] of both halves of R blocks."""
    joined = tl.permute(tl.join(first, second), (0, 2, 1))
    return tl.reshape(joined, (first.shape[0], 2 * first.shape[1]))


@triton.jit
def widened(x, KEEP_INF: tl.constexpr):
    """Convert to float32, with NaN for Inf, which E4M3 does not have, unless it is to be kept."""
    if _INTERPRETED:
        if x.dtype == tl.bfloat16:  # its conversion loses subnormals
            wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            wide = x.to(tl.float32)
        return wide if KEEP_INF else tl.where(tl.abs(wide) < float("inf"), wide, float("nan"))
    elif KEEP_INF:
        return x.to(tl.float32)
    elif x.dtype == tl.bfloat16:  # three instructions for two elements; Triton's conversion and a product take five
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; mov.b32 t, 0; fma.rn.bf16x2 t, $2, t, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xFFFF0000; }",
            "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return nan_for_inf(x.to(tl.float32))


@triton.jit
def magnitude(x, HAS_INF: tl.constexpr):
    """Return |x| for a maximum over the finite elements: that of the GPU skips NaN."""
    if _INTERPRETED:
        return finite_magnitude(x)
    elif HAS_INF:
        return tl.abs(nan_for_inf(x))
    else:
        return tl.abs(x)


@triton.jit
def _code_above(x, inv, word, SECOND: tl.constexpr, POW2: tl.constexpr):
    """Round x stochastically to E4M3; returns its code in the upper eight bits of an int32, and anything below.

    |x| x 2^-120 has the subnormals of float32 where E4M3 has its own, so that the upper bits of its pattern are the code
    of the magnitude, cut off: 4 bits of exponent and 3 of the mantissa, below which 20 are left. Random bits are added
    to them, and a carry rounds up. Subnormals have more than 20: a product that is rounded up makes 20 of them, and a
    fraction that is larger than a multiple of 2^-20 remains larger. A minimum makes NaN of all that is no number.

    The bits are the upper 24 of `word`, or those of its halves in the other order for the SECOND half of a block.
    """
    y = x * inv
    if not POW2:  # the largest element may be 448 and a bit
        y = tl.where(tl.abs(y) < float("inf"), tl.maximum(tl.minimum(y, 448.0), -448.0), y)
    if _INTERPRETED:
        small = tl.abs(y) * 7.52316384526264e-37
        pattern = small.to(tl.int32, bitcast=True) + (small * 1.329227995784916e36 < tl.abs(y)).to(tl.int32)
        bits = (((word << 16) | (word >> 16)) if SECOND else word) >> 8
        code = (tl.minimum(pattern, 0x07F00000) << 4) + bits.to(tl.int32, bitcast=True)
        return code | (y.to(tl.int32, bitcast=True) & -2147483648)
    else:
        BYTES: tl.constexpr = "0x4103" if SECOND else "0x4321"
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; abs.f32 a, $1; mul.rp.f32 a, a, 0f03800000; min.s32 a, a, 0x07F00000;"
            " prmt.b32 b, $2, 0, " + BYTES + "; mad.lo.u32 a, a, 16, b; lop3.b32 $0, a, $1, 0x80000000, 0xF8; }",
            "=r,r,r", [y, word], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _upper_bytes(t0, t1, t2, t3):
    """Pack the upper bytes of four int32 into a word."""
    if _INTERPRETED:
        return ((t0 >> 24) & 0xFF) | ((t1 >> 16) & 0xFF00) | ((t2 >> 8) & 0xFF0000) | (t3 & -16777216)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x73; prmt.b32 high, $3, $4, 0x73; prmt.b32 $0, low, high, 0x5410; }",
            "=r,r,r,r,r", [t0, t1, t2, t3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _multiplied(word, FACTOR: tl.constexpr):
    """Return the upper and the lower half of a 64-bit product, in one instruction; `tl.philox` takes two."""
    wide = word.to(tl.uint64) * FACTOR
    return (wide >> 32).to(tl.uint32), wide.to(tl.uint32)


@triton.jit
def random_words(block, x, step, seed):
    """Return four random words for each group of blocks [R], uint32 of x's shape [R, W]: those of `loka.formats.philox`."""
    W: tl.constexpr = x.shape[1]
    zero = tl.zeros(x.shape, tl.uint32)
    if not _INTERPRETED:  # drawn by the threads that have x: otherwise words would move through shared memory
        zero = tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,f", [x], dtype=tl.uint32, is_pure=True, pack=1)
    c0 = zero + (block & 0xFFFFFFFF).to(tl.uint32)[:, None]
    c1 = zero + ((block >> 32) & 0xFFFFFFFF).to(tl.uint32)[:, None]
    c2 = zero + tl.arange(0, W).to(tl.uint32)[None, :]
    c3 = zero + step.to(tl.uint32)
    key = seed.to(tl.uint64)  # a small one comes in 32 bits
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        high0, low0 = _multiplied(c0, _MULTIPLY0)
        high2, low2 = _multiplied(c2, _MULTIPLY1)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _WEYL0, k1 + _WEYL1
    return c0, c1, c2, c3


@triton.jit
def _pack_e5m2(y0, y1, y2, y3):
    """Cast four float32 tiles to a word. The cast makes 57344 of Inf, whose code is the next."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .pred p0, p1, p2, p3;
        .reg .b16 low, high;
        .reg .f32 size;
        cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
        cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        abs.f32 size, $1;
        setp.eq.f32 p0, size, 0f7F800000;
        abs.f32 size, $2;
        setp.eq.f32 p1, size, 0f7F800000;
        abs.f32 size, $3;
        setp.eq.f32 p2, size, 0f7F800000;
        abs.f32 size, $4;
        setp.eq.f32 p3, size, 0f7F800000;
        @p0 add.u32 $0, $0, 1;
        @p1 add.u32 $0, $0, 0x100;
        @p2 add.u32 $0, $0, 0x10000;
        @p3 add.u32 $0, $0, 0x1000000;
        }
        """,
        "=&r,f,f,f,f", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _byte(x, inv, E5M2: tl.constexpr):
    """Round to nearest in the interpreter, whose casts lose the sign of zero and NaN."""
    code = to_fp8(x, inv, x, E5M2, False, True).to(tl.uint8, bitcast=True).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(x == x, (code & 0x7F) | sign, 0x7F)


@triton.jit
def to_word(x0, x1, x2, x3, inv, w0, w1, w2, w3, SECOND: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr,
          STOCHASTIC: tl.constexpr):  # fmt: skip
    """Quantize four elements to a word, int32. STOCHASTIC has random words w0 to w3 and E4M3."""
    if STOCHASTIC:
        return _upper_bytes(
            _code_above(x0, inv, w0, SECOND, POW2),
            _code_above(x1, inv, w1, SECOND, POW2),
            _code_above(x2, inv, w2, SECOND, POW2),
            _code_above(x3, inv, w3, SECOND, POW2),
        )
    elif _INTERPRETED:
        b0, b1, b2, b3 = _byte(x0, inv, E5M2), _byte(x1, inv, E5M2), _byte(x2, inv, E5M2), _byte(x3, inv, E5M2)
        return b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)
    elif E5M2:
        return _pack_e5m2(x0 * inv, x1 * inv, x2 * inv, x3 * inv)
    else:
        return pack_rows(x0 * inv, x1 * inv, x2 * inv, x3 * inv)
