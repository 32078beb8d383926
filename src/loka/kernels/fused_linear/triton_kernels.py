"""FP8 GEMM whose epilogue is the rest of the layer.

A tile holds whole norm blocks, so the norm needs no communication. After a norm |z| <= 16 and a static scale is safe;
without one the caller passes a calibrated or delayed scale, and the epilogue collects the amax of z for the next one.
Either way it writes FP8 directly: the layer costs what the bare GEMM costs.

For training the same epilogue also writes what backward needs of z, rstd, and the transpose of y: the next wgrad
contracts over rows, and FP8 tensor cores require both operands to be contiguous along the contracted axis.

Tiles that do not fill the GPU are split along K (`launch.split`): partial sums are written in float32, and `_finish`
adds them and runs the same epilogue.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.activation import ACTIVATIONS
from loka.kernels.dropout import draw_numbers
from loka.kernels.fused_linear.call import NORM_BLOCK, NORM_EPS, NORMALIZED_SCALE
from loka.kernels.fused_linear.launch import Launch, Work, problems, properties_of, rank, special_cost, stored_width
from loka.kernels.plans import planned
from loka.kernels.quantize.triton_kernels import scales_maker
from loka.kernels.scaled_mm.triton_kernels import GROUPED, scale_strides, tma_ready
from loka.kernels.strides import Maker, cdiv, empty_rows, maker, rows_maker
from loka.kernels.tile import (
    INTERPRETED,
    activate,
    drawn,
    finite_magnitude,
    inverse,
    largest_magnitude,
    scale_of,
    tile_order,
    to_fp8,
)
from loka.kernels.triton_bound import Bound, bind
from loka.kernels.triton_launcher import quick

_SCALAR = tl.constexpr(1)
_VECTOR = tl.constexpr(2)
_GROUPED = tl.constexpr(3)
_SQUARE = tl.constexpr(4)
_EPS = tl.constexpr(NORM_EPS)
_Z_SCALE = tl.constexpr(NORMALIZED_SCALE)
FINISH_ROWS = 16  # rows per program of `_finish`

# How y is written.
OUT_16BIT, OUT_STATIC, OUT_GROUPED = 0, 1, 2
_OUT_16BIT = tl.constexpr(0)
_OUT_STATIC = tl.constexpr(1)
_OUT_GROUPED = tl.constexpr(2)

# How forward writes z (0: not at all), and its dtype.
_KEEP_NORMALIZED = tl.constexpr(1)
_KEEP_SCALED = tl.constexpr(2)
_KEEP_BF16 = tl.constexpr(3)
KEEP_TYPES = {1: torch.float8_e4m3fn, 2: torch.float8_e4m3fn, 3: torch.bfloat16}


@triton.jit
def raise_amax(x, inside, amax_ptr, factor, PREROUND: tl.constexpr):
    """Raise a float32 buffer, viewed as int32, to `factor` times the largest finite |x| of the rows `inside`.

    Floats >= 0 are ordered like their bits. It takes one instruction per element; only a tile with NaN or Inf is
    searched again for its finite values.
    """
    largest = largest_magnitude(tl.where(inside, largest_magnitude(x, 1, PREROUND), 0.0), 0, PREROUND)
    if not (largest < float("inf")):
        largest = tl.max(tl.where(inside, tl.max(finite_magnitude(x), 1), 0.0))
    largest *= factor
    largest = tl.where(largest < float("inf"), largest, 0.0)  # a factor may overflow, or be NaN
    tl.atomic_max(amax_ptr, largest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def accumulate(a_desc, b_desc, sa_ptr, sb_ptr, first_row, first_column, first_k, last_k, M, N, sa_stride, sa_stride_k, sb_stride, sb_stride_k,
               BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr):  # fmt: skip
    """Return a tile of a @ b^T over a range of K, in steps of BK. Only scales that vary along K are applied."""
    row = first_row + tl.arange(0, BM)
    column = first_column + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    tl.assume(last_k > first_k)  # otherwise the compiler duplicates the whole kernel for an empty loop
    for k in range(first_k, last_k):
        a = a_desc.load([first_row, k * BK])
        b = b_desc.load([first_column, k * BK])
        if A_SCALE == _GROUPED or B_SCALE >= _GROUPED:
            part = tl.dot(a, b.T)
            if A_SCALE == _GROUPED:
                part *= tl.load(sa_ptr + row * sa_stride + k * sa_stride_k, row < M, other=0.0)[:, None]
            if B_SCALE == _GROUPED:
                part *= tl.load(sb_ptr + column * sb_stride + k * sb_stride_k, column < N, other=0.0)[None, :]
            elif B_SCALE == _SQUARE:
                part *= tl.load(sb_ptr + (column // 128) * sb_stride + k * sb_stride_k, column < N, other=0.0)[None, :]
            acc += part
        else:
            acc = tl.dot(a, b.T, acc)
    return acc


@triton.jit
def number_at(ptr, THERE: tl.constexpr):
    """Load a scalar of the whole tensor, or return 1. Loaded when the program starts; `late` marks its use."""
    if THERE:
        return tl.load(ptr)
    else:
        return 1.0


@triton.jit
def late(x, PREROUND: tl.constexpr):
    """Return x, for use after the GEMM loop.

    Without it the compiler hoists what is computed from x to the start of the program, which then waits for memory
    before its first load.
    """
    if PREROUND:
        return x
    else:
        return tl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def _store(acc, tile_m, tile_n, y_desc, yt_desc, z_desc, out_inverse, ys_ptr, yts_ptr, seed, threshold, upscale, stream, M, N,
           BM: tl.constexpr, BN: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr,
           OUT: tl.constexpr, OUT_E5M2: tl.constexpr, OUT_POW2: tl.constexpr, KEEP: tl.constexpr, TRANSPOSE: tl.constexpr,
           SLOPE: tl.constexpr, OUT_TYPE: tl.constexpr, DROP: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """Compute and store everything that follows from z, for a tile or half of one."""
    first_row, first_column = tile_m * BM, tile_n * BN
    row = first_row + tl.arange(0, BM)
    column = first_column + tl.arange(0, BN)
    if KEEP == _KEEP_NORMALIZED:
        kept = to_fp8(acc, 1.0 / _Z_SCALE, 0, False, False, PREROUND, True)
        z_desc.store([first_row, first_column], kept)
    elif KEEP == _KEEP_SCALED:
        kept = to_fp8(acc, out_inverse, 0, False, False, PREROUND)
        z_desc.store([first_row, first_column], kept)
    elif KEEP == _KEEP_BF16:
        z_desc.store([first_row, first_column], acc.to(tl.bfloat16))
    y = activate(acc, ACTIVATION, PREROUND, SLOPE)
    if DROP:
        if OUT == _OUT_STATIC:  # drop by an inverse scale of 0; 1 / (1 - p) is in the scale
            out_inverse = drawn(seed, row, column, stream, threshold, out_inverse)
        else:
            y *= drawn(seed, row, column, stream, threshold, upscale)
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
        y_desc.store([first_row, first_column], tl.reshape(q, (BM, BN)))
        if TRANSPOSE:
            # Groups of 128 along M: the tile has 128 rows. Rows beyond M hold the bias and must not count.
            y = tl.where((row < M)[:, None], y, 0.0)
            t_scale = scale_of(tl.max(finite_magnitude(y), 0), OUT_E5M2, OUT_POW2)
            tl.store(yts_ptr + column + tile_m * N, t_scale, column < N)
            qt = tl.trans(to_fp8(y, inverse(t_scale)[None, :], 0, OUT_E5M2, False, PREROUND, NORM))
            yt_desc.store([first_column, first_row], qt)
    else:
        q = to_fp8(y, out_inverse, 0, OUT_E5M2, False, PREROUND, NORM)
        y_desc.store([first_row, first_column], q)
        if TRANSPOSE:
            yt_desc.store([first_column, first_row], tl.trans(q))


@triton.jit
def _write(acc, tile_m, tile_n, y_desc, yt_desc, z_desc, sa, sb, out_scale, sa_ptr, sb_ptr, bias_ptr, ys_ptr, yts_ptr, rstd_ptr, amax_ptr, seed_ptr, threshold, upscale, stream, M, N,
           BM: tl.constexpr, BN: tl.constexpr, HALVES: tl.constexpr, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr,
           OUT: tl.constexpr, OUT_E5M2: tl.constexpr, OUT_POW2: tl.constexpr, KEEP: tl.constexpr, TRANSPOSE: tl.constexpr,
           AMAX: tl.constexpr, SLOPE: tl.constexpr, OUT_TYPE: tl.constexpr, DROP: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """Run the epilogue: scales, bias, norm, amax, then `_store`."""
    first_row, first_column = tile_m * BM, tile_n * BN
    row = first_row + tl.arange(0, BM)
    column = first_column + tl.arange(0, BN)
    # Factors that are constant along a row join the norm's: one multiplication per element instead of three.
    factor = tl.full((BM,), 1.0, tl.float32)
    if A_SCALE == _SCALAR:
        factor *= late(sa, PREROUND)
    if B_SCALE == _SCALAR:
        factor *= late(sb, PREROUND)
    if A_SCALE == _VECTOR:
        factor *= tl.load(sa_ptr + row, row < M, other=0.0)
    if B_SCALE == _VECTOR:
        acc *= tl.load(sb_ptr + column, column < N, other=0.0)[None, :]
    if BIAS:
        acc = acc * factor[:, None] + tl.load(bias_ptr + column, column < N, other=0.0).to(tl.float32)[None, :]
        factor = tl.full((BM,), 1.0, tl.float32)
    if NORM:  # columns beyond N are zero and add nothing to the sum
        width = tl.minimum(N - first_column, BN).to(tl.float32)
        rms = factor * tl.sqrt(tl.sum(acc * acc, 1) / width)  # factor^2 could overflow
        rstd = tl.rsqrt(rms * rms + _EPS)
        if KEEP == _KEEP_NORMALIZED:
            tl.store(rstd_ptr + row * tl.cdiv(N, BN) + tile_n, rstd, row < M)
        factor *= rstd
    if NORM or not BIAS:
        acc *= factor[:, None]
    if AMAX:  # rows beyond M hold the bias and must not count
        raise_amax(acc, row < M, amax_ptr, 1.0, PREROUND)
    out_inverse = 1.0
    if OUT == _OUT_STATIC:
        out_inverse = inverse(late(out_scale, PREROUND))
    seed = number_at(seed_ptr, DROP)
    if HALVES:  # needs fewer registers, and less shared memory for stores, which leaves more for the pipeline
        left, right = halves(acc, BM, BN)
        _store(left, tile_m, 2 * tile_n, y_desc, yt_desc, z_desc, out_inverse, ys_ptr, yts_ptr, seed, threshold, upscale, stream, M, N,
               BM, BN // 2, NORM, ACTIVATION, OUT, OUT_E5M2, OUT_POW2, KEEP, TRANSPOSE, SLOPE, OUT_TYPE, DROP, PREROUND)  # fmt: skip
        _store(right, tile_m, 2 * tile_n + 1, y_desc, yt_desc, z_desc, out_inverse, ys_ptr, yts_ptr, seed, threshold, upscale, stream, M, N,
               BM, BN // 2, NORM, ACTIVATION, OUT, OUT_E5M2, OUT_POW2, KEEP, TRANSPOSE, SLOPE, OUT_TYPE, DROP, PREROUND)  # fmt: skip
    else:
        _store(acc, tile_m, tile_n, y_desc, yt_desc, z_desc, out_inverse, ys_ptr, yts_ptr, seed, threshold, upscale, stream, M, N,
               BM, BN, NORM, ACTIVATION, OUT, OUT_E5M2, OUT_POW2, KEEP, TRANSPOSE, SLOPE, OUT_TYPE, DROP, PREROUND)  # fmt: skip


@triton.jit
def halves(x, BM: tl.constexpr, BN: tl.constexpr):
    """Return the left and right half of a tile. Warps own whole rows of an accumulator, so no data moves."""
    return tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _store_part(acc, part_desc, first_row, BM: tl.constexpr, BN: tl.constexpr):
    """Store a tile of float32 sums, 64 columns at a time, to take little shared memory from the pipeline."""
    if BN == 256:
        left, right = halves(acc, BM, BN)
        a, b = halves(left, BM, BN // 2)
        c, d = halves(right, BM, BN // 2)
        part_desc.store([first_row, 0], a)
        part_desc.store([first_row, 64], b)
        part_desc.store([first_row, 128], c)
        part_desc.store([first_row, 192], d)
    elif BN == 128:
        left, right = halves(acc, BM, BN)
        part_desc.store([first_row, 0], left)
        part_desc.store([first_row, 64], right)
    else:
        part_desc.store([first_row, 0], acc)


@quick
@triton.jit(do_not_specialize=["whole", "split", "threshold", "stream"])
def _fused(a_desc, b_desc, y_desc, yt_desc, z_desc, part_desc, sa_ptr, sb_ptr, bias_ptr, out_scale_ptr, ys_ptr, yts_ptr, rstd_ptr, amax_ptr,
           seed_ptr, threshold, upscale, stream, M, N, K, whole, split, sa_stride, sa_stride_k, sb_stride, sb_stride_k,
           BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, HALVES: tl.constexpr, SPLITS: tl.constexpr,
           A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr,
           OUT: tl.constexpr, OUT_E5M2: tl.constexpr, OUT_POW2: tl.constexpr, KEEP: tl.constexpr, TRANSPOSE: tl.constexpr,
           AMAX: tl.constexpr, SLOPE: tl.constexpr, OUT_TYPE: tl.constexpr, DROP: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """Compute the first `whole` tiles up to y. Of the others (SPLITS) store the sums over each of `split` K parts."""
    num_m, num_n, num_k = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.cdiv(K, BK)
    sa, sb = number_at(sa_ptr, A_SCALE == _SCALAR), number_at(sb_ptr, B_SCALE == _SCALAR)
    out_scale = number_at(out_scale_ptr, OUT == _OUT_STATIC)
    if DROP and OUT == _OUT_STATIC:
        tl.store(ys_ptr, out_scale * upscale, tl.program_id(0) == 0)
    for tile in tl.range(tl.program_id(0), whole, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_order(tile, num_m, num_n, GROUP_M)
        acc = accumulate(a_desc, b_desc, sa_ptr, sb_ptr, tile_m * BM, tile_n * BN, 0, num_k, M, N,
                         sa_stride, sa_stride_k, sb_stride, sb_stride_k, BM, BN, BK, A_SCALE, B_SCALE)  # fmt: skip
        _write(acc, tile_m, tile_n, y_desc, yt_desc, z_desc, sa, sb, out_scale, sa_ptr, sb_ptr, bias_ptr, ys_ptr, yts_ptr, rstd_ptr, amax_ptr,
               seed_ptr, threshold, upscale, stream, M, N, BM, BN, HALVES, A_SCALE, B_SCALE, BIAS, NORM, ACTIVATION, OUT, OUT_E5M2, OUT_POW2, KEEP, TRANSPOSE, AMAX, SLOPE, OUT_TYPE, DROP, PREROUND)  # fmt: skip
    if SPLITS:
        for index in tl.range(tl.program_id(0), (num_m * num_n - whole) * split, tl.num_programs(0), flatten=True):
            tile_m, tile_n = tile_order(whole + index // split, num_m, num_n, GROUP_M)
            part = index % split
            acc = accumulate(a_desc, b_desc, sa_ptr, sb_ptr, tile_m * BM, tile_n * BN, part * num_k // split, (part + 1) * num_k // split, M, N,
                             sa_stride, sa_stride_k, sb_stride, sb_stride_k, BM, BN, BK, A_SCALE, B_SCALE)  # fmt: skip
            _store_part(acc, part_desc, index * BM, BM, BN)


@quick
@triton.jit(do_not_specialize=["whole", "height", "threshold", "stream"])
def _finish(part_ptr, y_desc, z_desc, sa_ptr, sb_ptr, bias_ptr, out_scale_ptr, ys_ptr, rstd_ptr, amax_ptr, seed_ptr, threshold, upscale, stream, M, N, whole, height,
            BN: tl.constexpr, ROWS: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr, HALVES: tl.constexpr,
            A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr,
            OUT: tl.constexpr, OUT_E5M2: tl.constexpr, OUT_POW2: tl.constexpr, KEEP: tl.constexpr,
            AMAX: tl.constexpr, SLOPE: tl.constexpr, OUT_TYPE: tl.constexpr, DROP: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """Add the partial sums of the split tiles and run the epilogue, for ROWS of a tile's `height` rows per program."""
    tile, slab = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = tile_order(whole + tile, tl.cdiv(M, height), tl.cdiv(N, BN), GROUP_M)
    sa, sb = number_at(sa_ptr, A_SCALE == _SCALAR), number_at(sb_ptr, B_SCALE == _SCALAR)
    out_scale = number_at(out_scale_ptr, OUT == _OUT_STATIC)
    row, column = slab * ROWS + tl.arange(0, ROWS), tl.arange(0, BN)
    acc = tl.zeros((ROWS, BN), dtype=tl.float32)
    for part in tl.static_range(SPLIT):
        acc += tl.load(part_ptr + ((tile * SPLIT + part).to(tl.int64) * height + row)[:, None] * BN + column[None, :])
    _write(acc, tile_m * (height // ROWS) + slab, tile_n, y_desc, None, z_desc, sa, sb, out_scale, sa_ptr, sb_ptr, bias_ptr, ys_ptr, None, rstd_ptr, amax_ptr,
           seed_ptr, threshold, upscale, stream, M, N, ROWS, BN, HALVES, A_SCALE, B_SCALE, BIAS, NORM, ACTIVATION, OUT, OUT_E5M2, OUT_POW2, KEEP, False, AMAX, SLOPE, OUT_TYPE, DROP, PREROUND)  # fmt: skip


def aligned(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized [rows, columns] whose rows start at multiples of 128 bytes, or of 32 if they are short.

    The next GEMM reads rows that start within a 32-byte sector at two thirds of the rate.
    """
    return empty_rows(rows, columns, row_step(columns, dtype), dtype, device)


def row_step(columns: int, dtype: torch.dtype) -> int:
    """Return the alignment of the rows of `aligned`, in elements."""
    return (128 if columns * dtype.itemsize >= 1024 else 32) // dtype.itemsize


def aligned_maker(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Maker:
    """Return a maker of what `aligned` returns."""
    return rows_maker(rows, columns, row_step(columns, dtype), dtype, device)


def launch_for(work: Work, given: tuple[int, ...] | None, device: torch.device) -> Launch:
    """Return the caller's launch, or the best by the model. Raises ValueError if it cannot run the work."""
    properties = properties_of(device)
    if given is None:
        ranked = rank(work, properties)
        if not ranked:
            raise ValueError(f"no launch of {work} fits {properties}")
        return ranked[0]
    launch = Launch(*given)
    wrong = problems(launch, work, properties)
    if wrong:
        raise ValueError(f"launch {launch} cannot run this call: {'; '.join(wrong)}")
    return launch


_TL = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class _Plan(NamedTuple):
    """Makers of the results and of the sums of split tiles, None for the absent ones, and the launches."""

    y: Maker
    y_scale: Maker | None
    y_t: Maker | None
    yt_scale: Maker | None
    z: Maker | None
    rstd: Maker | None
    part: Maker | None
    launch: Bound
    finish: Bound | None


@planned
def _plan(
    m: int, k: int, n: int, astride: bool, device: torch.device, sa_strides: tuple[int, int], sb_strides: tuple[int, int], bias: bool, amax: bool,
    a_source: int, b_source: int, norm: bool, activation: int, slope: float, form: int, out_dtype: torch.dtype, pow2: bool, keep: int, transpose: bool,
    given: tuple[int, ...] | None, draw: bool, p: float, stream: int,
) -> _Plan:  # fmt: skip
    """`astride`: rows of an operand start within 32-byte sectors."""
    grouped, doubled = form == OUT_GROUPED, a_source == GROUPED or b_source >= GROUPED
    kept_bytes = KEEP_TYPES[keep].itemsize if keep else 0
    work = Work(m, k, n, out_dtype.itemsize, kept_bytes, transpose, norm, grouped, doubled, astride=astride, special=special_cost(ACTIVATIONS[activation]))  # fmt: skip
    chosen = launch_for(work, given, device)
    bm, bn, bk, warps, stages, group, resident, split = chosen.numbers
    tiles, slots = cdiv(m, bm) * cdiv(n, bn), properties_of(device).processors * resident
    whole = tiles if split == 1 else tiles - tiles % slots
    wide = stored_width(chosen, grouped)
    numbers = draw_numbers(p, stream, draw=draw)
    shape = a_source, b_source, bias, norm, activation, form, out_dtype == torch.float8_e5m2, pow2, keep
    rest = amax, slope, _TL.get(out_dtype, tl.bfloat16), draw, INTERPRETED
    launch = bind(
        _fused, (min(slots, max(whole, (tiles - whole) * split)),), *numbers, m, n, k, whole, split, *sa_strides, *sb_strides,
        bm, bn, bk, group, wide < bn, split > 1, *shape, transpose, *rest, num_warps=warps, num_stages=stages,
        blocks={0: [bm, bk], 1: [bn, bk], 2: [bm, wide], 3: [wide, bm], 4: [bm, wide], 5: [bm, min(bn, 64)]}, views={13: torch.int32},
    )  # fmt: skip
    finish = bind(
        _finish, (tiles - whole, bm // FINISH_ROWS), *numbers, m, n, whole, bm, bn, FINISH_ROWS, group, split, wide < bn, *shape, *rest, num_warps=4,
        blocks={1: [FINISH_ROWS, wide], 2: [FINISH_ROWS, wide]}, views={9: torch.int32},
    )  # fmt: skip
    return _Plan(
        y=aligned_maker(m, n, out_dtype, device),
        y_scale=scales_maker(m, n, GROUPED, device) if grouped else maker((), torch.float32, device) if draw and form == OUT_STATIC else None,
        y_t=aligned_maker(n, m, out_dtype, device) if transpose else None,
        yt_scale=scales_maker(n, m, GROUPED, device) if grouped and transpose else None,
        z=aligned_maker(m, n, KEEP_TYPES[keep], device) if keep else None,
        rstd=maker((m, cdiv(n, NORM_BLOCK)), torch.float32, device) if keep and norm else None,
        part=maker(((tiles - whole) * split * bm, bn), torch.float32, device) if split > 1 else None,
        launch=launch,
        finish=finish if split > 1 else None,
    )  # fmt: skip


def fused_linear(
    a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None, out_scale: Tensor | None, amax: Tensor | None,
    a_source: int, b_source: int, norm: bool, activation: int, slope: float, form: int, out_dtype: torch.dtype,
    pow2: bool, keep: int, transpose: bool, launch: list[int] | None, seed: Tensor | None, p: float, stream: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return y, y_scale, y_t, yt_scale, z, rstd; `amax` is raised in place. One kernel, a second one for split tiles.

    Rows of a and b start at multiples of 16 bytes (TMA). A given scale is returned as y_scale only with dropout (a
    seed), which multiplies it by a factor. No argument is named `out`: torch's compiler treats a call with one as
    mutating everything and merges nothing across it, not even the quantizations of an input that several chains read.
    """
    a, b = tma_ready(a), tma_ready(b)
    plan = _plan(
        *a.shape, b.shape[0], (a.stride(0) | b.stride(0)) & 31 != 0, a.device,
        scale_strides(sa) if a_source >= GROUPED else (0, 0), scale_strides(sb) if b_source >= GROUPED else (0, 0), bias is not None, amax is not None,
        a_source, b_source, norm, activation, slope, form, out_dtype, pow2, keep, transpose,
        None if launch is None else tuple(launch), seed is not None, p, stream,
    )  # fmt: skip
    y, y_scale, y_t = plan.y(), plan.y_scale and plan.y_scale(), plan.y_t and plan.y_t()
    yt_scale, z, rstd = plan.yt_scale and plan.yt_scale(), plan.z and plan.z(), plan.rstd and plan.rstd()
    part = plan.part and plan.part()
    plan.launch(a, b, y, y_t, z, part, sa, sb, bias, out_scale, y_scale, yt_scale, rstd, amax, seed)
    if plan.finish is not None:
        plan.finish(part, y, z, sa, sb, bias, out_scale, y_scale, rstd, amax, seed)
    return y, y_scale, y_t, yt_scale, z, rstd
