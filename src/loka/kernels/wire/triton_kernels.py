"""Packing at the speed of a copy: a tile of blocks is read once, and its scales and codes are written once.

    tile     R blocks of B elements, 128 bytes a thread, in two halves of every block (`triton_codes`)
    bytes    [scale][codes], S + B per block. With a 4-byte scale, codes start at multiples of four. With a 1-byte scale
             (E8M0) four blocks are B + 1 words, in which the codes of block b are moved up by b + 1 bytes: a word is made
             of two neighbors, so that all stores are words of consecutive addresses. Codes written where they are, byte
             by byte, had 0.56 of a copy's bandwidth on an H200

Only whole blocks are processed, so a mask never splits a vector.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.formats import E5M2, Draw, Spec
from loka.kernels.op import on_device
from loka.kernels.strides import cdiv
from loka.kernels.tile import INTERPRETED, inverse, power_of_two_scale, scale_of
from loka.kernels.triton_launcher import quick
from loka.kernels.wire.triton_codes import in_order, magnitude, quarters, random_words, to_word, widened

TILE_BYTES = 4096  # that a program of one warp packs
TILE = 4096  # elements that four warps unpack
_INTERPRETED = tl.constexpr(INTERPRETED)


@quick
@triton.jit(do_not_specialize=["n", "first_block", "step", "seed"])
def _pack(x_ptr, out_ptr, n, first_block, step, seed, B: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr,
          BYTE_SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, R: tl.constexpr):  # fmt: skip
    first_row = tl.program_id(0).to(tl.int64) * R
    row = tl.arange(0, R)
    left = tl.minimum(n - first_row, R).to(tl.int32)  # offsets and masks of a tile are 32-bit numbers
    there = (row < left)[:, None]
    at = x_ptr + first_row * B + (row[:, None] * B + tl.arange(0, B // 2)[None, :])
    a0, a1, a2, a3 = quarters(widened(tl.load(at, there, other=0.0), E5M2))
    b0, b1, b2, b3 = quarters(widened(tl.load(at + B // 2, there, other=0.0), E5M2))
    size = tl.maximum(magnitude(a0, E5M2), magnitude(b0, E5M2))
    size = tl.maximum(size, tl.maximum(magnitude(a1, E5M2), magnitude(b1, E5M2)))
    size = tl.maximum(size, tl.maximum(magnitude(a2, E5M2), magnitude(b2, E5M2)))
    size = tl.maximum(size, tl.maximum(magnitude(a3, E5M2), magnitude(b3, E5M2)))
    amax = tl.max(size, 1)
    if POW2:
        scale, inv = power_of_two_scale(amax, E5M2)
    else:
        scale = scale_of(amax, E5M2, False)
        inv = inverse(scale)
    inv = inv[:, None]
    w0, w1, w2, w3 = a0, a1, a2, a3
    if STOCHASTIC:
        w0, w1, w2, w3 = random_words(first_row + first_block + row, a0, step, seed)
    first = to_word(a0, a1, a2, a3, inv, w0, w1, w2, w3, False, E5M2, POW2, STOCHASTIC)
    second = to_word(b0, b1, b2, b3, inv, w0, w1, w2, w3, True, E5M2, POW2, STOCHASTIC)
    words = in_order(first, second)
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
