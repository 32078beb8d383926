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
from loka.kernels.quantize.triton_kernels import _scales, aligned, block_scales
from loka.kernels.scaled_mm.triton_kernels import GROUPED, SCALAR, processors, scale_strides, tma_ready
from loka.kernels.tile import (
    INTERPRETED,
    activate,
    activation_slope,
    finite_magnitude,
    inverse,
    larger,
    largest_magnitude,
    nan_for_inf,
    pack_rows,
    pack_rows_checked,
    scale_of,
    slope_from_output,
    tile_order,
    to_fp8,
)

_SCALAR = tl.constexpr(1)
_VECTOR = tl.constexpr(2)
_GROUPED = tl.constexpr(3)
_SQUARE = tl.constexpr(4)
_EPS = tl.constexpr(NORM_EPS)
_Z_SCALE = tl.constexpr(NORMALIZED_SCALE)

_SHARED_MEMORY = 227 * 1024 - 2048  # of a Hopper multiprocessor for one program, less barriers and reductions
_GRADIENT_LAUNCH = {"num_warps": 4}
_GRADIENT_LAUNCH_GROUPED = {"num_warps": 16}
_GRADIENT_ROWS = 32

# How the output is written.
OUT_16BIT, OUT_STATIC, OUT_GROUPED = 0, 1, 2
_OUT_16BIT = tl.constexpr(0)
_OUT_GROUPED = tl.constexpr(2)

# How forward writes z (0: not at all), and as which type.
_KEEP_NORMALIZED = tl.constexpr(1)
_KEEP_SCALED = tl.constexpr(2)
_KEEP_BF16 = tl.constexpr(3)
KEEP_TYPES = {1: torch.float8_e4m3fn, 2: torch.float8_e4m3fn, 3: torch.bfloat16}

# How backward reads z: in 16 bits (0), in E4M3 with the norm's scale or one of its own, as y in E4M3, not at all.
_Z_NORMALIZED = tl.constexpr(1)
_Z_SCALED = tl.constexpr(2)
_Z_OUTPUT = tl.constexpr(3)
_Z_NONE = tl.constexpr(4)


@triton.jit
def raise_amax(x, inside, amax_ptr, PREROUND: tl.constexpr):
    """Raise a float32 buffer, seen as int32, to the largest finite |x| of the rows inside: bits of numbers >= 0 are ordered like the numbers.

    One instruction an element where all is finite; special values, which leave no trace, are looked for only in a tile that has some.
    """
    largest = largest_magnitude(tl.where(inside, largest_magnitude(x, 1, PREROUND), 0.0), 0, PREROUND)
    if not (largest < float("inf")):
        largest = tl.max(tl.where(inside, tl.max(finite_magnitude(x), 1), 0.0))
    tl.atomic_max(amax_ptr, largest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _fused(a_desc, b_desc, y_desc, yt_desc, z_desc,
           sa_ptr, sb_ptr, bias_ptr, out_scale_ptr, ys_ptr, yts_ptr, rstd_ptr, amax_ptr, M, N, K, sa_stride, sa_stride_k, sb_stride, sb_stride_k,
           BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, PROGRAMS: tl.constexpr,
           A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr,
           OUT: tl.constexpr, OUT_E5M2: tl.constexpr, OUT_POW2: tl.constexpr, KEEP: tl.constexpr, TRANSPOSE: tl.constexpr,
           AMAX: tl.constexpr, SLOPE: tl.constexpr, OUT_TYPE: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
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
                    part *= tl.load(sa_ptr + row * sa_stride + k * sa_stride_k, row < M, other=0.0)[:, None]
                if B_SCALE == _GROUPED:
                    part *= tl.load(sb_ptr + column * sb_stride + k * sb_stride_k, column < N, other=0.0)[None, :]
                elif B_SCALE == _SQUARE:
                    part *= tl.load(sb_ptr + (column // 128) * sb_stride + k * sb_stride_k, column < N, other=0.0)[
                        None, :
                    ]
                acc += part
            else:
                acc = tl.dot(a, b.T, acc)
        # Scales that are constant along a row join the norm's factor: one product an element instead of three.
        factor = tl.full((BM,), 1.0, tl.float32)
        if A_SCALE == _SCALAR:
            factor *= tl.load(sa_ptr)
        elif A_SCALE == _VECTOR:
            factor *= tl.load(sa_ptr + row, row < M, other=0.0)
        if B_SCALE == _SCALAR:
            factor *= tl.load(sb_ptr)
        elif B_SCALE == _VECTOR:
            acc *= tl.load(sb_ptr + column, column < N, other=0.0)[None, :]
        if BIAS:
            acc = acc * factor[:, None] + tl.load(bias_ptr + column, column < N, other=0.0).to(tl.float32)[None, :]
            factor = tl.full((BM,), 1.0, tl.float32)
        if NORM:  # columns beyond N are zero and add nothing to the sum
            width = tl.minimum(N - first_column, BN).to(tl.float32)
            rms = factor * tl.sqrt(tl.sum(acc * acc, 1) / width)  # factor^2 could overflow
            rstd = tl.rsqrt(rms * rms + _EPS)
            if KEEP == _KEEP_NORMALIZED:
                tl.store(rstd_ptr + row * num_n + tile_n, rstd, row < M)
            factor *= rstd
        acc *= factor[:, None]
        if AMAX:  # rows beyond M hold the bias and must not count
            raise_amax(acc, row < M, amax_ptr, PREROUND)
        if KEEP == _KEEP_NORMALIZED:
            kept = to_fp8(acc, 1.0 / _Z_SCALE, 0, False, False, PREROUND, True)
            z_desc.store([first_row, first_column], kept)
        elif KEEP == _KEEP_SCALED:
            kept = to_fp8(acc, inverse(tl.load(out_scale_ptr)), 0, False, False, PREROUND)
            z_desc.store([first_row, first_column], kept)
        elif KEEP == _KEEP_BF16:
            z_desc.store([first_row, first_column], acc.to(tl.bfloat16))
        y = activate(acc, ACTIVATION, PREROUND, SLOPE)
        if OUT == _OUT_16BIT:
            y_desc.store([first_row, first_column], y.to(OUT_TYPE))
        elif OUT == _OUT_GROUPED:
            GROUPS: tl.constexpr = BN // 128
            wide = tl.cdiv(N, 128)
            group = tile_n * GROUPS + tl.arange(0, GROUPS)
            grouped = tl.reshape(y, (BM, GROUPS, 128))
            scale = scale_of(tl.max(finite_magnitude(grouped), 2), OUT_E5M2, OUT_POW2)
            tl.store(ys_ptr + row[:, None] + group[None, :] * M, scale, (row < M)[:, None] & (group < wide)[None, :])
            q = to_fp8(grouped, inverse(scale)[:, :, None], 0, OUT_E5M2, False, PREROUND, NORM)
            q = tl.reshape(q, (BM, BN))
            y_desc.store([first_row, first_column], q)
            if (
                TRANSPOSE
            ):  # groups of 128 along M: the tile is 128 rows high; rows beyond M hold the bias and must not count
                y = tl.where((row < M)[:, None], y, 0.0)
                t_scale = scale_of(tl.max(finite_magnitude(y), 0), OUT_E5M2, OUT_POW2)
                tl.store(yts_ptr + column + tile_m * N, t_scale, column < N)
                qt = tl.trans(to_fp8(y, inverse(t_scale)[None, :], 0, OUT_E5M2, False, PREROUND, NORM))
                yt_desc.store([first_column, first_row], qt)
        else:
            q = to_fp8(y, inverse(tl.load(out_scale_ptr)), 0, OUT_E5M2, False, PREROUND, NORM)
            y_desc.store([first_row, first_column], q)
            if TRANSPOSE:
                yt_desc.store([first_column, first_row], tl.trans(q))


@triton.jit
def slope_of(z, z_scale_ptr, Z: tl.constexpr, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, PREROUND: tl.constexpr):
    """The activation's derivative from what was kept, as it was read."""
    if Z >= _Z_SCALED:
        z *= tl.load(z_scale_ptr)
    if Z == _Z_OUTPUT:
        return slope_from_output(z, ACTIVATION)
    else:
        return activation_slope(z, ACTIVATION, PREROUND, SLOPE)


@triton.jit
def _gradient_rows(dy_ptr, z_ptr, z_scale_ptr, rstd_ptr, row, column, M, N, stride_dy, stride_z, tile_n, num_n, BN: tl.constexpr,
                   NORM: tl.constexpr, ACTIVATION: tl.constexpr, Z: tl.constexpr, SLOPE: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """Gradient of the pre-activation for some rows of a tile."""
    inside = (row < M)[:, None] & (column < N)[None, :]
    g = tl.load(dy_ptr + row[:, None] * stride_dy + column[None, :], inside, other=0.0).to(tl.float32)
    if Z != _Z_NONE:
        z = tl.load(z_ptr + row[:, None] * stride_z + column[None, :], inside, other=0.0).to(tl.float32)
        if Z == _Z_NORMALIZED:
            z *= _Z_SCALE
        g *= slope_of(z, z_scale_ptr, Z, ACTIVATION, SLOPE, PREROUND)
    if NORM:
        width = tl.minimum(N - tile_n * BN, BN).to(tl.float32)
        rstd = tl.load(rstd_ptr + row * num_n + tile_n, row < M, other=0.0)
        g = rstd[:, None] * (g - z * (tl.sum(g * z, 1) / width)[:, None])
    return g


@triton.jit
def _store_rows(g, scale_ptr, g_ptr, gs_ptr, row, column, M, N, stride_g, gs_stride, tile_n,
                ROWS: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr,
                PREROUND: tl.constexpr, CLEAN: tl.constexpr):  # fmt: skip
    """Quantise and store some rows of a tile."""
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


@triton.jit
def _gradient(dy_ptr, z_ptr, z_scale_ptr, rstd_ptr, scale_ptr, g_ptr, gs_ptr, gt_ptr, gts_ptr, bias_ptr, amax_ptr,
              M, N, stride_dy, stride_z, stride_g, words, gs_stride, gts_stride,
              BM: tl.constexpr, BN: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, Z: tl.constexpr, SLOPE: tl.constexpr, BIAS: tl.constexpr,
              GROUPS: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr, T_E5M2: tl.constexpr, T_POW2: tl.constexpr,
              PREROUND: tl.constexpr):  # fmt: skip
    tile_m, tile_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_n = tl.num_programs(1)
    Q: tl.constexpr = BM // 4
    word = tile_m * Q + tl.arange(0, Q)
    column = tile_n * BN + tl.arange(0, BN)
    row0, row1, row2, row3 = (
        4 * word,
        4 * word + 1,
        4 * word + 2,
        4 * word + 3,
    )  # packed into words for the transpose, as in quantize
    g0 = _gradient_rows(dy_ptr, z_ptr, z_scale_ptr, rstd_ptr, row0, column, M, N, stride_dy, stride_z, tile_n, num_n, BN, NORM, ACTIVATION, Z, SLOPE, PREROUND)  # fmt: skip
    g1 = _gradient_rows(dy_ptr, z_ptr, z_scale_ptr, rstd_ptr, row1, column, M, N, stride_dy, stride_z, tile_n, num_n, BN, NORM, ACTIVATION, Z, SLOPE, PREROUND)  # fmt: skip
    g2 = _gradient_rows(dy_ptr, z_ptr, z_scale_ptr, rstd_ptr, row2, column, M, N, stride_dy, stride_z, tile_n, num_n, BN, NORM, ACTIVATION, Z, SLOPE, PREROUND)  # fmt: skip
    g3 = _gradient_rows(dy_ptr, z_ptr, z_scale_ptr, rstd_ptr, row3, column, M, N, stride_dy, stride_z, tile_n, num_n, BN, NORM, ACTIVATION, Z, SLOPE, PREROUND)  # fmt: skip
    if BIAS:
        tl.atomic_add(bias_ptr + column, tl.sum(g0 + g1 + g2 + g3, 0), column < N, sem="relaxed")
    per_column = largest_magnitude(larger(larger(tl.abs(g0), tl.abs(g1)), larger(tl.abs(g2), tl.abs(g3))), 0, PREROUND)
    total = largest_magnitude(per_column, 0, PREROUND)
    FAST: tl.constexpr = not (
        PREROUND or E5M2 or T_E5M2
    )  # as in quantize: special values are repaired by a rare branch
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


@triton.jit
def _gradient_amax(dy_ptr, z_ptr, z_scale_ptr, rstd_ptr, partial_ptr, M, N, stride_dy, stride_z,
                   BM: tl.constexpr, BN: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, Z: tl.constexpr, SLOPE: tl.constexpr,
                   PREROUND: tl.constexpr):  # fmt: skip
    """The largest finite magnitude of each tile of the gradient, for a dynamic scale of the whole tensor."""
    tile_m, tile_n, num_n = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, column = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    g = _gradient_rows(dy_ptr, z_ptr, z_scale_ptr, rstd_ptr, row, column, M, N, stride_dy, stride_z, tile_n, num_n, BN, NORM, ACTIVATION, Z, SLOPE, PREROUND)  # fmt: skip
    tl.store(partial_ptr + tile_m * num_n + tile_n, tl.max(finite_magnitude(g)))


def _tile_width(n: int, norm: bool, grouped: bool) -> int:
    """The norm block, or less where the whole layer is narrower or there is no norm to hold together."""
    if n <= 64 and not grouped:
        return 64
    return NORM_BLOCK if norm and n > 128 else 128


def _stages(bm: int, bn: int, out_dtype: torch.dtype, keep: int) -> int:
    """Loads in flight: what shared memory holds beside the tiles that wait to be stored."""
    waiting = bm * bn * (out_dtype.itemsize + (KEEP_TYPES[keep].itemsize if keep else 0))
    fit = (_SHARED_MEMORY - waiting) // ((bm + bn) * 128)
    return min(fit, 3 if bm == 128 and bn == 256 else 4)


_TL = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _descriptor(x: Tensor | None, block: list[int]):
    return None if x is None else TensorDescriptor.from_tensor(x, block)


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
    keep: int,
    transpose: bool,
    amax: Tensor | None = None,
    slope: float = 0.01,
    tile: tuple[int, int, int] | None = None,
) -> dict[str, Tensor | None]:
    """Launch the fused layer. Rows of a and b start at multiples of 16 bytes (TMA)."""
    m, k = a.shape
    n = b.shape[0]
    new = {"device": a.device}
    grouped = out == OUT_GROUPED
    bn = _tile_width(n, norm, grouped)
    # Grouped scales of an operand need a second accumulator: half the tile height. Groups of the transpose need 128 rows.
    doubled = a_source == GROUPED or b_source >= GROUPED
    few = triton.cdiv(m, 128) * triton.cdiv(n, bn) * 2 <= processors(a.device)
    bm = 64 if (doubled or few or out_dtype == torch.float32) and not (grouped and transpose) else 128
    bm, warps, stages = tile or (
        bm,
        8 if (bm == 128 and bn == 256) or doubled else 4,
        _stages(bm, bn, out_dtype, keep),
    )
    a, b = tma_ready(a), tma_ready(b)
    blocks = triton.cdiv(n, bn)
    y = aligned(m, n, out_dtype, a.device)
    y_t = aligned(n, m, out_dtype, a.device) if transpose else None
    y_scale = block_scales(m, n, GROUPED, a.device) if grouped else None
    yt_scale = block_scales(n, m, GROUPED, a.device) if grouped and transpose else None
    z = aligned(m, n, KEEP_TYPES[keep], a.device) if keep else None
    rstd = torch.empty(m, blocks, dtype=torch.float32, **new) if keep and norm else None
    raised = None if amax is None else amax.view(torch.int32)
    programs = min(processors(a.device), triton.cdiv(m, bm) * blocks)
    bk = 128
    _fused[(programs,)](
        TensorDescriptor.from_tensor(a, [bm, bk]), TensorDescriptor.from_tensor(b, [bn, bk]),
        _descriptor(y, [bm, bn]), _descriptor(y_t, [bn, bm]), _descriptor(z, [bm, bn]),
        sa, sb, bias, out_scale, y_scale, yt_scale, rstd, raised, m, n, k,
        *scale_strides(sa), *scale_strides(sb),
        bm, bn, bk, 8, programs, a_source, b_source, bias is not None, norm, activation,
        out, out_dtype == torch.float8_e5m2, pow2, keep, transpose, amax is not None, slope,
        _TL.get(out_dtype, tl.bfloat16), INTERPRETED, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return {"y": y, "y_scale": y_scale, "y_t": y_t, "yt_scale": yt_scale, "z": z, "rstd": rstd}


def gradient(
    dy: Tensor,
    z: Tensor | None,
    z_scale: Tensor | None,
    rstd: Tensor | None,
    scale: Tensor | None,
    *,
    norm: bool,
    activation: int,
    kept: int,
    slope: float,
    bias: bool,
    grouped: bool,
    dtype: torch.dtype,
    t_dtype: torch.dtype,
    pow2: bool,
    t_pow2: bool,
) -> dict[str, Tensor | None]:
    """Launch the backward kernel: one `scale` for both outputs, given or found by a pass before; or 1x128 groups of each made in the tile."""
    m, n = dy.shape
    new = {"device": dy.device}
    stride_z = 0 if z is None else z.stride(0)
    bn = _tile_width(n, norm, grouped)
    bm = 128 if grouped else _GRADIENT_ROWS
    tiles = (triton.cdiv(m, bm), triton.cdiv(n, bn))
    if scale is None and not grouped:  # reads dy and z once more: 8 % of the layer's backward at 8192 x 2048 x 2048
        partial = torch.empty(tiles[0] * tiles[1], dtype=torch.float32, **new)
        scale = torch.empty((), dtype=torch.float32, **new)
        e5m2 = dtype == torch.float8_e5m2
        _gradient_amax[tiles](
            dy, z, z_scale, rstd, partial, m, n, dy.stride(0), stride_z, bm, bn, norm, activation, kept, slope, INTERPRETED, num_warps=8
        )  # fmt: skip
        _scales[(1,)](partial, scale, partial.numel(), 1, 4096, 1, e5m2, pow2)
    g, g_t = aligned(m, n, dtype, dy.device), aligned(n, m, t_dtype, dy.device)
    g_scale = block_scales(m, n, GROUPED, dy.device) if grouped else None
    gt_scale = block_scales(n, m, GROUPED, dy.device) if grouped else None
    sums = torch.zeros(n, dtype=torch.float32, **new) if bias else None
    amax = torch.zeros((), dtype=torch.float32, **new)
    words = g_t.stride(0) // 4
    _gradient[tiles](
        dy, z, z_scale, rstd, scale, g, g_scale, torch.as_strided(g_t, (n, words * 4), (words * 4, 1)).view(torch.int32), gt_scale,
        sums, amax.view(torch.int32), m, n, dy.stride(0), stride_z, g.stride(0), words, m, n,
        bm, bn, norm, activation, kept, slope, bias, bn // 128 if grouped else 0,
        dtype == torch.float8_e5m2, pow2, t_dtype == torch.float8_e5m2, t_pow2, INTERPRETED,
        **(_GRADIENT_LAUNCH_GROUPED if grouped else _GRADIENT_LAUNCH),
    )  # fmt: skip
    if not grouped:
        g_scale = gt_scale = scale
    return {"g": g, "g_scale": g_scale, "g_t": g_t, "gt_scale": gt_scale, "bias": sums, "amax": amax}


__all__ = ["OUT_16BIT", "OUT_GROUPED", "OUT_STATIC", "SCALAR", "fused", "gradient"]
