"""16-bit matrices as 32-bit words of two columns: half the loads, registers and comparisons of float32.

The maximum of magnitudes is one instruction for two elements. Words are taken apart only where elements are scaled.
"""

import torch
import triton
import triton.language as tl

from loka.kernels.tile import INTERPRETED, finite_magnitude

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def load_pairs(x_ptr, row, pair, M, pairs, stride, HALF: tl.constexpr):
    """Return 32-bit words of two columns, with NaN for Inf: E4M3 has no Inf, and the GPU's maximum skips NaN."""
    inside = (row < M)[:, None] & (pair < pairs)[None, :]
    words = tl.load(x_ptr + row[:, None] * stride + pair[None, :], inside, other=0)
    if _INTERPRETED:
        INF: tl.constexpr = 0x7C00 if HALF else 0x7F80
        low, high = (words & 0x7FFF) == INF, ((words >> 16) & 0x7FFF) == INF
        return words | tl.where(low, 1, 0) | tl.where(high, 65536, 0)
    elif HALF:  # Inf x 0 is NaN
        return tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.f16x2 $0, $1, zero, $1; }", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, zero, $1; }", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def apart(words, HALF: tl.constexpr):
    """Return the even and the odd columns of words, in float32."""
    if HALF:
        low = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def _larger_by_half(a, b, INF: tl.constexpr):
    """Return the larger magnitudes of both halves of words; NaN counts as nothing."""
    low, high = tl.maximum(_size(a, INF), _size(b, INF)), tl.maximum(_size(a >> 16, INF), _size(b >> 16, INF))
    return (high << 16) | low


@triton.jit
def _size(half, INF: tl.constexpr):
    half = half & 0x7FFF
    return tl.where(half > INF, 0, half)


@triton.jit
def _larger_bf16(a, b):
    """Return the larger magnitudes of both halves of words, with any sign; NaN counts as nothing."""
    if _INTERPRETED:
        return _larger_by_half(a, b, 0x7F80)
    else:
        return tl.inline_asm_elementwise("max.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)  # fmt: skip


@triton.jit
def _larger_fp16(a, b):
    """Like `_larger_bf16`, for fp16."""
    if _INTERPRETED:
        return _larger_by_half(a, b, 0x7C00)
    else:
        return tl.inline_asm_elementwise("max.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)  # fmt: skip


@triton.jit
def larger(a, b, HALF: tl.constexpr):
    """Return the larger magnitudes of both halves of words."""
    return _larger_fp16(a, b) if HALF else _larger_bf16(a, b)


@triton.jit
def largest(words, AXIS: tl.constexpr, HALF: tl.constexpr):
    """Return the largest magnitudes of the even and of the odd columns along an axis, or of all (None).

    In float32; 0 for NaN alone.
    """
    if _INTERPRETED:  # the interpreter runs other reductions than its own element by element
        low, high = apart(words, HALF)
        return tl.max(finite_magnitude(low), AXIS), tl.max(finite_magnitude(high), AXIS)
    else:
        low, high = apart(tl.reduce(words, AXIS, _larger_fp16 if HALF else _larger_bf16), HALF)
        return finite_magnitude(low), finite_magnitude(high)


def are_pairs(k: int, stride: int, dtype: torch.dtype, *, near: bool) -> bool:
    """Return True if the columns of a matrix [M, K] can be read in pairs. `near`: it starts at a multiple of 4 bytes."""
    return near and dtype.itemsize == 2 and k % 2 == 0 and stride % 2 == 0
