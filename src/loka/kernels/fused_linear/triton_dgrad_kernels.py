"""Backward from one layer of a chain to the previous one, FP8 in and out.

    g_previous [M, N] = (g [M, K] @ w_t [N, K]^T) * activation'(z [M, N])       (* kept / (1 - p) with dropout)

The GEMM is dgrad's. Its epilogue reads what forward kept, multiplies by the activation's derivative and writes the
result quantized both ways with one scale from earlier steps, so that no 16-bit gradient reaches memory between the
layers. It also collects the amax of g_previous for the next scale, and column sums for the bias.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.dropout import draw_numbers
from loka.kernels.fused_linear.launch import Work, properties_of
from loka.kernels.fused_linear.triton_gradient_kernels import DROP_DRAWN, slope_of
from loka.kernels.fused_linear.triton_kernels import (
    accumulate,
    aligned,
    aligned_maker,
    halves,
    late,
    launch_for,
    number_at,
    raise_amax,
)
from loka.kernels.plans import planned
from loka.kernels.scaled_mm.triton_kernels import tma_ready
from loka.kernels.strides import Maker, cdiv, maker
from loka.kernels.tile import INTERPRETED, drawn, inverse, tile_order, to_fp8
from loka.kernels.triton_bound import Bound, bind
from loka.kernels.triton_launcher import quick

_SCALAR = tl.constexpr(1)
_Z_SCALED = tl.constexpr(2)
_Z_NONE = tl.constexpr(4)
_DROP_DRAWN = tl.constexpr(DROP_DRAWN)


@triton.jit
def _column_sums(x, BM: tl.constexpr, BN: tl.constexpr, PREROUND: tl.constexpr):
    """Return the column sums in row 0 of a tile, computed as a product with ones on the tensor cores.

    Rows of a tile are in different threads, so adding them there takes three shuffles per element. The tensor cores
    read bf16, which rounds each addend, the sum of two rows, to 8 bits, and add in float32.
    """
    first = tl.arange(0, 64) == 0
    if PREROUND:  # the interpreter would multiply the bit patterns of bf16 values
        return tl.where(first[:, None], tl.sum(x, 0)[None, :], 0.0)
    else:
        # A thread of an accumulator holds rows r and r + 8 of every 16: their sum moves no data and halves the operand.
        pairs = tl.reshape(tl.sum(tl.reshape(x, (BM // 16, 2, 8, BN)), 1), (BM // 2, BN))
        ones = tl.broadcast_to(tl.where(first, 1.0, 0.0)[:, None], (64, BM // 2)).to(tl.bfloat16)
        return tl.dot(ones, pairs.to(tl.bfloat16))


@triton.jit
def _write_half(acc, z, first_row, first_column, q_desc, qt_desc, scale, factor, z_scale, amax_ptr, bias_ptr, seed_ptr, threshold, stream, M, N,
                BM: tl.constexpr, BN: tl.constexpr, ACTIVATION: tl.constexpr, Z: tl.constexpr, SLOPE: tl.constexpr,
                E5M2: tl.constexpr, AMAX: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """Run the epilogue for half a tile: a whole one needs more registers and shared memory than the pipeline leaves."""
    row, column = first_row + tl.arange(0, BM), first_column + tl.arange(0, BN)
    # Operands' scales are applied to maxima, to sums and, in one factor, to what is quantized: not to every element.
    if DROP == _DROP_DRAWN:
        acc *= drawn(tl.load(seed_ptr), row, column, stream, threshold, 1.0)
    if Z != _Z_NONE:
        acc *= slope_of(z.to(tl.float32), z_scale, Z, ACTIVATION, SLOPE, PREROUND)
    if AMAX:
        raise_amax(acc, row < M, amax_ptr, scale, PREROUND)
    if BIAS:  # rows beyond M are zero
        at = tl.broadcast_to((bias_ptr + column)[None, :], (64, BN))
        tl.atomic_add(
            at,
            _column_sums(acc, BM, BN, PREROUND) * scale,
            (tl.arange(0, 64) == 0)[:, None] & (column < N)[None, :],
            sem="relaxed",
        )
    q = to_fp8(acc, factor, 0, E5M2, False, PREROUND)
    q_desc.store([first_row, first_column], q)
    qt_desc.store([first_column, first_row], tl.trans(q))


@triton.jit
def _prefetch(z_ptr, stride, first_row, first_column, M, N, BM: tl.constexpr, BN: tl.constexpr, BYTES: tl.constexpr):
    """Prefetch a tile of z into L2, by 128-byte lines, while the GEMM runs. `stride` is in bytes."""
    LINES: tl.constexpr = BN * BYTES // 128 if BN * BYTES >= 128 else 1
    line = tl.arange(0, BM * LINES)
    row = tl.minimum(first_row + line // LINES, M - 1).to(tl.int64)
    byte = tl.minimum(first_column * BYTES + line % LINES * 128, (N - 1) * BYTES)
    at = z_ptr.to(tl.pointer_type(tl.uint8)) + row * stride + byte
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@quick
@triton.jit(do_not_specialize=["threshold", "stream"])
def _dgrad(g_desc, w_desc, z_desc, q_desc, qt_desc, z_ptr, sg_ptr, sw_ptr, z_scale_ptr, scale_ptr, amax_ptr, bias_ptr, seed_ptr, threshold, upscale, stream, M, N, K, z_stride,
           BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, ACTIVATION: tl.constexpr, Z: tl.constexpr, Z_BYTES: tl.constexpr,
           SLOPE: tl.constexpr, E5M2: tl.constexpr, AMAX: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    sg, sw, q_scale = tl.load(sg_ptr), tl.load(sw_ptr), tl.load(scale_ptr)
    z_scale = number_at(z_scale_ptr, Z >= _Z_SCALED and Z != _Z_NONE)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_order(tile, num_m, num_n, GROUP_M)
        first_row, first_column = tile_m * BM, tile_n * BN
        if Z_BYTES > 0 and not PREROUND:
            _prefetch(z_ptr, z_stride, first_row, first_column, M, N, BM, BN, Z_BYTES)
        acc = accumulate(g_desc, w_desc, sg_ptr, sw_ptr, first_row, first_column, 0, tl.cdiv(K, BK), M, N, 0, 0, 0, 0, BM, BN, BK, _SCALAR, _SCALAR)  # fmt: skip
        left, right = halves(acc, BM, BN)
        if Z != _Z_NONE:
            z_left, z_right = halves(z_desc.load([first_row, first_column]), BM, BN)
        else:
            z_left, z_right = left, right
        scale = late(sg, PREROUND) * late(sw, PREROUND) * upscale
        factor = scale * inverse(late(q_scale, PREROUND))
        factor = tl.where(factor < float("inf"), factor, float("nan"))  # Inf must be seen in the result, not saturate
        _write_half(left, z_left, first_row, first_column, q_desc, qt_desc, scale, factor, z_scale, amax_ptr, bias_ptr, seed_ptr, threshold, stream, M, N,
                    BM, BN // 2, ACTIVATION, Z, SLOPE, E5M2, AMAX, BIAS, DROP, PREROUND)  # fmt: skip
        _write_half(right, z_right, first_row, first_column + BN // 2, q_desc, qt_desc, scale, factor, z_scale, amax_ptr, bias_ptr, seed_ptr, threshold, stream, M, N,
                    BM, BN // 2, ACTIVATION, Z, SLOPE, E5M2, AMAX, BIAS, DROP, PREROUND)  # fmt: skip


def _tma_rows(x: Tensor) -> Tensor:
    """Return x, or a copy if its rows do not start at multiples of 16 bytes."""
    if x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    return aligned(*x.shape, x.dtype, x.device).copy_(x)


class _Plan(NamedTuple):
    """Makers of the results, None for the absent ones, and the launch."""

    q: Maker
    q_t: Maker
    sums: Maker | None
    launch: Bound


@planned
def _plan(
    m: int, k: int, n: int, astride: bool, device: torch.device, z_stride: int, z_bytes: int, amax: bool, activation: int, kept: int, slope: float,
    dtype: torch.dtype, bias: bool, given: tuple[int, ...] | None, draw: bool, p: float, stream: int, drop: int,
) -> _Plan:  # fmt: skip
    """`astride`: rows of an operand start within 32-byte sectors. `z_bytes`: per element of z, 0 without z."""
    work = Work(m, k, n, 1, z_bytes, True, whole=True, astride=astride, sums=bias)
    bm, bn, bk, warps, stages, group, resident, _ = launch_for(work, given, device).numbers
    programs = min(properties_of(device).processors * resident, cdiv(m, bm) * cdiv(n, bn))
    launch = bind(
        _dgrad, (programs,), *draw_numbers(p, stream, draw=draw), m, n, k, z_stride * z_bytes,
        bm, bn, bk, group, activation, kept, z_bytes, slope, dtype == torch.float8_e5m2, amax, bias, drop, INTERPRETED, num_warps=warps, num_stages=stages,
        blocks={0: [bm, bk], 1: [bn, bk], 2: [bm, bn], 3: [bm, bn // 2], 4: [bn // 2, bm]}, views={10: torch.int32},
    )  # fmt: skip
    sums = maker((n,), torch.float32, device) if bias else None
    return _Plan(aligned_maker(m, n, dtype, device), aligned_maker(n, m, dtype, device), sums, launch)


def fused_linear_dgrad(
    g: Tensor, w_t: Tensor, sg: Tensor, sw: Tensor, z: Tensor | None, z_scale: Tensor | None, scale: Tensor, amax: Tensor | None,
    activation: int, kept: int, slope: float, dtype: torch.dtype, bias: bool, launch: list[int] | None,
    seed: Tensor | None, p: float, stream: int, drop: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return g, g_t and the bias gradient of the previous layer; `amax` is raised in place.

    Rows of g and w_t start at multiples of 16 bytes (TMA).
    """
    g, w_t = tma_ready(g), tma_ready(w_t)
    z = None if z is None else _tma_rows(z)
    plan = _plan(
        *g.shape, w_t.shape[0], (g.stride(0) | w_t.stride(0)) & 31 != 0, g.device, 0 if z is None else z.stride(0), 0 if z is None else z.element_size(),
        amax is not None, activation, kept, slope, dtype, bias, None if launch is None else tuple(launch), seed is not None, p, stream, drop,
    )  # fmt: skip
    q, q_t = plan.q(), plan.q_t()
    sums = None if plan.sums is None else plan.sums().zero_()
    plan.launch(g, w_t, z, q, q_t, z, sg, sw, z_scale, scale, amax, sums, seed)
    return q, q_t, sums
