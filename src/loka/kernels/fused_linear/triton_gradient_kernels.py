"""From a 16-bit dy to the gradient of the GEMM's output, quantized both ways.

One kernel reads dy and what forward kept once, and writes g for dgrad and g^T for wgrad: FP8 tensor cores require both
operands to be contiguous along the contracted axis. A dynamic scale of the whole tensor takes another pass before it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.dropout import draw_numbers
from loka.kernels.fused_linear.call import NORM_BLOCK, NORMALIZED_SCALE
from loka.kernels.fused_linear.triton_kernels import aligned_maker, row_step
from loka.kernels.plans import planned
from loka.kernels.quantize.triton_kernels import scales_maker
from loka.kernels.quantize.triton_maxima_kernels import bind_total
from loka.kernels.scaled_mm.triton_kernels import GROUPED
from loka.kernels.strides import Maker, cdiv, maker
from loka.kernels.tile import (
    INTERPRETED,
    activation_slope,
    drawn,
    finite_magnitude,
    inverse,
    larger,
    largest_magnitude,
    nan_for_inf,
    pack_rows,
    pack_rows_checked,
    scale_of,
    slope_from_output,
    to_fp8,
)
from loka.kernels.triton_bound import Bound, bind
from loka.kernels.triton_launcher import quick

_Z_SCALE = tl.constexpr(NORMALIZED_SCALE)
_LAUNCH = {"num_warps": 4}
_LAUNCH_GROUPED = {"num_warps": 16}
_ROWS = 32

# How backward reads z: 16-bit (0), E4M3 with the norm's scale, E4M3 with its own scale, y in E4M3, not at all.
_Z_NORMALIZED = tl.constexpr(1)
_Z_SCALED = tl.constexpr(2)
_Z_OUTPUT = tl.constexpr(3)
_Z_NONE = tl.constexpr(4)

# How backward gets dropout's mask (0: no dropout): it draws again, or the kept y is zero where forward dropped.
DROP_DRAWN, DROP_IN_OUTPUT = 1, 2
_DROP_DRAWN = tl.constexpr(1)
_DROP_IN_OUTPUT = tl.constexpr(2)


@triton.jit
def slope_of(z, z_scale, Z: tl.constexpr, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, PREROUND: tl.constexpr):
    """Return the activation's derivative from what forward kept, as loaded."""
    if Z >= _Z_SCALED:
        z *= z_scale
    if Z == _Z_OUTPUT:
        return slope_from_output(z, ACTIVATION)
    else:
        return activation_slope(z, ACTIVATION, PREROUND, SLOPE)


@triton.jit
def _gradient_rows(dy_ptr, z_ptr, z_scale_ptr, rstd_ptr, seed_ptr, threshold, upscale, stream, row, column, M, N, stride_dy, stride_z, tile_n, num_n,
                   BN: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, Z: tl.constexpr, SLOPE: tl.constexpr, DROP: tl.constexpr,
                   PREROUND: tl.constexpr):  # fmt: skip
    """Return the gradient of the GEMM's output for some rows of a tile."""
    inside = (row < M)[:, None] & (column < N)[None, :]
    g = tl.load(dy_ptr + row[:, None] * stride_dy + column[None, :], inside, other=0.0).to(tl.float32)
    if DROP == _DROP_DRAWN:
        g *= drawn(tl.load(seed_ptr), row, column, stream, threshold, upscale)
    elif DROP == _DROP_IN_OUTPUT:
        g *= upscale
    if Z != _Z_NONE:
        z = tl.load(z_ptr + row[:, None] * stride_z + column[None, :], inside, other=0.0).to(tl.float32)
        z_scale = 1.0
        if Z == _Z_NORMALIZED:
            z *= _Z_SCALE
        elif Z >= _Z_SCALED:
            z_scale = tl.load(z_scale_ptr)
        g *= slope_of(z, z_scale, Z, ACTIVATION, SLOPE, PREROUND)
    if NORM:
        width = tl.minimum(N - tile_n * BN, BN).to(tl.float32)
        rstd = tl.load(rstd_ptr + row * num_n + tile_n, row < M, other=0.0)
        g = rstd[:, None] * (g - z * (tl.sum(g * z, 1) / width)[:, None])
    return g


@triton.jit
def _store_rows(g, scale_ptr, g_ptr, gs_ptr, row, column, M, N, stride_g, gs_stride, tile_n,
                ROWS: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr,
                PREROUND: tl.constexpr, CLEAN: tl.constexpr):  # fmt: skip
    """Quantize and store some rows of a tile."""
    if GROUPS == 0:
        q = to_fp8(g, inverse(tl.load(scale_ptr)), 0, E5M2, False, PREROUND, CLEAN)
    else:
        group = tile_n * GROUPS + tl.arange(0, GROUPS)
        grouped = tl.reshape(g, (ROWS, GROUPS, 128))
        amax = tl.max(tl.abs(grouped), 2) if CLEAN else tl.max(finite_magnitude(grouped), 2)
        scale = scale_of(amax, E5M2, POW2)
        there = (row < M)[:, None] & (group < tl.cdiv(N, 128))[None, :]
        tl.store(gs_ptr + row[:, None] + group.to(tl.int64)[None, :] * gs_stride, scale, there)
        q = tl.reshape(to_fp8(grouped, inverse(scale)[:, :, None], 0, E5M2, False, PREROUND, CLEAN), (ROWS, BN))
    tl.store(g_ptr + row[:, None] * stride_g + column[None, :], q, (row < M)[:, None] & (column < N)[None, :])


@triton.jit
def _column_inverse(
    per_column,
    scale_ptr,
    gts_ptr,
    column,
    N,
    gts_stride,
    tile_m,
    GROUPS: tl.constexpr,
    T_E5M2: tl.constexpr,
    T_POW2: tl.constexpr,
):
    if GROUPS == 0:
        return inverse(tl.load(scale_ptr))
    else:
        scale = scale_of(per_column, T_E5M2, T_POW2)
        tl.store(gts_ptr + column + tile_m * gts_stride, scale, column < N)
        return inverse(scale)[None, :]


@quick
@triton.jit(do_not_specialize=["threshold", "stream"])
def _gradient(dy_ptr, z_ptr, z_scale_ptr, rstd_ptr, scale_ptr, g_ptr, gs_ptr, gt_ptr, gts_ptr, bias_ptr, amax_ptr, seed_ptr, threshold, upscale, stream,
              M, N, stride_dy, stride_z, stride_g, words, gs_stride, gts_stride,
              BM: tl.constexpr, BN: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, Z: tl.constexpr, SLOPE: tl.constexpr, BIAS: tl.constexpr,
              GROUPS: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr, T_E5M2: tl.constexpr, T_POW2: tl.constexpr,
              DROP: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    tile_m, tile_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_n = tl.num_programs(1)
    Q: tl.constexpr = BM // 4
    word = tile_m * Q + tl.arange(0, Q)
    column = tile_n * BN + tl.arange(0, BN)
    # Packed into words for the transpose, as in `quantize`.
    row0, row1, row2, row3 = 4 * word, 4 * word + 1, 4 * word + 2, 4 * word + 3
    g0 = _gradient_rows(dy_ptr, z_ptr, z_scale_ptr, rstd_ptr, seed_ptr, threshold, upscale, stream, row0, column, M, N, stride_dy, stride_z, tile_n, num_n, BN, NORM, ACTIVATION, Z, SLOPE, DROP, PREROUND)  # fmt: skip
    g1 = _gradient_rows(dy_ptr, z_ptr, z_scale_ptr, rstd_ptr, seed_ptr, threshold, upscale, stream, row1, column, M, N, stride_dy, stride_z, tile_n, num_n, BN, NORM, ACTIVATION, Z, SLOPE, DROP, PREROUND)  # fmt: skip
    g2 = _gradient_rows(dy_ptr, z_ptr, z_scale_ptr, rstd_ptr, seed_ptr, threshold, upscale, stream, row2, column, M, N, stride_dy, stride_z, tile_n, num_n, BN, NORM, ACTIVATION, Z, SLOPE, DROP, PREROUND)  # fmt: skip
    g3 = _gradient_rows(dy_ptr, z_ptr, z_scale_ptr, rstd_ptr, seed_ptr, threshold, upscale, stream, row3, column, M, N, stride_dy, stride_z, tile_n, num_n, BN, NORM, ACTIVATION, Z, SLOPE, DROP, PREROUND)  # fmt: skip
    if BIAS:
        tl.atomic_add(bias_ptr + column, tl.sum(g0 + g1 + g2 + g3, 0), column < N, sem="relaxed")
    per_column = largest_magnitude(larger(larger(tl.abs(g0), tl.abs(g1)), larger(tl.abs(g2), tl.abs(g3))), 0, PREROUND)
    total = largest_magnitude(per_column, 0, PREROUND)
    FAST: tl.constexpr = not (PREROUND or E5M2 or T_E5M2)  # as in `quantize`: a rare branch handles special values
    if not (total < float("inf")) or PREROUND:
        low = tl.maximum(finite_magnitude(g0), finite_magnitude(g1))
        per_column = tl.max(tl.maximum(low, tl.maximum(finite_magnitude(g2), finite_magnitude(g3))), 0)
        total = tl.max(per_column)
        if FAST:
            g0, g1, g2, g3 = nan_for_inf(g0), nan_for_inf(g1), nan_for_inf(g2), nan_for_inf(g3)
    _store_rows(g0, scale_ptr, g_ptr, gs_ptr, row0, column, M, N, stride_g, gs_stride, tile_n, Q, BN, GROUPS, E5M2, POW2, PREROUND, FAST)  # fmt: skip
    _store_rows(g1, scale_ptr, g_ptr, gs_ptr, row1, column, M, N, stride_g, gs_stride, tile_n, Q, BN, GROUPS, E5M2, POW2, PREROUND, FAST)  # fmt: skip
    _store_rows(g2, scale_ptr, g_ptr, gs_ptr, row2, column, M, N, stride_g, gs_stride, tile_n, Q, BN, GROUPS, E5M2, POW2, PREROUND, FAST)  # fmt: skip
    _store_rows(g3, scale_ptr, g_ptr, gs_ptr, row3, column, M, N, stride_g, gs_stride, tile_n, Q, BN, GROUPS, E5M2, POW2, PREROUND, FAST)  # fmt: skip
    inv = _column_inverse(per_column, scale_ptr, gts_ptr, column, N, gts_stride, tile_m, GROUPS, T_E5M2, T_POW2)
    if FAST:
        packed = pack_rows(g0 * inv, g1 * inv, g2 * inv, g3 * inv)
    else:
        packed = pack_rows_checked(g0, g1, g2, g3, inv, 0, 0, 0, 0, T_E5M2, False, PREROUND)
    there = (column < N)[:, None] & (word < words)[None, :]
    tl.store(gt_ptr + column.to(tl.int64)[:, None] * words + word[None, :], tl.trans(packed), there)
    tl.atomic_max(amax_ptr, total.to(tl.int32, bitcast=True), sem="relaxed")


@quick
@triton.jit(do_not_specialize=["threshold", "stream"])
def _gradient_amax(dy_ptr, z_ptr, z_scale_ptr, rstd_ptr, partial_ptr, seed_ptr, threshold, upscale, stream, M, N, stride_dy, stride_z,
                   BM: tl.constexpr, BN: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, Z: tl.constexpr, SLOPE: tl.constexpr,
                   DROP: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """Store the amax of each tile of the gradient, for a dynamic scale of the whole tensor."""
    tile_m, tile_n, num_n = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, column = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    g = _gradient_rows(dy_ptr, z_ptr, z_scale_ptr, rstd_ptr, seed_ptr, threshold, upscale, stream, row, column, M, N, stride_dy, stride_z, tile_n, num_n, BN, NORM, ACTIVATION, Z, SLOPE, DROP, PREROUND)  # fmt: skip
    tl.store(partial_ptr + tile_m * num_n + tile_n, tl.max(finite_magnitude(g)))


def _tile_width(n: int, norm: bool, grouped: bool) -> int:
    """Return the norm block's width, or less if the layer is narrower or has no norm."""
    if n <= 64 and not grouped:
        return 64
    return NORM_BLOCK if norm and n > 128 else 128


class _Plan(NamedTuple):
    """Makers of the results, None for the absent ones, and the launches.

    A dynamic scale of the whole tensor takes two more launches: maxima of tiles (`partial`), and the scale of them.
    """

    g: Maker
    g_scale: Maker | None
    g_t: Maker
    gt_scale: Maker | None
    sums: Maker | None
    number: Maker
    partial: Maker | None
    find: Bound
    reduce: Bound
    launch: Bound


@planned
def _plan(
    shape: tuple[int, int], stride: int, device: torch.device, z_stride: int, given: bool, norm: bool, activation: int, kept: int, slope: float, bias: bool, grouped: bool,
    dtype: torch.dtype, t_dtype: torch.dtype, pow2: bool, t_pow2: bool, draw: bool, p: float, stream: int, drop: int,
) -> _Plan:  # fmt: skip
    m, n = shape
    bn = _tile_width(n, norm, grouped)
    bm = 128 if grouped else _ROWS
    tiles = (cdiv(m, bm), cdiv(n, bn))
    wide, words = (cdiv(size, row_step(size, kind)) * row_step(size, kind) for size, kind in ((n, dtype), (m, t_dtype)))
    numbers, e5m2 = draw_numbers(p, stream, draw=draw), dtype == torch.float8_e5m2
    new = {"dtype": torch.float32, "device": device}
    return _Plan(
        g=aligned_maker(m, n, dtype, device),
        g_scale=scales_maker(m, n, GROUPED, device) if grouped else None,
        g_t=aligned_maker(n, m, t_dtype, device),
        gt_scale=scales_maker(n, m, GROUPED, device) if grouped else None,
        sums=maker((n,), **new) if bias else None,
        number=maker((), **new),
        partial=None if given or grouped else maker((tiles[0] * tiles[1],), **new),
        find=bind(_gradient_amax, tiles, *numbers, m, n, stride, z_stride, bm, bn, norm, activation, kept, slope, drop, INTERPRETED, num_warps=8),
        reduce=bind_total(tiles[0] * tiles[1], e5m2, pow2),
        launch=bind(
            _gradient, tiles, *numbers, m, n, stride, z_stride, wide, words // 4, m, n, bm, bn, norm, activation, kept, slope, bias, bn // 128 if grouped else 0,
            e5m2, pow2, t_dtype == torch.float8_e5m2, t_pow2, drop, INTERPRETED, views={7: torch.int32, 10: torch.int32}, **(_LAUNCH_GROUPED if grouped else _LAUNCH),
        ),
    )  # fmt: skip


def fused_linear_gradient(
    dy: Tensor, z: Tensor | None, z_scale: Tensor | None, rstd: Tensor | None, scale: Tensor | None,
    norm: bool, activation: int, kept: int, slope: float, bias: bool, grouped: bool, dtype: torch.dtype, t_dtype: torch.dtype, pow2: bool, t_pow2: bool,
    seed: Tensor | None, p: float, stream: int, drop: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return g, g_scale, g_t, gt_scale, bias, amax.

    Both outputs share one `scale`, given or found by a first pass, or each has 1x128 scales made in the tile
    (`grouped`). An op's outputs may alias nothing, so a given scale is not returned, and a shared one only as g_scale.
    """
    plan = _plan(
        dy.shape, dy.stride(0), dy.device, 0 if z is None else z.stride(0), scale is not None,
        norm, activation, kept, slope, bias, grouped, dtype, t_dtype, pow2, t_pow2, seed is not None, p, stream, drop,
    )  # fmt: skip
    made = plan.g_scale and plan.g_scale()
    if plan.partial is not None:  # reads dy and z once more: 8 % of the layer's backward at 8192 x 2048 x 2048
        partial, made = plan.partial(), plan.number()
        plan.find(dy, z, z_scale, rstd, partial, seed)
        plan.reduce(partial, made, None, None)
        scale = made
    g, g_t, gt_scale = plan.g(), plan.g_t(), plan.gt_scale and plan.gt_scale()
    sums = None if plan.sums is None else plan.sums().zero_()
    amax = plan.number().zero_()
    plan.launch(dy, z, z_scale, rstd, scale, g, made if grouped else None, g_t, gt_scale, sums, amax, seed)
    return g, made, g_t, gt_scale, sums, amax
