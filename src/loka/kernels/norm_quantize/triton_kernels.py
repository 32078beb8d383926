"""Residual add + norm + activation + quantize: one read of x, one write of FP8 (and of h and y if requested).

A program keeps whole rows in registers (up to 16384 columns), so mean, rstd and the quantizer's amax are reductions in
registers. Block norm and 1x128 scales are the same reductions over a reshaped row. Backward walks rows in a persistent
loop and sums the parameter gradients in registers; a small reduction over programs in a fixed order keeps it
deterministic. Outputs that are also written transposed need several rows at once: see `triton_both`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.activation import ACTIVATIONS
from loka.kernels.dropout import draw_numbers
from loka.kernels.fused_linear.call import NORM_BLOCK
from loka.kernels.plans import planned
from loka.kernels.quantize.triton_kernels import scales_maker
from loka.kernels.scaled_mm.triton_kernels import processors
from loka.kernels.strides import Maker, alignment, cdiv, maker, next_power_of_2, rows_maker
from loka.kernels.tile import (
    INTERPRETED,
    activate,
    activation_slope,
    drawn,
    finite_magnitude,
    inverse,
    scale_of,
    to_fp8,
)
from loka.kernels.triton_bound import Bound, bind
from loka.kernels.triton_launcher import quick

LAYER, RMS, BLOCK = 0, 1, 2
# Scale granularity of x or of the output. UNSCALED: x is 16- or 32-bit, or the output is not quantized.
UNSCALED, SCALAR, VECTOR, GROUPED = 0, 1, 2, 3
_UNSCALED = tl.constexpr(0)
_LAYER = tl.constexpr(0)
_BLOCK = tl.constexpr(2)
_SCALAR = tl.constexpr(1)
_VECTOR = tl.constexpr(2)
_WIDTH = tl.constexpr(NORM_BLOCK)
_SIGMOID = tl.constexpr(ACTIVATIONS.index("sigmoid"))


@triton.jit
def _mean(x, K, ROWS: tl.constexpr, WIDE: tl.constexpr, NORM: tl.constexpr):
    """Return the mean over each norm group, [ROWS] or [ROWS, blocks]. Columns beyond K are zero."""
    if NORM == _BLOCK:
        BLOCKS: tl.constexpr = WIDE // _WIDTH
        start = tl.arange(0, BLOCKS) * _WIDTH
        width = tl.maximum(tl.minimum(K - start, _WIDTH), 1).to(tl.float32)
        return tl.sum(tl.reshape(x, (ROWS, BLOCKS, _WIDTH)), 2) / width[None, :]
    else:
        return tl.sum(x, 1) / K


@triton.jit
def _spread(value, ROWS: tl.constexpr, WIDE: tl.constexpr, NORM: tl.constexpr):
    """Repeat a statistic over the columns of its norm group."""
    if NORM == _BLOCK:
        BLOCKS: tl.constexpr = WIDE // _WIDTH
        return tl.reshape(tl.broadcast_to(value[:, :, None], (ROWS, BLOCKS, _WIDTH)), (ROWS, WIDE))
    else:
        return tl.broadcast_to(value[:, None], (ROWS, WIDE))


@triton.jit
def to_values(x, xs_ptr, row, M, X_SCALE: tl.constexpr):
    """Convert x to float32, times its scale if it is FP8."""
    if X_SCALE == _UNSCALED:
        return x.to(tl.float32)
    elif X_SCALE == _SCALAR:
        return x.to(tl.float32) * tl.load(xs_ptr)
    else:
        return x.to(tl.float32) * tl.load(xs_ptr + row, row < M, other=0.0)[:, None]


@triton.jit
def raise_amax(amax_ptr, largest):
    """Set *amax = max(*amax, largest). Floats >= 0 are ordered like their bits.

    Nearly all programs find a larger value there already and need no atomic on the address they all share.
    """
    seen = tl.load(amax_ptr)
    bits = largest.to(tl.int32, bitcast=True)
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True), bits, mask=largest > seen, sem="relaxed")


@triton.jit
def _largest(y, row, M, EVEN: tl.constexpr, PREROUND: tl.constexpr):
    """Return the amax of the rows below M (EVEN: all rows are). Columns beyond K are zero.

    A maximum skips NaN, so it takes one instruction per element; only a program that meets an Inf looks again.
    """
    if not EVEN:  # rows beyond M hold the bias
        y = tl.where((row < M)[:, None], y, 0.0)
    if PREROUND:
        largest = tl.max(tl.max(finite_magnitude(y), 1))
    else:
        largest = tl.max(tl.max(tl.abs(y), 1))
        if largest == float("inf"):
            largest = tl.max(tl.max(finite_magnitude(y), 1))
    return largest


@triton.jit
def _store_rstd(rstd_ptr, rstd, row, M, first, blocks, NORM: tl.constexpr):
    """Store the rstd of rows, or of their blocks from `first` on."""
    if NORM == _BLOCK:
        block = first + tl.arange(0, rstd.shape[1])
        inside = (row < M)[:, None] & (block < blocks)[None, :]
        tl.store(rstd_ptr + row[:, None] * blocks + block[None, :], rstd, inside)
    else:
        tl.store(rstd_ptr + row, rstd, row < M)


@triton.jit
def _inside(row, column, M, K, WHOLE: tl.constexpr):
    """Return which elements exist. WHOLE: all these columns do, so the mask depends on rows alone."""
    there = (row < M)[:, None]
    if WHOLE:
        return tl.broadcast_to(there, (row.shape[0], column.shape[0]))
    else:
        return there & (column < K)[None, :]


@triton.jit
def _read(x_ptr, xs_ptr, r_ptr, h_ptr, row, column, M, K, stride_x, stride_r, RESIDUAL: tl.constexpr, X_SCALE: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Return x (+ residual, stored as h) in float32, 0 outside."""
    inside = _inside(row, column, M, K, WHOLE)
    h = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], inside, other=0.0)
    if RESIDUAL:
        kind = h.dtype
        r = tl.load(r_ptr + row[:, None] * stride_r + column[None, :], inside, other=0.0)
        h = (h.to(tl.float32) + r.to(tl.float32)).to(kind)
        tl.store(h_ptr + row[:, None] * K + column[None, :], h, inside)
    return to_values(h, xs_ptr, row, M, X_SCALE)


@triton.jit
def _centre(h, mean, column, K, WHOLE: tl.constexpr):
    if WHOLE:
        return h - mean[:, None]
    else:
        return tl.where((column < K)[None, :], h - mean[:, None], 0.0)


@triton.jit
def _finish(h, rstd, w, b, row, column, M, K, NORM: tl.constexpr, ACTIVATION: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
            WHOLE: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """Scale what was centred, apply the norm's parameters and the activation."""
    y = h * _spread(rstd, h.shape[0], h.shape[1], NORM)
    if WEIGHT:
        y *= w.to(tl.float32)[None, :]
    if BIAS:
        y += b.to(tl.float32)[None, :]
    y = activate(y, ACTIVATION, PREROUND)
    if ACTIVATION == _SIGMOID and not WHOLE:  # the only activation that is not 0 at 0
        y = tl.where(_inside(row, column, M, K, WHOLE), y, 0.0)
    return y


@triton.jit
def _dot(y, head_ptr, column, K):
    """Return the product of each row with a vector."""
    vector = tl.load(head_ptr + column, column < K, other=0.0).to(tl.float32)
    return tl.sum(y * vector[None, :], 1)


@triton.jit
def _row_amax(y, CLEAN: tl.constexpr, PREROUND: tl.constexpr):
    """Return the amax of each row. CLEAN: nothing is infinite; a maximum skips NaN."""
    if CLEAN and not PREROUND:
        return tl.max(tl.abs(y), 1)
    else:
        return tl.max(finite_magnitude(y), 1)


@triton.jit
def _store_codes(y, scale, q_ptr, s_ptr, row, column, group, M, K, stride_q, SCALE: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr,
                 CLEAN: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """Quantize and store, under the given scales (one, or one a row) or under 1x128 scales made and stored here.

    Args:
        y: [rows, columns] of float32.
        scale: of all, [rows], or unused for 1x128.
        group: the first column's 1x128 group.
        CLEAN: there are no parameters. After a norm nothing is infinite (an Inf in x makes its block NaN), unless a
            parameter is.
    """
    ROWS: tl.constexpr = y.shape[0]
    COLUMNS: tl.constexpr = y.shape[1]
    if SCALE == _SCALAR:
        q = to_fp8(y, inverse(scale), 0, E5M2, False, PREROUND, CLEAN)
    elif SCALE == _VECTOR:
        q = to_fp8(y, inverse(scale)[:, None], 0, E5M2, False, PREROUND, CLEAN)
    else:
        GROUPS: tl.constexpr = COLUMNS // 128
        grouped = tl.reshape(y, (ROWS, GROUPS, 128))
        if CLEAN and not PREROUND:
            amax = tl.max(tl.abs(grouped), 2)
        else:
            amax = tl.max(finite_magnitude(grouped), 2)
        own = scale_of(amax, E5M2, POW2)
        group += tl.arange(0, GROUPS)
        there = (row < M)[:, None] & (group < tl.cdiv(K, 128))[None, :]
        tl.store(s_ptr + row[:, None] + group[None, :] * M, own, there)
        q = tl.reshape(to_fp8(grouped, inverse(own)[:, :, None], 0, E5M2, False, PREROUND, CLEAN), (ROWS, COLUMNS))
    there = (row < M)[:, None] & (column < stride_q)[None, :]  # codes of the columns that pad a row to 16 bytes are 0
    tl.store(q_ptr + row[:, None] * stride_q + column[None, :], q, there)


@quick
@triton.jit(do_not_specialize=["threshold", "stream"])
def _forward(x_ptr, xs_ptr, r_ptr, h_ptr, w_ptr, b_ptr, q_ptr, s_ptr, made_ptr, y_ptr, mean_ptr, rstd_ptr, amax_ptr, head_ptr, dots_ptr, seed_ptr, threshold, upscale, stream,
             M, K, blocks, stride_x, stride_r, stride_q, eps,
             ROWS: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr,
             WEIGHT: tl.constexpr, BIAS: tl.constexpr, OUT: tl.constexpr, SCALE: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr,
             X_SCALE: tl.constexpr, AMAX: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, DROP: tl.constexpr,
             HEADS: tl.constexpr, STAGES: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """A row is WIDE columns and REST more, two powers of two: 3072 is 2048 + 1024, not 4096 of which a quarter is idle.

    FULL: the row ends where its last part does. `y1`, `column1` and so on are of the second part, if there is one.
    """
    # as in `quantize`: tells the compiler that whole vectors can be loaded
    K, stride_x, stride_r = K // ALIGN * ALIGN, stride_x // ALIGN * ALIGN, stride_r // ALIGN * ALIGN
    WHOLE: tl.constexpr = FULL or REST > 0
    CLEAN: tl.constexpr = not (WEIGHT or BIAS)
    column = tl.arange(0, WIDE)
    w, b = 0, 0
    if WEIGHT:  # loaded before the reductions, which wait for x: saves 3 of 36 us for rows of 3072
        w = tl.load(w_ptr + column, column < K, other=0.0)
    if BIAS:
        b = tl.load(b_ptr + column, column < K, other=0.0)
    if REST > 0:
        column1 = WIDE + tl.arange(0, REST)
        w1, b1 = 0, 0
        if WEIGHT:
            w1 = tl.load(w_ptr + column1, column1 < K, other=0.0)
        if BIAS:
            b1 = tl.load(b_ptr + column1, column1 < K, other=0.0)
    for chunk in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (chunk * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        h = _read(x_ptr, xs_ptr, r_ptr, h_ptr, row, column, M, K, stride_x, stride_r, RESIDUAL, X_SCALE, WHOLE)
        if REST > 0:
            h1 = _read(x_ptr, xs_ptr, r_ptr, h_ptr, row, column1, M, K, stride_x, stride_r, RESIDUAL, X_SCALE, FULL)

        if NORM == _LAYER:
            mean = tl.sum(h, 1)
            if REST > 0:
                mean += tl.sum(h1, 1)
            mean /= K
            tl.store(mean_ptr + row, mean, row < M)
            h = _centre(h, mean, column, K, WHOLE)
            if REST > 0:
                h1 = _centre(h1, mean, column1, K, FULL)
        if NORM == _BLOCK:
            rstd = tl.rsqrt(_mean(h * h, K, ROWS, WIDE, NORM) + eps)
            _store_rstd(rstd_ptr, rstd, row, M, 0, blocks, NORM)
            if REST > 0:
                rstd1 = tl.rsqrt(_mean(h1 * h1, K - WIDE, ROWS, REST, NORM) + eps)
                _store_rstd(rstd_ptr, rstd1, row, M, WIDE // _WIDTH, blocks, NORM)
        else:
            squares = tl.sum(h * h, 1)
            if REST > 0:
                squares += tl.sum(h1 * h1, 1)
            rstd = tl.rsqrt(squares / K + eps)
            rstd1 = rstd
            _store_rstd(rstd_ptr, rstd, row, M, 0, blocks, NORM)

        y = _finish(h, rstd, w, b, row, column, M, K, NORM, ACTIVATION, WEIGHT, BIAS, WHOLE, PREROUND)
        if REST > 0:
            y1 = _finish(h1, rstd1, w1, b1, row, column1, M, K, NORM, ACTIVATION, WEIGHT, BIAS, FULL, PREROUND)
        if AMAX:
            largest = _largest(y, row, M, EVEN, PREROUND)
            if REST > 0:
                largest = tl.maximum(largest, _largest(y1, row, M, EVEN, PREROUND))
            raise_amax(amax_ptr, largest)
        after = 1.0  # what a 16-bit y is multiplied by when it is stored
        if DROP:
            factor = upscale
            if SCALE == _SCALAR:  # keep or zero a code; the factor 1 / (1 - p) is in the scale
                factor, after = 1.0, upscale
                tl.store(made_ptr, tl.load(s_ptr) * upscale, tl.program_id(0) == 0)
            seed = tl.load(seed_ptr)
            y *= drawn(seed, row, column, stream, threshold, factor)
            if REST > 0:
                y1 *= drawn(seed, row, column1, stream, threshold, factor)
        if OUT:
            tl.store(y_ptr + row[:, None] * K + column[None, :], y * after, _inside(row, column, M, K, WHOLE))
            if REST > 0:
                tl.store(y_ptr + row[:, None] * K + column1[None, :], y1 * after, _inside(row, column1, M, K, FULL))
        for head in tl.static_range(HEADS):
            dot = _dot(y, head_ptr + head * K, column, K)
            if REST > 0:
                dot += _dot(y1, head_ptr + head * K, column1, K)
            tl.store(dots_ptr + row * HEADS + head, dot * after, row < M)
        if SCALE != _UNSCALED:
            scale = 0.0
            if SCALE == _SCALAR:
                scale = tl.load(s_ptr)
            if SCALE == _VECTOR:
                amax = _row_amax(y, CLEAN, PREROUND)
                if REST > 0:
                    amax = tl.maximum(amax, _row_amax(y1, CLEAN, PREROUND))
                scale = scale_of(amax, E5M2, POW2)
                tl.store(s_ptr + row, scale, row < M)
            _store_codes(y, scale, q_ptr, s_ptr, row, column, 0, M, K, stride_q, SCALE, E5M2, POW2, CLEAN, PREROUND)
            if REST > 0:
                _store_codes(y1, scale, q_ptr, s_ptr, row, column1, WIDE // 128, M, K, stride_q, SCALE, E5M2, POW2, CLEAN, PREROUND)  # fmt: skip


@quick
@triton.jit(do_not_specialize=["threshold", "stream"])
def _backward(dy_ptr, h_ptr, hs_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, dh_ptr, dx_ptr, dw_ptr, db_ptr, amax_ptr, seed_ptr, threshold, upscale, stream,
              M, K, blocks, stride_dy, stride_h, stride_dh,
              ROWS: tl.constexpr, WIDE: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr,
              WEIGHT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
              X_SCALE: tl.constexpr, AMAX: tl.constexpr, ALIGN: tl.constexpr, DROP: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    K, stride_dy, stride_h, stride_dh = (
        K // ALIGN * ALIGN,
        stride_dy // ALIGN * ALIGN,
        stride_h // ALIGN * ALIGN,
        stride_dh // ALIGN * ALIGN,
    )
    program = tl.program_id(0)
    column = tl.arange(0, WIDE)
    dw = tl.zeros((WIDE,), tl.float32)
    db = tl.zeros((WIDE,), tl.float32)
    largest = tl.zeros((WIDE,), tl.float32)
    if WEIGHT:
        w = tl.load(w_ptr + column, column < K, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        b = tl.load(b_ptr + column, column < K, other=0.0).to(tl.float32)[None, :]
    for chunk in range(program, tl.cdiv(M, ROWS), tl.num_programs(0)):
        row = (chunk * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < M)[:, None] & (column < K)[None, :]
        offset = row[:, None] * K + column[None, :]
        xhat = tl.load(h_ptr + row[:, None] * stride_h + column[None, :], inside, other=0.0)
        xhat = to_values(xhat, hs_ptr, row, M, X_SCALE)
        if NORM == _LAYER:
            xhat = tl.where(inside, xhat - tl.load(mean_ptr + row, row < M, other=0.0)[:, None], 0.0)
        if NORM == _BLOCK:
            block = tl.arange(0, WIDE // _WIDTH)
            there = (row < M)[:, None] & (block < blocks)[None, :]
            rstd = tl.load(rstd_ptr + row[:, None] * blocks + block[None, :], there, other=0.0)
        else:
            rstd = tl.load(rstd_ptr + row, row < M, other=0.0)
        spread = _spread(rstd, ROWS, WIDE, NORM)
        xhat *= spread
        p = xhat
        if WEIGHT:
            p *= w
        if BIAS:
            p += b
        dp = tl.load(dy_ptr + row[:, None] * stride_dy + column[None, :], inside, other=0.0).to(tl.float32)
        if DROP:
            dp *= drawn(tl.load(seed_ptr), row, column, stream, threshold, upscale)
        dp *= activation_slope(p, ACTIVATION, PREROUND)
        if WEIGHT:
            dw += tl.sum(dp * xhat, 0)
        if BIAS:
            db += tl.sum(dp, 0)
        if WEIGHT:
            dp *= w
        dx = dp - xhat * _spread(_mean(dp * xhat, K, ROWS, WIDE, NORM), ROWS, WIDE, NORM)
        if NORM == _LAYER:
            dx -= _mean(dp, K, ROWS, WIDE, NORM)[:, None]
        dx *= spread
        if RESIDUAL:
            dx += tl.load(dh_ptr + row[:, None] * stride_dh + column[None, :], inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offset, dx, inside)
        if AMAX:
            largest = tl.maximum(largest, tl.max(finite_magnitude(tl.where(inside, dx, 0.0)), 0))
    if AMAX:
        raise_amax(amax_ptr, tl.max(largest))
    if WEIGHT:
        tl.store(dw_ptr + program * K + column, dw, column < K)
    if BIAS:
        tl.store(db_ptr + program * K + column, db, column < K)


def _rows_per_program(wide: int) -> int:
    return max(1, min(16, 4096 // wide))


def split_row(k: int) -> tuple[int, int]:
    """Return two powers of two, of at least 256, whose sum covers a row of `k` columns; the second may be 0.

    Example:
        >>> split_row(3072), split_row(4000)
        ((2048, 1024), (4096, 0))
    """
    whole = max(256, next_power_of_2(k))
    half = whole // 2
    rest = max(256, next_power_of_2(k - half))
    return (half, rest) if half >= 256 and half + rest < whole else (whole, 0)


# Rows per step, warps, and programs per multiprocessor, by the widest row. A program keeps a row in a few warps, up to
# 40 elements a thread, and as many programs run as fit in the registers. From a sweep on an H200 with layer norm, with
# SiLU and without; 6144 x 3072 with SiLU takes 24.4 us, 4096 x 5000 26.9 and 8192 x 1024 11.2.
_FORWARD_LAUNCHES = (
    (512, 2, 1, 16), (1024, 1, 1, 16), (1280, 1, 1, 12), (1536, 1, 2, 10), (2048, 1, 2, 8), (3072, 1, 4, 5),
    (4096, 1, 4, 4), (5120, 1, 4, 3), (6144, 1, 4, 4), (8192, 1, 8, 2),
)  # fmt: skip


def _forward_launch(m: int, width: int, device: torch.device, *, heads: bool = False) -> tuple[int, int, int, int]:
    """Return rows per step, warps, stages and programs of the forward kernel, for rows of `width` lanes.

    Programs stay, and load the next rows while they compute. The vectors of a head take registers and shared memory, so
    fewer programs fit: four norms and a head with three vectors, in a model of 6144 x 3072, take 162 us instead of 171.
    """
    for widest, rows, warps, programs in _FORWARD_LAUNCHES:
        if width <= widest:
            programs = max(1, 4 * programs // 5) if heads else programs
            return rows, warps, 3, min(cdiv(m, rows), programs * processors(device))
    return 1, 8, 1, m


def scale_source(scale: Tensor) -> int:
    """Return the code of x's scale granularity: one, or one per row."""
    return VECTOR if scale.numel() > 1 or scale.dim() == 2 else SCALAR


class _ForwardPlan(NamedTuple):
    """Makers of the results, None for the absent ones, and the launch. `made`: the scale times dropout's factor."""

    q: Maker | None
    scale: Maker | None
    h: Maker | None
    y: Maker | None
    mean: Maker | None
    rstd: Maker
    dots: Maker | None
    made: Maker | None
    launch: Bound


@planned
def _plan_forward(
    shape: tuple[int, int], stride: int, x_dtype: torch.dtype, device: torch.device, x_source: int, residual: int | None, weight: bool, bias: bool, amax: bool, heads: int,
    norm: int, activation: int, eps: float, dtype: torch.dtype, source: int, pow2: bool, out_dtype: torch.dtype | None, draw: bool, p: float, stream: int,
) -> _ForwardPlan:  # fmt: skip
    """`residual` is the row stride of the residual, None without one; `heads` the rows of the head."""
    m, k = shape
    wide, rest = split_row(k)
    blocks = cdiv(k, NORM_BLOCK) if norm == BLOCK else 1
    rows, warps, stages, programs = _forward_launch(m, wide + rest, device, heads=heads > 0)
    align = alignment(k, stride, residual or 0)
    scale = scales_maker(m, k, source, device) if source == GROUPED else maker((m, 1), torch.float32, device) if source == VECTOR else None  # fmt: skip
    return _ForwardPlan(
        q=rows_maker(m, k, 16, dtype, device) if source != UNSCALED else None,
        scale=scale,
        h=maker((m, k), x_dtype, device) if residual is not None else None,
        y=maker((m, k), out_dtype, device) if out_dtype is not None else None,
        mean=maker((m, 1), torch.float32, device) if norm == LAYER else None,
        rstd=maker((m, blocks), torch.float32, device),
        dots=maker((m, heads), torch.float32, device) if heads else None,
        made=maker((), torch.float32, device) if draw and source == SCALAR else None,
        launch=bind(
            _forward, (programs,), *draw_numbers(p, stream, draw=draw), m, k, blocks, stride, residual or 0, cdiv(k, 16) * 16 if source != UNSCALED else 0, eps,
            rows, wide, rest, norm, activation, residual is not None, weight, bias, out_dtype is not None, source,
            dtype == torch.float8_e5m2, pow2, x_source, amax, k == wide + rest, m % rows == 0, align, draw, heads, stages, INTERPRETED, num_warps=warps,
        ),
    )  # fmt: skip


def forward(
    x: Tensor, x_scale: Tensor | None, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, amax: Tensor | None,
    norm: int, activation: int, eps: float, dtype: torch.dtype, source: int, pow2: bool, out_dtype: torch.dtype | None,
    seed: Tensor | None, p: float, stream: int, head: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q, scale, h, y, mean, rstd, dots; x [M, K] with unit stride along K, head [N, K] contiguous.

    A given scale is returned only with dropout (a seed), times its factor.
    """
    plan = _plan_forward(
        x.shape, x.stride(0), x.dtype, x.device, 0 if x_scale is None else scale_source(x_scale), None if residual is None else residual.stride(0),
        weight is not None, bias is not None, amax is not None, 0 if head is None else head.shape[0],
        norm, activation, eps, dtype, source, pow2, out_dtype, seed is not None, p, stream,
    )  # fmt: skip
    q, h, y = plan.q and plan.q(), plan.h and plan.h(), plan.y and plan.y()
    mean, rstd, dots = plan.mean and plan.mean(), plan.rstd(), plan.dots and plan.dots()
    own = plan.scale and plan.scale()
    made = plan.made and plan.made()
    used = scale if own is None else own
    plan.launch(x, x_scale, residual, h, weight, bias, q, used, made, y, mean, rstd, amax, head, dots, seed)
    return q, made if own is None else own, h, y, mean, rstd, dots


class _BackwardPlan(NamedTuple):
    """Makers of dx and of the parts of the parameters' gradients, None without the parameter, and the launch."""

    dx: Maker
    dw: Maker | None
    db: Maker | None
    launch: Bound


@planned
def _plan_backward(
    shape: tuple[int, int], stride: int, dtype: torch.dtype, device: torch.device, h_stride: int, h_source: int, dh: int | None, weight: bool, bias: bool, amax: bool, blocks: int,
    norm: int, activation: int, draw: bool, p: float, stream: int,
) -> _BackwardPlan:  # fmt: skip
    """`dtype` is that of dx; `dh` the row stride of dh, None without one; `blocks` the columns of rstd."""
    m, k = shape
    wide = max(256, next_power_of_2(k))
    # Wide rows: one program per multiprocessor, with enough warps for two rows. Parameters and their gradient sums are
    # in registers only once, and few partial sums are left to add.
    rows = 2 if wide >= 2048 else max(1, _rows_per_program(wide) // 2)
    many = rows * wide >= 8192
    programs = min(processors(device) * (1 if many else 2 if wide >= 2048 else 8), cdiv(m, rows))
    part = maker((programs, k), torch.float32, device)
    return _BackwardPlan(
        dx=maker((m, k), dtype, device),
        dw=part if weight else None,
        db=part if bias else None,
        launch=bind(
            _backward, (programs,), *draw_numbers(p, stream, draw=draw), m, k, blocks, stride, h_stride, dh or 0,
            rows, wide, norm, activation, weight, bias, dh is not None, h_source, amax, alignment(k, stride, h_stride, dh or 0), draw, INTERPRETED,
            num_warps=16 if many else 4 if rows * wide <= 2048 else 8,
        ),
    )  # fmt: skip


def backward(
    dy: Tensor, h: Tensor, h_scale: Tensor | None, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor, dh: Tensor | None,
    amax: Tensor | None, norm: int, activation: int, seed: Tensor | None, p: float, stream: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dx, dweight, dbias; dx has the dtype of h, or of dy if h is FP8."""
    plan = _plan_backward(
        dy.shape, dy.stride(0), h.dtype if h_scale is None else dy.dtype, dy.device, h.stride(0), 0 if h_scale is None else scale_source(h_scale),
        None if dh is None else dh.stride(0), weight is not None, bias is not None, amax is not None, rstd.shape[1],
        norm, activation, seed is not None, p, stream,
    )  # fmt: skip
    dx, dw, db = plan.dx(), plan.dw and plan.dw(), plan.db and plan.db()
    plan.launch(dy, h, h_scale, weight, bias, mean, rstd, dh, dx, dw, db, amax, seed)
    return dx, add_parts(dw, weight), add_parts(db, bias)


def add_parts(parts: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Return the gradient of a parameter from the sums of every program; None without the parameter."""
    if parts is None or parameter is None:
        return None
    total = parts.sum(0)
    return total if total.dtype is parameter.dtype else total.to(parameter.dtype)
