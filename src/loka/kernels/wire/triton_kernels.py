"""Packing at the speed of a copy: a tile of blocks is read once, and its scales and codes are written once.

    tile     R blocks of B elements, about 4,096 in all; a block's maximum is taken across the threads that hold it
    bytes    [scale][codes], S + B per block. With a 4-byte scale, codes start at multiples of four and are written as
             words. With a 1-byte scale (E8M0), the codes of only every fourth block do, and those of another fourth
             start at multiples of two: the blocks of a tile are processed in four PARTS, by alignment, so that each is
             written in the widest possible pieces

Only whole blocks are processed, so a mask never splits a vector.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.formats import E5M2, Draw, Spec
from loka.kernels.embedding_update.triton_kernels import random_bits, rounded_e4m3, to_e4m3
from loka.kernels.op import on_device
from loka.kernels.strides import cdiv
from loka.kernels.tile import INTERPRETED, finite_magnitude, inverse, scale_of, to_fp8
from loka.kernels.triton_launcher import quick

TILE = 4096
# elements and warps for blocks that are not aligned to words: 172 us on an H200, where 4096 and 4 take 269
SMALL = (1024, 1)
_INTERPRETED = tl.constexpr(INTERPRETED)


@quick
@triton.jit(do_not_specialize=["n", "first_block", "step", "seed"])
def _pack(x_ptr, out_ptr, n, first_block, step, seed, B: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr,
          BYTE_SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, PREROUND: tl.constexpr, R: tl.constexpr):  # fmt: skip
    S: tl.constexpr = 1 if BYTE_SCALE else 4
    PARTS: tl.constexpr = 4 if BYTE_SCALE else 1
    group = tl.program_id(0).to(tl.int64) * (R // PARTS) + tl.arange(0, R // PARTS)
    column = tl.arange(0, B)[None, :]
    for part in tl.static_range(PARTS):
        block = group * PARTS + part
        there = block < n
        x = tl.load(x_ptr + block[:, None] * B + column, there[:, None], other=0.0).to(tl.float32)
        scale = scale_of(tl.max(finite_magnitude(x), 1), E5M2, POW2)
        inv = inverse(scale)[:, None]
        if STOCHASTIC:
            bits = random_bits(block + first_block, 0, step, seed, B)
            q = to_e4m3(rounded_e4m3(x, inv, bits))
        else:
            q = to_fp8(x, inv, x, E5M2, False, PREROUND)
        at = out_ptr + group * (PARTS * (S + B))
        tl.store(at[:, None] + (part * (S + B) + S) + column, q.to(tl.uint8, bitcast=True), there[:, None])
        if BYTE_SCALE:
            tl.store(at + part * (S + B), (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), there)
        else:
            tl.store((out_ptr.to(tl.pointer_type(tl.float32))) + block * (B // 4 + 1), scale, there)


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
    tile = tile or (SMALL if size <= 32 else (TILE, 4))
    byte_scale = spec.scale == "e8m0"
    out = torch.empty(n, (1 if byte_scale else 4) + size, dtype=torch.uint8, device=blocks.device)
    if n:
        rows = max(4, tile[0] // size)
        step, seed = (0, 0) if draw is None else (draw.step, (draw.stream << 32) | draw.seed)
        _pack[(cdiv(n, rows),)](
            blocks, out, n, first_block, step, seed, size, spec.format == E5M2, spec.scale != "f32", byte_scale,
            draw is not None, INTERPRETED, rows, num_warps=tile[1],
        )  # fmt: skip
    return out


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
