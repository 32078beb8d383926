"""Norm + activation + quantize, and its gradient, with FP8 written both ways, [M, K] and [K, M], under one given scale.

A transpose needs several rows at once, and whole rows of them fit no register file. So a program takes a few rows and
walks their columns twice, in chunks: once for the statistics of a row (mean and rstd; backward, two means of the
gradient), once to write. The second read should hit L2: 132 multiprocessors with two programs of 16 rows of 3072 bf16
(one, backward, with two tensors) hold 26 MB, and an H200's L2 has 50. Then x is read from memory once: 2 + 1 + 1 bytes
per element forward and 2 + 2 + 1 + 1 backward; beyond L2 it is 2 or 4 more.

As in `quantize`, four consecutive rows are four tiles of one layout: their bytes are packed into words inside a thread,
and words are transposed. Neighboring programs complete each other's sectors of the transpose.

Backward with 16-bit rows that fit in registers takes another path (`triton.gradient`): 16-bit dx first, then quantized
both ways. This kernel handles wider rows, float32 and FP8.

Layer norm sums are taken around the mean of the row's first chunk. Little is lost to cancellation: (shift - mean)^2 is
at most var K / chunk. Column sums for the parameters are written once per program and added by a second, small
reduction in a fixed order, so they are deterministic.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.dropout import draw_numbers
from loka.kernels.norm_quantize.triton_kernels import LAYER, add_parts, raise_amax, scale_source, to_values
from loka.kernels.plans import planned
from loka.kernels.scaled_mm.triton_kernels import processors
from loka.kernels.strides import Maker, alignment, cdiv, maker, rows_maker
from loka.kernels.tile import (
    INTERPRETED,
    activate,
    activation_slope,
    drawn,
    finite_magnitude,
    inverse,
    nan_for_inf,
    pack_rows,
    pack_rows_checked,
    to_fp8,
)
from loka.kernels.triton_bound import Bound, bind
from loka.kernels.triton_launcher import quick

_NEAR = 100 << 10  # bytes of a program's rows such that two programs fit in the L1 of a multiprocessor
# Elements of a chunk. ptxas uses 128 registers forward, two programs per multiprocessor, and 241 backward, one: 32 KB
# in flight either way.
_TILE = 8192
_LAUNCH = {"num_warps": 8}
_LAYER = tl.constexpr(LAYER)


@triton.jit
def _values(x_ptr, xs_ptr, row, column, M, K, stride_x, X_SCALE: tl.constexpr):
    """Load x as float32, 0 outside."""
    inside = (row < M)[:, None] & (column < K)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], inside, other=0.0)
    return to_values(x, xs_ptr, row, M, X_SCALE)


@triton.jit
def _first_mean(x_ptr, xs_ptr, row, M, K, stride_x, BK: tl.constexpr, X_SCALE: tl.constexpr):
    return tl.sum(_values(x_ptr, xs_ptr, row, tl.arange(0, BK), M, K, stride_x, X_SCALE), 1) / tl.minimum(K, BK)


@triton.jit
def _deviation(x_ptr, xs_ptr, shift, row, column, M, K, stride_x, NORM: tl.constexpr, X_SCALE: tl.constexpr):
    x = _values(x_ptr, xs_ptr, row, column, M, K, stride_x, X_SCALE)
    if NORM == _LAYER:
        x = tl.where((column < K)[None, :], x - shift[:, None], 0.0)
    return x


@triton.jit
def _moments(total, squares, shift, mean_ptr, rstd_ptr, row, M, K, eps, NORM: tl.constexpr):
    """Return and store mean (0 for rms) and rstd of some rows."""
    mean = shift
    variance = tl.sum(squares, 1) / K
    if NORM == _LAYER:
        off = tl.sum(total, 1) / K
        mean = shift + off
        variance -= off * off
        variance = tl.where(variance < 0.0, 0.0, variance)  # a maximum would turn NaN into 0
        tl.store(mean_ptr + row, mean, row < M)
    rstd = tl.rsqrt(variance + eps)
    tl.store(rstd_ptr + row, rstd, row < M)
    return mean, rstd


@triton.jit
def _parameter(ptr, column, K, GIVEN: tl.constexpr, BK: tl.constexpr, ELSE: tl.constexpr):
    if GIVEN:
        return tl.load(ptr + column, column < K, other=0.0).to(tl.float32)
    else:
        return tl.full((BK,), ELSE, tl.float32)


@triton.jit
def _affine(xhat, w, b, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    p = xhat
    if WEIGHT:
        p = p * w[None, :]
    if BIAS:
        p = p + b[None, :]
    return p


@triton.jit
def _output(x_ptr, xs_ptr, mean, rstd, w, b, row, column, M, K, stride_x, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
            ACTIVATION: tl.constexpr, X_SCALE: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """Return activation(norm(x)) of some rows and columns, 0 outside."""
    x = _values(x_ptr, xs_ptr, row, column, M, K, stride_x, X_SCALE)
    y = activate(_affine((x - mean[:, None]) * rstd[:, None], w, b, WEIGHT, BIAS), ACTIVATION, PREROUND)
    return tl.where((row < M)[:, None] & (column < K)[None, :], y, 0.0)


@triton.jit
def _store_both(y0, y1, y2, y3, inv, q_ptr, qt_ptr, word, column, M, K, stride_q, words, E5M2: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """Store rows 4i .. 4i + 3 and, packed into words, the transpose.

    Values are cast to FP8 twice: Triton was seen to store wrong bytes when one FP8 tensor is used in two layouts.
    """
    FAST: tl.constexpr = not (E5M2 or PREROUND)
    if FAST:
        y0, y1, y2, y3 = nan_for_inf(y0), nan_for_inf(y1), nan_for_inf(y2), nan_for_inf(y3)
    wide = (column < stride_q)[None, :]  # the padding of rows is written too: whole vectors
    row = 4 * word
    target = q_ptr + row[:, None] * stride_q + column[None, :]
    tl.store(target, to_fp8(y0, inv, 0, E5M2, False, PREROUND, FAST), (row < M)[:, None] & wide)
    tl.store(target + stride_q, to_fp8(y1, inv, 0, E5M2, False, PREROUND, FAST), (row + 1 < M)[:, None] & wide)
    tl.store(target + 2 * stride_q, to_fp8(y2, inv, 0, E5M2, False, PREROUND, FAST), (row + 2 < M)[:, None] & wide)
    tl.store(target + 3 * stride_q, to_fp8(y3, inv, 0, E5M2, False, PREROUND, FAST), (row + 3 < M)[:, None] & wide)
    if FAST:
        packed = pack_rows(y0 * inv, y1 * inv, y2 * inv, y3 * inv)
    else:
        packed = pack_rows_checked(y0, y1, y2, y3, inv, 0, 0, 0, 0, E5M2, False, PREROUND)
    there = (column < K)[:, None] & (word < words)[None, :]
    tl.store(qt_ptr + column.to(tl.int64)[:, None] * words + word[None, :], tl.trans(packed), there)


@triton.jit
def _larger_of_rows(largest, y0, y1, y2, y3):
    low = tl.maximum(finite_magnitude(y0), finite_magnitude(y1))
    return tl.maximum(largest, tl.maximum(low, tl.maximum(finite_magnitude(y2), finite_magnitude(y3))))


@quick
@triton.jit(do_not_specialize=["threshold", "stream"])
def _forward_both(x_ptr, xs_ptr, w_ptr, b_ptr, s_ptr, made_ptr, q_ptr, qt_ptr, mean_ptr, rstd_ptr, amax_ptr, seed_ptr, threshold, upscale, stream, M, K, stride_x, stride_q, words, eps,
                  ROWS: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, WEIGHT: tl.constexpr,
                  BIAS: tl.constexpr, X_SCALE: tl.constexpr, E5M2: tl.constexpr, AMAX: tl.constexpr, ALIGN: tl.constexpr,
                  DROP: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    K, stride_x, words = K // ALIGN * ALIGN, stride_x // ALIGN * ALIGN, words // 4 * 4  # whole vectors
    Q: tl.constexpr = ROWS // 4
    word = tl.program_id(0).to(tl.int64) * Q + tl.arange(0, Q)
    row0, row1, row2, row3 = 4 * word, 4 * word + 1, 4 * word + 2, 4 * word + 3
    if NORM == _LAYER:
        shift0 = _first_mean(x_ptr, xs_ptr, row0, M, K, stride_x, BK, X_SCALE)
        shift1 = _first_mean(x_ptr, xs_ptr, row1, M, K, stride_x, BK, X_SCALE)
        shift2 = _first_mean(x_ptr, xs_ptr, row2, M, K, stride_x, BK, X_SCALE)
        shift3 = _first_mean(x_ptr, xs_ptr, row3, M, K, stride_x, BK, X_SCALE)
    else:
        shift0 = tl.zeros((Q,), tl.float32)
        shift1, shift2, shift3 = shift0, shift0, shift0
    total0 = tl.zeros((Q, BK), tl.float32)
    total1, total2, total3 = total0, total0, total0
    squares0, squares1, squares2, squares3 = total0, total0, total0, total0
    for start in range(0, K, BK):
        column = start + tl.arange(0, BK)
        d0 = _deviation(x_ptr, xs_ptr, shift0, row0, column, M, K, stride_x, NORM, X_SCALE)
        d1 = _deviation(x_ptr, xs_ptr, shift1, row1, column, M, K, stride_x, NORM, X_SCALE)
        d2 = _deviation(x_ptr, xs_ptr, shift2, row2, column, M, K, stride_x, NORM, X_SCALE)
        d3 = _deviation(x_ptr, xs_ptr, shift3, row3, column, M, K, stride_x, NORM, X_SCALE)
        if NORM == _LAYER:
            total0, total1, total2, total3 = total0 + d0, total1 + d1, total2 + d2, total3 + d3
        squares0, squares1 = squares0 + d0 * d0, squares1 + d1 * d1
        squares2, squares3 = squares2 + d2 * d2, squares3 + d3 * d3
    mean0, rstd0 = _moments(total0, squares0, shift0, mean_ptr, rstd_ptr, row0, M, K, eps, NORM)
    mean1, rstd1 = _moments(total1, squares1, shift1, mean_ptr, rstd_ptr, row1, M, K, eps, NORM)
    mean2, rstd2 = _moments(total2, squares2, shift2, mean_ptr, rstd_ptr, row2, M, K, eps, NORM)
    mean3, rstd3 = _moments(total3, squares3, shift3, mean_ptr, rstd_ptr, row3, M, K, eps, NORM)
    inv = inverse(tl.load(s_ptr))
    if DROP:
        tl.store(made_ptr, tl.load(s_ptr) * upscale, tl.program_id(0) == 0)
    largest = tl.zeros((Q, BK), tl.float32)
    for start in range(0, K, BK):
        column = start + tl.arange(0, BK)
        w, b = _parameter(w_ptr, column, K, WEIGHT, BK, 1.0), _parameter(b_ptr, column, K, BIAS, BK, 0.0)
        y0 = _output(x_ptr, xs_ptr, mean0, rstd0, w, b, row0, column, M, K, stride_x, WEIGHT, BIAS, ACTIVATION, X_SCALE, PREROUND)  # fmt: skip
        y1 = _output(x_ptr, xs_ptr, mean1, rstd1, w, b, row1, column, M, K, stride_x, WEIGHT, BIAS, ACTIVATION, X_SCALE, PREROUND)  # fmt: skip
        y2 = _output(x_ptr, xs_ptr, mean2, rstd2, w, b, row2, column, M, K, stride_x, WEIGHT, BIAS, ACTIVATION, X_SCALE, PREROUND)  # fmt: skip
        y3 = _output(x_ptr, xs_ptr, mean3, rstd3, w, b, row3, column, M, K, stride_x, WEIGHT, BIAS, ACTIVATION, X_SCALE, PREROUND)  # fmt: skip
        if AMAX:
            largest = _larger_of_rows(largest, y0, y1, y2, y3)
        if DROP:
            y0 *= drawn(tl.load(seed_ptr), row0, column, stream, threshold, 1.0)
            y1 *= drawn(tl.load(seed_ptr), row1, column, stream, threshold, 1.0)
            y2 *= drawn(tl.load(seed_ptr), row2, column, stream, threshold, 1.0)
            y3 *= drawn(tl.load(seed_ptr), row3, column, stream, threshold, 1.0)
        _store_both(y0, y1, y2, y3, inv, q_ptr, qt_ptr, word, column, M, K, stride_q, words, E5M2, PREROUND)
    if AMAX:
        raise_amax(amax_ptr, tl.max(tl.max(largest, 1)))


@triton.jit
def _pre_gradient(dy_ptr, x_ptr, xs_ptr, mean, rstd, w, b, seed_ptr, threshold, upscale, stream, row, column, M, K, stride_dy, stride_x, WEIGHT: tl.constexpr,
                  BIAS: tl.constexpr, ACTIVATION: tl.constexpr, X_SCALE: tl.constexpr, DROP: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """Return xhat and dp = dy * activation'(p) of some rows and columns, 0 outside."""
    inside = (row < M)[:, None] & (column < K)[None, :]
    x = _values(x_ptr, xs_ptr, row, column, M, K, stride_x, X_SCALE)
    xhat = tl.where(inside, (x - mean[:, None]) * rstd[:, None], 0.0)
    dy = tl.load(dy_ptr + row[:, None] * stride_dy + column[None, :], inside, other=0.0).to(tl.float32)
    if DROP:
        dy *= drawn(tl.load(seed_ptr), row, column, stream, threshold, upscale)
    return xhat, dy * activation_slope(_affine(xhat, w, b, WEIGHT, BIAS), ACTIVATION, PREROUND)


@triton.jit
def _kept(mean_ptr, rstd_ptr, row, M, ROWS: tl.constexpr, NORM: tl.constexpr):
    """Load forward's mean (0 for rms) and rstd."""
    mean = tl.zeros((ROWS,), tl.float32)
    if NORM == _LAYER:
        mean = tl.load(mean_ptr + row, row < M, other=0.0)
    return mean, tl.load(rstd_ptr + row, row < M, other=0.0)


@triton.jit
def _gradient(xhat, dp, w, rstd, plain, product, row, column, M, K, NORM: tl.constexpr, WEIGHT: tl.constexpr):
    dx = dp * w[None, :] if WEIGHT else dp
    if NORM == _LAYER:
        dx -= plain[:, None]
    dx = (dx - xhat * product[:, None]) * rstd[:, None]
    return tl.where((row < M)[:, None] & (column < K)[None, :], dx, 0.0)


@quick
@triton.jit(do_not_specialize=["threshold", "stream"])
def _backward_both(dy_ptr, x_ptr, xs_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, s_ptr, dx_ptr, dxt_ptr, dw_ptr, db_ptr, amax_ptr, seed_ptr, threshold, upscale, stream,
                   M, K, stride_dy, stride_x, stride_q, words,
                   ROWS: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, WEIGHT: tl.constexpr,
                   BIAS: tl.constexpr, X_SCALE: tl.constexpr, E5M2: tl.constexpr, AMAX: tl.constexpr, ALIGN: tl.constexpr,
                   DROP: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    K, stride_dy, stride_x, words = (
        K // ALIGN * ALIGN,
        stride_dy // ALIGN * ALIGN,
        stride_x // ALIGN * ALIGN,
        words // 4 * 4,
    )
    Q: tl.constexpr = ROWS // 4
    program = tl.program_id(0).to(tl.int64)
    word = program * Q + tl.arange(0, Q)
    row0, row1, row2, row3 = 4 * word, 4 * word + 1, 4 * word + 2, 4 * word + 3
    mean0, rstd0 = _kept(mean_ptr, rstd_ptr, row0, M, Q, NORM)
    mean1, rstd1 = _kept(mean_ptr, rstd_ptr, row1, M, Q, NORM)
    mean2, rstd2 = _kept(mean_ptr, rstd_ptr, row2, M, Q, NORM)
    mean3, rstd3 = _kept(mean_ptr, rstd_ptr, row3, M, Q, NORM)
    plain0 = tl.zeros((Q, BK), tl.float32)
    plain1, plain2, plain3 = plain0, plain0, plain0
    product0, product1, product2, product3 = plain0, plain0, plain0, plain0
    for start in range(0, K, BK):
        column = start + tl.arange(0, BK)
        w, b = _parameter(w_ptr, column, K, WEIGHT, BK, 1.0), _parameter(b_ptr, column, K, BIAS, BK, 0.0)
        h0, p0 = _pre_gradient(dy_ptr, x_ptr, xs_ptr, mean0, rstd0, w, b, seed_ptr, threshold, upscale, stream, row0, column, M, K, stride_dy, stride_x, WEIGHT, BIAS, ACTIVATION, X_SCALE, DROP, PREROUND)  # fmt: skip
        h1, p1 = _pre_gradient(dy_ptr, x_ptr, xs_ptr, mean1, rstd1, w, b, seed_ptr, threshold, upscale, stream, row1, column, M, K, stride_dy, stride_x, WEIGHT, BIAS, ACTIVATION, X_SCALE, DROP, PREROUND)  # fmt: skip
        h2, p2 = _pre_gradient(dy_ptr, x_ptr, xs_ptr, mean2, rstd2, w, b, seed_ptr, threshold, upscale, stream, row2, column, M, K, stride_dy, stride_x, WEIGHT, BIAS, ACTIVATION, X_SCALE, DROP, PREROUND)  # fmt: skip
        h3, p3 = _pre_gradient(dy_ptr, x_ptr, xs_ptr, mean3, rstd3, w, b, seed_ptr, threshold, upscale, stream, row3, column, M, K, stride_dy, stride_x, WEIGHT, BIAS, ACTIVATION, X_SCALE, DROP, PREROUND)  # fmt: skip
        if WEIGHT:
            tl.store(dw_ptr + program * K + column, tl.sum((p0 * h0 + p1 * h1) + (p2 * h2 + p3 * h3), 0), column < K)
        if BIAS:
            tl.store(db_ptr + program * K + column, tl.sum((p0 + p1) + (p2 + p3), 0), column < K)
        if WEIGHT:
            p0, p1, p2, p3 = p0 * w[None, :], p1 * w[None, :], p2 * w[None, :], p3 * w[None, :]
        if NORM == _LAYER:
            plain0, plain1, plain2, plain3 = plain0 + p0, plain1 + p1, plain2 + p2, plain3 + p3
        product0, product1 = product0 + p0 * h0, product1 + p1 * h1
        product2, product3 = product2 + p2 * h2, product3 + p3 * h3
    c0, c1, c2, c3 = tl.sum(plain0, 1) / K, tl.sum(plain1, 1) / K, tl.sum(plain2, 1) / K, tl.sum(plain3, 1) / K
    d0, d1, d2, d3 = tl.sum(product0, 1) / K, tl.sum(product1, 1) / K, tl.sum(product2, 1) / K, tl.sum(product3, 1) / K
    inv = inverse(tl.load(s_ptr))
    largest = tl.zeros((Q, BK), tl.float32)
    for start in range(0, K, BK):
        column = start + tl.arange(0, BK)
        w, b = _parameter(w_ptr, column, K, WEIGHT, BK, 1.0), _parameter(b_ptr, column, K, BIAS, BK, 0.0)
        h0, p0 = _pre_gradient(dy_ptr, x_ptr, xs_ptr, mean0, rstd0, w, b, seed_ptr, threshold, upscale, stream, row0, column, M, K, stride_dy, stride_x, WEIGHT, BIAS, ACTIVATION, X_SCALE, DROP, PREROUND)  # fmt: skip
        h1, p1 = _pre_gradient(dy_ptr, x_ptr, xs_ptr, mean1, rstd1, w, b, seed_ptr, threshold, upscale, stream, row1, column, M, K, stride_dy, stride_x, WEIGHT, BIAS, ACTIVATION, X_SCALE, DROP, PREROUND)  # fmt: skip
        h2, p2 = _pre_gradient(dy_ptr, x_ptr, xs_ptr, mean2, rstd2, w, b, seed_ptr, threshold, upscale, stream, row2, column, M, K, stride_dy, stride_x, WEIGHT, BIAS, ACTIVATION, X_SCALE, DROP, PREROUND)  # fmt: skip
        h3, p3 = _pre_gradient(dy_ptr, x_ptr, xs_ptr, mean3, rstd3, w, b, seed_ptr, threshold, upscale, stream, row3, column, M, K, stride_dy, stride_x, WEIGHT, BIAS, ACTIVATION, X_SCALE, DROP, PREROUND)  # fmt: skip
        g0 = _gradient(h0, p0, w, rstd0, c0, d0, row0, column, M, K, NORM, WEIGHT)
        g1 = _gradient(h1, p1, w, rstd1, c1, d1, row1, column, M, K, NORM, WEIGHT)
        g2 = _gradient(h2, p2, w, rstd2, c2, d2, row2, column, M, K, NORM, WEIGHT)
        g3 = _gradient(h3, p3, w, rstd3, c3, d3, row3, column, M, K, NORM, WEIGHT)
        if AMAX:
            largest = _larger_of_rows(largest, g0, g1, g2, g3)
        _store_both(g0, g1, g2, g3, inv, dx_ptr, dxt_ptr, word, column, M, K, stride_q, words, E5M2, PREROUND)
    if AMAX:
        raise_amax(amax_ptr, tl.max(tl.max(largest, 1)))


def rows_of(m: int, k: int, bytes_an_element: int, device: torch.device) -> int:
    """Return the rows per program: 32, a sector of the transpose, if they fit in L1 and fill the GPU twice; else 16."""
    near = 32 * k * bytes_an_element <= _NEAR
    return 32 if near and cdiv(m, 32) >= 2 * processors(device) else 16


class _ForwardPlan(NamedTuple):
    """Makers of the results, and the launch. `made`: the scale times dropout's factor, None without dropout."""

    q: Maker
    q_t: Maker
    made: Maker | None
    statistic: Maker
    launch: Bound


@planned
def _plan_forward(
    shape: tuple[int, int], stride: int, size: int, device: torch.device, x_source: int, weight: bool, bias: bool, amax: bool,
    norm: int, activation: int, eps: float, dtype: torch.dtype, draw: bool, p: float, stream: int,
) -> _ForwardPlan:  # fmt: skip
    """`size` is that of an element of x, in bytes."""
    m, k = shape
    rows = rows_of(m, k, size, device)
    launch = bind(
        _forward_both, (cdiv(m, rows),), *draw_numbers(p, stream, draw=draw), m, k, stride, cdiv(k, 16) * 16, cdiv(m, 16) * 4, eps,
        rows, _TILE // rows, norm, activation, weight, bias, x_source, dtype == torch.float8_e5m2, amax, alignment(k, stride), draw, INTERPRETED,
        views={7: torch.int32}, **_LAUNCH,
    )  # fmt: skip
    made = maker((), torch.float32, device) if draw else None
    statistic = maker((m, 1), torch.float32, device)
    return _ForwardPlan(rows_maker(m, k, 16, dtype, device), rows_maker(k, m, 16, dtype, device), made, statistic, launch)  # fmt: skip


def forward_both(
    x: Tensor, x_scale: Tensor | None, weight: Tensor | None, bias: Tensor | None, scale: Tensor, amax: Tensor | None,
    norm: int, activation: int, eps: float, dtype: torch.dtype, seed: Tensor | None, p: float, stream: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q, q^T, the scale times dropout's factor, mean, rstd; x [M, K] has unit stride along K."""
    plan = _plan_forward(
        x.shape, x.stride(0), x.element_size(), x.device, 0 if x_scale is None else scale_source(x_scale), weight is not None, bias is not None, amax is not None,
        norm, activation, eps, dtype, seed is not None, p, stream,
    )  # fmt: skip
    q, q_t, made = plan.q(), plan.q_t(), plan.made and plan.made()
    mean, rstd = plan.statistic() if norm == LAYER else None, plan.statistic()
    plan.launch(x, x_scale, weight, bias, scale, made, q, q_t, mean, rstd, amax, seed)
    return q, q_t, made, mean, rstd


class _BackwardPlan(NamedTuple):
    """Makers of dx, its transpose and the parts of the parameters' gradients, None without the parameter; the launch."""

    dx: Maker
    dx_t: Maker
    dw: Maker | None
    db: Maker | None
    launch: Bound


@planned
def _plan_backward(
    shape: tuple[int, int], stride: int, device: torch.device, h_stride: int, size: int, h_source: int, weight: bool, bias: bool, amax: bool,
    norm: int, activation: int, dtype: torch.dtype, draw: bool, p: float, stream: int,
) -> _BackwardPlan:  # fmt: skip
    """`size` is that of an element of dy and one of h, in bytes."""
    m, k = shape
    rows = rows_of(m, k, size, device)
    programs = cdiv(m, rows)
    launch = bind(
        _backward_both, (programs,), *draw_numbers(p, stream, draw=draw), m, k, stride, h_stride, cdiv(k, 16) * 16, cdiv(m, 16) * 4,
        rows, _TILE // rows, norm, activation, weight, bias, h_source, dtype == torch.float8_e5m2, amax, alignment(k, stride, h_stride), draw, INTERPRETED,
        views={9: torch.int32}, **_LAUNCH,
    )  # fmt: skip
    part = maker((programs, k), torch.float32, device)
    dx, dx_t = rows_maker(m, k, 16, dtype, device), rows_maker(k, m, 16, dtype, device)
    return _BackwardPlan(dx, dx_t, part if weight else None, part if bias else None, launch)


def backward_both(
    dy: Tensor, h: Tensor, h_scale: Tensor | None, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor, scale: Tensor,
    amax: Tensor | None, norm: int, activation: int, dtype: torch.dtype, seed: Tensor | None, p: float, stream: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dx, dx^T, dweight, dbias."""
    plan = _plan_backward(
        dy.shape, dy.stride(0), dy.device, h.stride(0), dy.element_size() + h.element_size(), 0 if h_scale is None else scale_source(h_scale),
        weight is not None, bias is not None, amax is not None, norm, activation, dtype, seed is not None, p, stream,
    )  # fmt: skip
    dx, dx_t, dw, db = plan.dx(), plan.dx_t(), plan.dw and plan.dw(), plan.db and plan.db()
    plan.launch(dy, h, h_scale, weight, bias, mean, rstd, scale, dx, dx_t, dw, db, amax, seed)
    return dx, dx_t, add_parts(dw, weight), add_parts(db, bias)
