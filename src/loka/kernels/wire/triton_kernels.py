"""Packing at the speed of a copy: a tile of blocks is read once, and its scales and codes are written once.

    tile     R blocks of B elements, read as two halves of every block: a thread has as many elements of a block as
             possible, since what is computed once per block is computed by every thread that has some of it
    codes    four to a word. To nearest by the conversion of the hardware; stochastically by `_drawn_word`
    bytes    [scale][codes], S + B per block. With a 4-byte scale, codes start at multiples of four. With a 1-byte scale
             (E8M0) four blocks are B + 1 words, in which the codes of block b are shifted by b + 1 bytes: a word is made
             of two neighbors, and all stores are words of consecutive addresses (byte by byte, 0.56 of a copy's
             bandwidth on an H200)

Only whole blocks are processed, so a mask never splits a vector.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.formats import E5M2, Draw, Spec
from loka.formats.philox import MULTIPLY, ROUNDS, WEYL
from loka.kernels.op import on_device
from loka.kernels.strides import cdiv
from loka.kernels.tile import (
    INTERPRETED,
    finite_magnitude,
    inverse,
    nan_for_inf,
    pack_rows,
    pack_rows_checked,
    power_of_two_scale,
    scale_of,
    to_fp8,
)
from loka.kernels.triton_launcher import quick

TILE_BYTES = 4096  # that a warp packs: 128 a thread, since more elements of a block share the work on its scale
TILE = 4096  # elements that four warps unpack
_INTERPRETED = tl.constexpr(INTERPRETED)
_ROUNDS = tl.constexpr(ROUNDS)
_MULTIPLY0, _MULTIPLY1 = tl.constexpr(MULTIPLY[0]), tl.constexpr(MULTIPLY[1])
_WEYL0, _WEYL1 = tl.constexpr(WEYL[0]), tl.constexpr(WEYL[1])


@triton.jit
def _quarters(x):
    """Return four [R, H / 4] tensors of [R, H]: tensor k has the elements 4 i + k."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _in_order(first, second):
    """Return [R, 2 W] of the words [R, W] of both halves of R blocks."""
    joined = tl.permute(tl.join(first, second), (0, 2, 1))
    return tl.reshape(joined, (first.shape[0], 2 * first.shape[1]))


@triton.jit
def _widened(x, KEEP_INF: tl.constexpr):
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
def _magnitude(x, HAS_INF: tl.constexpr):
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
def _random_words(block, x, step, seed):
    """Return four random words for each group of blocks [R], uint32 of x's shape [R, W]: those of `loka.formats.philox`."""
    W: tl.constexpr = x.shape[1]
    zero = tl.zeros(x.shape, tl.uint32)
    if not _INTERPRETED:  # drawn by the threads that have x: otherwise words would move through shared memory
        zero = tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,f", [x], dtype=tl.uint32, is_pure=True, pack=1)
    c0 = zero + (block & 0xFFFFFFFF).to(tl.uint32)[:, None]
    c1 = zero + ((block >> 32) & 0xFFFFFFFF).to(tl.uint32)[:, None]
    c2 = zero + tl.arange(0, W).to(tl.uint32)[None, :]
    c3 = zero + step.to(tl.uint32)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        high0, low0 = _multiplied(c0, _MULTIPLY0)
        high2, low2 = _multiplied(c2, _MULTIPLY1)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _WEYL0, k1 + _WEYL1
    return c0, c1, c2, c3


@triton.jit
def _byte(x, inv, E5M2: tl.constexpr):
    """Round to nearest in the interpreter, whose casts lose the sign of zero and NaN."""
    code = to_fp8(x, inv, x, E5M2, False, True).to(tl.uint8, bitcast=True).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(x == x, (code & 0x7F) | sign, 0x7F)


@triton.jit
def _word(x0, x1, x2, x3, inv, w0, w1, w2, w3, SECOND: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr,
          STOCHASTIC: tl.constexpr):  # fmt: skip
    """Quantize four elements to a word, int32."""
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
        return pack_rows_checked(x0, x1, x2, x3, inv, x0, x1, x2, x3, True, False, False)
    else:
        return pack_rows(x0 * inv, x1 * inv, x2 * inv, x3 * inv)


@quick
@triton.jit(do_not_specialize=["n", "first_block", "step", "seed"])
def _pack(x_ptr, out_ptr, n, first_block, step, seed, B: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr,
          BYTE_SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, R: tl.constexpr):  # fmt: skip
    W: tl.constexpr = B // 8  # words of half a block
    first_row = tl.program_id(0).to(tl.int64) * R
    row = tl.arange(0, R)
    left = tl.minimum(n - first_row, R).to(tl.int32)  # offsets and masks of a tile are 32-bit numbers
    there = (row < left)[:, None]
    at = x_ptr + first_row * B + (row[:, None] * B + tl.arange(0, B // 2)[None, :])
    a0, a1, a2, a3 = _quarters(_widened(tl.load(at, there, other=0.0), E5M2))
    b0, b1, b2, b3 = _quarters(_widened(tl.load(at + B // 2, there, other=0.0), E5M2))
    size = tl.maximum(_magnitude(a0, E5M2), _magnitude(b0, E5M2))
    size = tl.maximum(size, tl.maximum(_magnitude(a1, E5M2), _magnitude(b1, E5M2)))
    size = tl.maximum(size, tl.maximum(_magnitude(a2, E5M2), _magnitude(b2, E5M2)))
    size = tl.maximum(size, tl.maximum(_magnitude(a3, E5M2), _magnitude(b3, E5M2)))
    amax = tl.max(size, 1)
    if POW2:
        scale, inv = power_of_two_scale(amax, E5M2)
    else:
        scale = scale_of(amax, E5M2, False)
        inv = inverse(scale)
    inv = inv[:, None]
    w0, w1, w2, w3 = a0, a1, a2, a3
    if STOCHASTIC:
        w0, w1, w2, w3 = _random_words(first_row + first_block + row, a0, step, seed)
    first = _word(a0, a1, a2, a3, inv, w0, w1, w2, w3, False, E5M2, POW2, STOCHASTIC)
    second = _word(b0, b1, b2, b3, inv, w0, w1, w2, w3, True, E5M2, POW2, STOCHASTIC)
    words = _in_order(first, second)
    if BYTE_SCALE:
        _store_shifted(out_ptr + (first_row // 4) * (B + 1), left, words, scale, B, R)
    else:
        out = out_ptr + first_row * (B // 4 + 1) + row * (B // 4 + 1)
        tl.store(out[:, None] + 1 + tl.arange(0, B // 4)[None, :], words, there)
        tl.store(out, scale.to(tl.int32, bitcast=True), row < left)


@triton.jit
def _store_shifted(out_ptr, left, words, scale, B: tl.constexpr, R: tl.constexpr):
    """Store the codes of R blocks, int32 [R, B / 4], each after a scale of one byte.

    Four blocks are B words of codes, and B + 1 words with their scales. Codes of block b move up by b + 1 bytes, so that
    a word has the last b + 1 bytes of the word before it; at the start of a block that is the scale on top of the codes
    before it. The last word is that of the codes.
    """
    G: tl.constexpr = R // 4
    words = tl.reshape(words, (G, B))
    j = tl.arange(0, B)[None, :]
    before = tl.gather(words, tl.zeros((G, B), tl.int32) + tl.maximum(j - 1, 0), 1)
    code = tl.reshape(tl.broadcast_to((scale.to(tl.int32, bitcast=True) >> 23)[:, None], (R, B // 4)), (G, B))
    start = j % (B // 4) == 0
    before = tl.where(start, ((before >> 8) & 0xFFFFFF) | (code << 24), before)
    pair = (words.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | before.to(tl.uint32, bitcast=True).to(tl.uint64)
    shifted = (pair >> (24 - 8 * (j // (B // 4))).to(tl.uint64)).to(tl.uint32).to(tl.int32, bitcast=True)
    at = tl.arange(0, G)[:, None] * (B + 1) + j
    end = (left * (B + 1) + 3) // 4
    tl.store(out_ptr + at, shifted, at < end)
    tl.store(out_ptr + at + 1, words, (j == B - 1) & (at + 1 < end))  # the last codes of four blocks


@quick
@triton.jit(do_not_specialize=["n"])
def _unpack(data_ptr, out_ptr, n, LARGEST: tl.constexpr, B: tl.constexpr, E5M2: tl.constexpr, BYTE_SCALE: tl.constexpr,
            R: tl.constexpr):  # fmt: skip
    S: tl.constexpr = 1 if BYTE_SCALE else 4
    block = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, B)[None, :]
    there = block < n
    at = data_ptr + block * (S + B)
    code = tl.load(at[:, None] + S + column, there[:, None], other=0)
    if BYTE_SCALE:
        exponent = tl.load(at, there, other=127).to(tl.int32)
        scale = tl.where(exponent == 255, float("nan"), (exponent << 23).to(tl.float32, bitcast=True))
    else:
        scale = tl.load((data_ptr.to(tl.pointer_type(tl.float32))) + block * (B // 4 + 1), there, other=1.0)
    if E5M2:
        element = code.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        element = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        if _INTERPRETED:  # the interpreter reads NaN as a number
            element = tl.where((code & 0x7F) == 0x7F, float("nan"), element)
    value = element * scale[:, None]
    value = tl.where(value > LARGEST, LARGEST, value)  # unlike minimum, comparisons keep NaN
    value = tl.where(value < -LARGEST, -LARGEST, value)
    if E5M2:
        value = tl.where(tl.abs(element) == float("inf"), element, value)
    tl.store(out_ptr + block[:, None] * B + column, value.to(out_ptr.dtype.element_ty), there[:, None])


@on_device
def pack(
    blocks: Tensor, spec: Spec, draw: Draw | None, first_block: int, *, tile: tuple[int, int] | None = None
) -> Tensor:
    """Return uint8 [n, S + B]. `tile` overrides the elements and warps per program, for tuning."""
    n, size = blocks.shape
    byte_scale = spec.scale == "e8m0"
    width = (1 if byte_scale else 4) + size
    out = torch.empty(cdiv(n * width, 4), dtype=torch.int32, device=blocks.device)  # whole words are written
    if n:
        elements, warps = tile or (TILE_BYTES // blocks.element_size(), 1)
        rows = max(4, elements // size)
        step, seed = (0, 0) if draw is None else (draw.step, (draw.stream << 32) | draw.seed)
        _pack[(cdiv(n, rows),)](
            blocks, out, n, first_block, step, seed, size, spec.format == E5M2, spec.scale != "f32", byte_scale,
            draw is not None, rows, num_warps=max(warps, rows * size // elements),
        )  # fmt: skip
    return out.view(torch.uint8)[: n * width].view(n, width)


@on_device
def unpack(data: Tensor, spec: Spec, dtype: torch.dtype) -> Tensor:
    """Return [n, B] in `dtype`."""
    byte_scale = spec.scale == "e8m0"
    n, size = data.shape[0], data.shape[1] - (1 if byte_scale else 4)
    out = torch.empty(n, size, dtype=dtype, device=data.device)
    if n:
        rows, largest = TILE // size, torch.finfo(dtype).max
        _unpack[(cdiv(n, rows),)](data, out, n, largest, size, spec.format == E5M2, byte_scale, rows, num_warps=4)  # fmt: skip
    return out
