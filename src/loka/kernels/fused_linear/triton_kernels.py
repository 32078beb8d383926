"""FP8 GEMM whose epilogue is the rest of the layer; and the gradient that leads back to it.

The N tile is the norm block, so a tile holds whole blocks and the norm needs no communication. After the norm |z| <= 16, a static scale is safe, no amax pass is
needed and the epilogue writes FP8 directly: the layer costs what the bare GEMM costs (measured on an H200: benchmarks/results/h200).

For training the same epilogue also writes the transpose of y (the next wgrad contracts over rows, and FP8 tensor cores want both operands contiguous along the
contracted axis), z in E4M3 and rstd. The backward kernel reads dy and z once and writes the quantised gradient both ways.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loka.kernels.fused_linear.call import NORM_BLOCK, NORM_EPS, NORMALIZED_SCALE
from loka.kernels.scaled_mm.triton_kernels import GROUPED, SCALAR, processors
from loka.kernels.tile import (
    INTERPRETED,
    activate,
    activation_slope,
    finite_magnitude,
    inverse,
    scale_of,
    tile_order,
    to_fp8,
)

_SCALAR = tl.constexpr(1)
_VECTOR = tl.constexpr(2)
_GROUPED = tl.constexpr(3)
_SQUARE = tl.constexpr(4)
_EPS = tl.constexpr(NORM_EPS)
_Z_SCALE = tl.constexpr(NORMALIZED_SCALE)

# How the output is written.
OUT_16BIT, OUT_STATIC, OUT_GROUPED = 0, 1, 2
_OUT_16BIT = tl.constexpr(0)
_OUT_GROUPED = tl.constexpr(2)


@triton.jit
def _store(desc, ptr, value, row, column, rows, columns, first_row, first_column, TMA: tl.constexpr):
    """Write a tile; TMA clips at the edges by itself."""
    if TMA:
        desc.store([first_row, first_column], value)
    else:
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(ptr + row.to(tl.int64)[:, None] * columns + column[None, :], value, inside)


@triton.jit
def _fused(a_desc, b_desc, y_desc, y_ptr, yt_desc, yt_ptr, z_desc, z_ptr,
           sa_ptr, sb_ptr, bias_ptr, out_scale_ptr, ys_ptr, yts_ptr, rstd_ptr, M, N, K, sa_stride, sb_stride,
           BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, PROGRAMS: tl.constexpr,
           A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr,
           OUT: tl.constexpr, OUT_E5M2: tl.constexpr, OUT_POW2: tl.constexpr, KEEP: tl.constexpr, TRANSPOSE: tl.constexpr,
           TMA_N: tl.constexpr, TMA_M: tl.constexpr, OUT_TYPE: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    num_m, num_n, num_k = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_order(tile, num_m, num_n, GROUP_M)
        first_row, first_column = tile_m * BM, tile_n * BN
        row = first_row + tl.arange(0, BM)
        column = first_column + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(num_k):
            a = a_desc.load([first_row, k * BK])
            b = b_desc.load([first_column, k * BK])
            if A_SCALE == _GROUPED or B_SCALE >= _GROUPED:
                part = tl.dot(a, b.T)
                if A_SCALE == _GROUPED:
                    part *= tl.load(sa_ptr + row * sa_stride + k, row < M, other=0.0)[:, None]
                if B_SCALE == _GROUPED:
                    part *= tl.load(sb_ptr + column * sb_stride + k, column < N, other=0.0)[None, :]
                elif B_SCALE == _SQUARE:
                    part *= tl.load(sb_ptr + (column // 128) * sb_stride + k, column < N, other=0.0)[None, :]
                acc += part
            else:
                acc = tl.dot(a, b.T, acc)
        if A_SCALE == _SCALAR:
            acc *= tl.load(sa_ptr)
        elif A_SCALE == _VECTOR:
            acc *= tl.load(sa_ptr + row, row < M, other=0.0)[:, None]
        if B_SCALE == _SCALAR:
            acc *= tl.load(sb_ptr)
        elif B_SCALE == _VECTOR:
            acc *= tl.load(sb_ptr + column, column < N, other=0.0)[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + column, column < N, other=0.0).to(tl.float32)[None, :]
        if NORM:  # columns beyond N are zero and add nothing to the sum
            width = tl.minimum(N - first_column, BN).to(tl.float32)
            rstd = tl.rsqrt(tl.sum(acc * acc, 1) / width + _EPS)
            acc *= rstd[:, None]
            if KEEP:
                tl.store(rstd_ptr + row * num_n + tile_n, rstd, row < M)
        if KEEP:
            if NORM:
                kept = to_fp8(acc, 1.0 / _Z_SCALE, 0, False, False, PREROUND, True)
            else:
                kept = acc.to(tl.bfloat16)
            _store(z_desc, z_ptr, kept, row, column, M, N, first_row, first_column, TMA_N)
        y = activate(acc, ACTIVATION)
        if OUT == _OUT_16BIT:
            _store(y_desc, y_ptr, y.to(OUT_TYPE), row, column, M, N, first_row, first_column, TMA_N)
        elif OUT == _OUT_GROUPED:
            GROUPS: tl.constexpr = BN // 128
            wide = tl.cdiv(N, 128)
            group = tile_n * GROUPS + tl.arange(0, GROUPS)
            grouped = tl.reshape(y, (BM, GROUPS, 128))
            scale = scale_of(tl.max(finite_magnitude(grouped), 2), OUT_E5M2, OUT_POW2)
            tl.store(ys_ptr + row[:, None] * wide + group[None, :], scale, (row < M)[:, None] & (group < wide)[None, :])
            q = to_fp8(grouped, inverse(scale)[:, :, None], 0, OUT_E5M2, False, PREROUND, NORM)
            q = tl.reshape(q, (BM, BN))
            _store(y_desc, y_ptr, q, row, column, M, N, first_row, first_column, TMA_N)
            if (
                TRANSPOSE
            ):  # groups of 128 along M: the tile is 128 rows high; rows beyond M hold the bias and must not count
                y = tl.where((row < M)[:, None], y, 0.0)
                t_scale = scale_of(tl.max(finite_magnitude(y), 0), OUT_E5M2, OUT_POW2)
                tl.store(yts_ptr + column * num_m + tile_m, t_scale, column < N)
                qt = tl.trans(to_fp8(y, inverse(t_scale)[None, :], 0, OUT_E5M2, False, PREROUND, NORM))
                _store(yt_desc, yt_ptr, qt, column, row, N, M, first_column, first_row, TMA_M)
        else:
            q = to_fp8(y, inverse(tl.load(out_scale_ptr)), 0, OUT_E5M2, False, PREROUND, NORM)
            _store(y_desc, y_ptr, q, row, column, M, N, first_row, first_column, TMA_N)
            if TRANSPOSE:
                _store(yt_desc, yt_ptr, tl.trans(q), column, row, N, M, first_column, first_row, TMA_M)


@triton.jit
def _gradient(dy_ptr, z_ptr, rstd_ptr, scale_ptr, g_ptr, gs_ptr, gt_ptr, gts_ptr, bias_ptr, amax_ptr, M, N, stride_dy,
              BM: tl.constexpr, BN: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
              GROUPS: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr, T_E5M2: tl.constexpr, T_POW2: tl.constexpr,
              PREROUND: tl.constexpr):  # fmt: skip
    tile_m, tile_n = tl.program_id(0), tl.program_id(1)
    num_m, num_n = tl.num_programs(0), tl.num_programs(1)
    row = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
    column = tile_n * BN + tl.arange(0, BN)
    inside = (row < M)[:, None] & (column < N)[None, :]
    g = tl.load(dy_ptr + row[:, None] * stride_dy + column[None, :], inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row[:, None] * N + column[None, :], inside, other=0.0).to(tl.float32)
    if NORM:
        z *= _Z_SCALE
    g *= activation_slope(z, ACTIVATION)
    if NORM:
        width = tl.minimum(N - tile_n * BN, BN).to(tl.float32)
        rstd = tl.load(rstd_ptr + row * num_n + tile_n, row < M, other=0.0)
        g = rstd[:, None] * (g - z * (tl.sum(g * z, 1) / width)[:, None])
    magnitude = finite_magnitude(g)
    tl.atomic_max(amax_ptr, tl.max(magnitude).to(tl.int32, bitcast=True), sem="relaxed")
    if BIAS:
        tl.atomic_add(bias_ptr + column, tl.sum(g, 0), column < N, sem="relaxed")
    if GROUPS == 0:
        inv = inverse(tl.load(scale_ptr))
        q = to_fp8(g, inv, 0, E5M2, False, PREROUND)
        if T_E5M2 == E5M2:
            qt = tl.trans(q)
        else:
            qt = tl.trans(to_fp8(g, inv, 0, T_E5M2, False, PREROUND))
    else:
        wide = tl.cdiv(N, 128)
        group = tile_n * GROUPS + tl.arange(0, GROUPS)
        grouped = tl.reshape(g, (BM, GROUPS, 128))
        scale = scale_of(tl.max(finite_magnitude(grouped), 2), E5M2, POW2)
        tl.store(gs_ptr + row[:, None] * wide + group[None, :], scale, (row < M)[:, None] & (group < wide)[None, :])
        q = tl.reshape(to_fp8(grouped, inverse(scale)[:, :, None], 0, E5M2, False, PREROUND), (BM, BN))
        t_scale = scale_of(tl.max(magnitude, 0), T_E5M2, T_POW2)
        tl.store(gts_ptr + column * num_m + tile_m, t_scale, column < N)
        qt = tl.trans(to_fp8(g, inverse(t_scale)[None, :], 0, T_E5M2, False, PREROUND))
    tl.store(g_ptr + row[:, None] * N + column[None, :], q, inside)
    tl.store(gt_ptr + column.to(tl.int64)[:, None] * M + row[None, :], qt, tl.trans(inside))


def _tile_width(n: int, norm: bool, grouped: bool) -> int:
    """The norm block, or less where the whole layer is narrower."""
    return NORM_BLOCK if n > 128 else (128 if grouped or n > 64 else 64)


_TL = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _descriptor(x: Tensor | None, block: list[int], aligned: bool):
    return TensorDescriptor.from_tensor(x, block) if x is not None and aligned else None


def fused(
    a: Tensor,
    b: Tensor,
    sa: Tensor,
    sb: Tensor,
    bias: Tensor | None,
    out_scale: Tensor | None,
    *,
    a_source: int,
    b_source: int,
    norm: bool,
    activation: int,
    out: int,
    out_dtype: torch.dtype,
    pow2: bool,
    keep: bool,
    transpose: bool,
) -> dict[str, Tensor | None]:
    """Launch the fused layer. K is a multiple of 16; see the module docstring."""
    m, k = a.shape
    n = b.shape[0]
    new = {"device": a.device}
    grouped = out == OUT_GROUPED
    bn = _tile_width(n, norm, grouped)
    # Grouped scales of an operand need a second accumulator: half the tile height. Groups of the transpose need 128 rows.
    doubled = a_source == GROUPED or b_source >= GROUPED
    few = triton.cdiv(m, 128) * triton.cdiv(n, bn) * 2 <= processors(a.device)
    bm = 64 if (doubled or few) and not (grouped and transpose) else 128
    blocks = triton.cdiv(n, bn)
    y = torch.empty(m, n, dtype=out_dtype, **new)
    y_t = torch.empty(n, m, dtype=out_dtype, **new) if transpose else None
    y_scale = torch.empty(m, triton.cdiv(n, 128), dtype=torch.float32, **new) if grouped else None
    yt_scale = torch.empty(n, triton.cdiv(m, 128), dtype=torch.float32, **new) if grouped and transpose else None
    z = torch.empty(m, n, dtype=torch.float8_e4m3fn if norm else torch.bfloat16, **new) if keep else None
    rstd = torch.empty(m, blocks, dtype=torch.float32, **new) if keep and norm else None
    programs = min(processors(a.device), triton.cdiv(m, bm) * blocks)
    bk, tma_n, tma_m = 128, n % 16 == 0, m % 16 == 0
    _fused[(programs,)](
        TensorDescriptor.from_tensor(a, [bm, bk]), TensorDescriptor.from_tensor(b, [bn, bk]),
        _descriptor(y, [bm, bn], tma_n), y, _descriptor(y_t, [bn, bm], tma_m), y_t, _descriptor(z, [bm, bn], tma_n), z,
        sa, sb, bias, out_scale, y_scale, yt_scale, rstd, m, n, k,
        sa.stride(0) if a_source == GROUPED else 0, sb.stride(0) if b_source >= GROUPED else 0,
        bm, bn, bk, 8, programs, a_source, b_source, bias is not None, norm, activation,
        out, out_dtype == torch.float8_e5m2, pow2, keep, transpose, tma_n, tma_m,
        _TL.get(out_dtype, tl.bfloat16), INTERPRETED, num_warps=8 if bm * bn > 64 * 128 else 4, num_stages=3 if bn == 256 else 4,
    )  # fmt: skip
    return {"y": y, "y_scale": y_scale, "y_t": y_t, "yt_scale": yt_scale, "z": z, "rstd": rstd}


def gradient(
    dy: Tensor,
    z: Tensor,
    rstd: Tensor | None,
    scale: Tensor | None,
    *,
    norm: bool,
    activation: int,
    bias: bool,
    dtype: torch.dtype,
    t_dtype: torch.dtype,
    pow2: bool,
    t_pow2: bool,
) -> dict[str, Tensor | None]:
    """Launch the backward kernel: a given `scale` for both outputs, or 1x128 groups of each made in the tile."""
    m, n = dy.shape
    grouped = scale is None
    new = {"device": dy.device}
    bn = _tile_width(n, norm, grouped)
    bm = 128 if grouped else 64
    g, g_t = torch.empty(m, n, dtype=dtype, **new), torch.empty(n, m, dtype=t_dtype, **new)
    g_scale = torch.empty(m, triton.cdiv(n, 128), dtype=torch.float32, **new) if grouped else None
    gt_scale = torch.empty(n, triton.cdiv(m, 128), dtype=torch.float32, **new) if grouped else None
    sums = torch.zeros(n, dtype=torch.float32, **new) if bias else None
    amax = torch.zeros((), dtype=torch.float32, **new)
    _gradient[(triton.cdiv(m, bm), triton.cdiv(n, bn))](
        dy, z, rstd, scale, g, g_scale, g_t, gt_scale, sums, amax.view(torch.int32), m, n, dy.stride(0),
        bm, bn, norm, activation, bias, bn // 128 if grouped else 0,
        dtype == torch.float8_e5m2, pow2, t_dtype == torch.float8_e5m2, t_pow2, INTERPRETED,
        num_warps=16 if bm * bn > 64 * 256 else 8,
    )  # fmt: skip
    return {"g": g, "g_scale": g_scale, "g_t": g_t, "gt_scale": gt_scale, "bias": sums, "amax": amax}


__all__ = ["OUT_16BIT", "OUT_GROUPED", "OUT_STATIC", "SCALAR", "fused", "gradient"]
