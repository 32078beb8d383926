"""A Wukong layer except for its tower. Memory-bound: x is read once, and every result is written once.

Unfused this is two batched GEMMs, a norm, a quantizer, a concatenation, an addition and a norm, each of which reads or
writes B n d elements again. On an H200 they take longer than the FP8 tower between them (NOTES.md).

A program loops over examples. It holds x [n, d] of one example and multiplies it by the rows of W_l, W_k (and W_r) with
small tensor core products. The flattened products are normalized in blocks of 256, whose ends are not aligned with the
k products of a vector: each vector has two sums, one for each block that it may be in.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.fused_linear.call import NORM_BLOCK, NORM_EPS
from loka.kernels.plans import planned
from loka.kernels.scaled_mm.triton_kernels import processors
from loka.kernels.strides import Maker, cdiv, maker, next_power_of_2
from loka.kernels.tile import INTERPRETED, inverse, multiply, to_fp8
from loka.kernels.triton_bound import Bound, bind
from loka.kernels.triton_launcher import quick

_EPS = tl.constexpr(NORM_EPS)
_BLOCK = tl.constexpr(NORM_BLOCK)
_PER_PROCESSOR = 3
_GRADIENT_PER_PROCESSOR = 2
_SHARED = 227 * 1024  # bytes of shared memory that a program may use on Hopper


@triton.jit
def _mix(
    weight_ptr,
    first: tl.constexpr,
    count: tl.constexpr,
    x,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    PREROUND: tl.constexpr,
):
    """Multiply `count` rows of W from `first` by x [n, d], with a float32 result."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BN)
    inside = (row < count)[:, None] & (column < N)[None, :]
    weight = tl.load(weight_ptr + (first + row)[:, None] * N + column[None, :], inside, other=0.0)
    return multiply(weight, x, PREROUND)


@triton.jit
def _places(N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr):
    """Return where products [n, k] are in the flat row.

    A vector's k products are in at most two blocks of 256: that of its first product (`in_first`) and the next.
    """
    vector, mixture, block = tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BLOCKS)
    flat = vector[:, None] * K + mixture[None, :]
    real = (vector < N)[:, None] & (mixture < K)[None, :]
    first = vector * K // _BLOCK
    late = flat // _BLOCK != first[:, None]
    in_first, in_next = first[:, None] == block[None, :], first[:, None] + 1 == block[None, :]
    width = tl.maximum(tl.minimum(N * K - block * _BLOCK, _BLOCK), 1).to(tl.float32)
    return flat, real, late, in_first, in_next, width


@triton.jit
def _block_mean(values, late, in_first, in_next, width):
    """Return the means over the blocks of 256 of values [n, k], which are zero outside."""
    early_sum, late_sum = tl.sum(tl.where(late, 0.0, values), 1), tl.sum(tl.where(late, values, 0.0), 1)
    share = tl.where(in_first, early_sum[:, None], 0.0) + tl.where(in_next, late_sum[:, None], 0.0)
    return tl.sum(share, 0) / width


@triton.jit
def _spread(per_block, late, in_first, in_next):
    """Return, for every product, the value of its block."""
    early = tl.sum(tl.where(in_first, per_block[None, :], 0.0), 1)
    beyond = tl.sum(tl.where(in_next, per_block[None, :], 0.0), 1)
    return tl.where(late, beyond[:, None], early[:, None])


@triton.jit
def _load_vectors(ptr, first: tl.constexpr, count: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, BD)
    inside = (row < count)[:, None] & (column < D)[None, :]
    return tl.load(ptr + (first + row)[:, None] * D + column[None, :], inside, other=0.0)


@triton.jit
def _store_vectors(
    ptr, first: tl.constexpr, count: tl.constexpr, D: tl.constexpr, y, ROWS: tl.constexpr, BD: tl.constexpr
):
    row, column = tl.arange(0, ROWS), tl.arange(0, BD)
    inside = (row < count)[:, None] & (column < D)[None, :]
    tl.store(ptr + (first + row)[:, None] * D + column[None, :], y, inside)


@triton.jit
def _store_rows(ptr, first: tl.constexpr, count: tl.constexpr, values, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    tl.store(ptr + first + row, values, row < count)


@quick
@triton.jit
def _interact(x_ptr, weight_ptr, scale_ptr, q_ptr, next_ptr, residual_ptr, rstd_ptr, B,
              N: tl.constexpr, D: tl.constexpr, K: tl.constexpr, NL: tl.constexpr, NF: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, BF: tl.constexpr,
              BLOCKS: tl.constexpr, PROJECT: tl.constexpr, KEEP: tl.constexpr, PROGRAMS: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    flat, real, late, in_first, in_next, width = _places(N, K, BN, BK, BLOCKS)
    inv = inverse(tl.load(scale_ptr))
    for example in tl.range(tl.program_id(0), B, PROGRAMS):
        at = tl.full((), 0, tl.int64) + example
        x = _load_vectors(x_ptr + at * N * D, 0, N, D, BN, BD)
        mixtures = _mix(weight_ptr, NL, K, x, N, BK, BN, PREROUND).to(x.dtype)
        products = multiply(x, tl.trans(mixtures), PREROUND)  # rows and columns beyond n and k are zero
        mean_square = _block_mean(products * products, late, in_first, in_next, width)
        factor = _spread(tl.rsqrt(mean_square + _EPS), late, in_first, in_next)
        q = to_fp8(products * factor, inv, 0, False, False, PREROUND, True)
        tl.store(q_ptr + at * N * K + flat, q, real)

        linear = _mix(weight_ptr, 0, NL, x, N, BL, BN, PREROUND)
        if PROJECT:
            other = _mix(weight_ptr, NL + K + NF, NL, x, N, BL, BN, PREROUND)
            kept = _mix(weight_ptr, NL + K, NF, x, N, BF, BN, PREROUND)
            _store_vectors(residual_ptr + at * NF * D, 0, NF, D, kept.to(x.dtype), BF, BD)
        else:
            other = _load_vectors(x_ptr + at * N * D, NF, NL, D, BL, BD).to(tl.float32)
        summed = linear + other
        rstd = tl.rsqrt(tl.sum(summed * summed, 1) / D + _EPS)
        if KEEP:
            _store_rows(rstd_ptr + at * (NF + NL), NF, NL, rstd, BL)
        following = (summed * rstd[:, None]).to(x.dtype)
        _store_vectors(next_ptr + at * (NF + NL) * D, NF, NL, D, following, BL, BD)


@quick
@triton.jit
def _finish(next_ptr, tower_ptr, residual_ptr, rstd_ptr, next_stride, residual_stride, rstd_stride,
            D: tl.constexpr, NF: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, KEEP: tl.constexpr):  # fmt: skip
    example = tl.program_id(0).to(tl.int64)
    made = _load_vectors(tower_ptr + example * NF * D, 0, NF, D, BF, BD).to(tl.float32)
    kept = _load_vectors(residual_ptr + example * residual_stride, 0, NF, D, BF, BD).to(tl.float32)
    summed = made + kept
    rstd = tl.rsqrt(tl.sum(summed * summed, 1) / D + _EPS)
    if KEEP:
        _store_rows(rstd_ptr + example * rstd_stride, 0, NF, rstd, BF)
    y = (summed * rstd[:, None]).to(next_ptr.dtype.element_ty)
    _store_vectors(next_ptr + example * next_stride, 0, NF, D, y, BF, BD)


@quick
@triton.jit
def _norm_gradient(
    g_ptr, next_ptr, rstd_ptr, ds_ptr, D: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):
    """Compute dS = rstd (g - N mean(g N)) for the vectors of one example; N = S rstd is the next x."""
    example = tl.program_id(0).to(tl.int64)
    g = _load_vectors(g_ptr + example * ROWS * D, 0, ROWS, D, BR, BD).to(tl.float32)
    n = _load_vectors(next_ptr + example * ROWS * D, 0, ROWS, D, BR, BD).to(tl.float32)
    row = tl.arange(0, BR)
    rstd = tl.load(rstd_ptr + example * ROWS + row, row < ROWS, other=0.0)
    ds = rstd[:, None] * (g - n * (tl.sum(g * n, 1) / D)[:, None])
    _store_vectors(ds_ptr + example * ROWS * D, 0, ROWS, D, ds.to(ds_ptr.dtype.element_ty), BR, BD)


@triton.jit
def _weights(
    weight_ptr, first: tl.constexpr, count: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr
):
    """Load rows of W, transposed to [n, rows]."""
    vector, row = tl.arange(0, BN), tl.arange(0, ROWS)
    inside = (vector < N)[:, None] & (row < count)[None, :]
    return tl.load(weight_ptr + (first + row)[None, :] * N + vector[:, None], inside, other=0.0)


@triton.jit
def _store_partial(
    ptr, first: tl.constexpr, count: tl.constexpr, N: tl.constexpr, values, ROWS: tl.constexpr, BN: tl.constexpr
):
    row, column = tl.arange(0, ROWS), tl.arange(0, BN)
    inside = (row < count)[:, None] & (column < N)[None, :]
    tl.store(ptr + (first + row)[:, None] * N + column[None, :], values, inside)


@quick
@triton.jit
def _interact_gradient(x_ptr, weight_ptr, dq_ptr, ds_ptr, dx_ptr, dw_ptr, B,
                       N: tl.constexpr, D: tl.constexpr, K: tl.constexpr, NL: tl.constexpr, NF: tl.constexpr,
                       BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, BO: tl.constexpr,
                       BLOCKS: tl.constexpr, PROJECT: tl.constexpr, PROGRAMS: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """Compute dx and this program's part of dW. Recomputing mixtures and products is cheaper than keeping them."""
    flat, real, late, in_first, in_next, width = _places(N, K, BN, BK, BLOCKS)
    OUT: tl.constexpr = NF + NL
    dw_l = tl.zeros((BL, BN), tl.float32)
    dw_k = tl.zeros((BK, BN), tl.float32)
    if PROJECT:
        dw_r = tl.zeros((BO, BN), tl.float32)
    for example in tl.range(tl.program_id(0), B, PROGRAMS):
        at = tl.full((), 0, tl.int64) + example
        sums = ds_ptr + at * OUT * D
        x = _load_vectors(x_ptr + at * N * D, 0, N, D, BN, BD)
        mixtures = _mix(weight_ptr, NL, K, x, N, BK, BN, PREROUND).to(x.dtype)
        products = multiply(x, tl.trans(mixtures), PREROUND)
        rstd = tl.rsqrt(_block_mean(products * products, late, in_first, in_next, width) + _EPS)
        factor = _spread(rstd, late, in_first, in_next)
        z = products * factor
        dq = tl.load(dq_ptr + at * N * K + flat, real, other=0.0).to(tl.float32)
        mean = _spread(_block_mean(dq * z, late, in_first, in_next, width), late, in_first, in_next)
        dp = (factor * (dq - z * mean)).to(x.dtype)
        dy = multiply(tl.trans(dp), x, PREROUND).to(x.dtype)
        dw_k += multiply(dy, tl.trans(x), PREROUND)
        dx = multiply(dp, mixtures, PREROUND)
        dx += multiply(_weights(weight_ptr, NL, K, N, BK, BN), dy, PREROUND)
        dl = _load_vectors(sums, NF, NL, D, BL, BD)
        dw_l += multiply(dl, tl.trans(x), PREROUND)
        dx += multiply(_weights(weight_ptr, 0, NL, N, BL, BN), dl, PREROUND)
        if PROJECT:
            ds = _load_vectors(sums, 0, OUT, D, BO, BD)
            dw_r += multiply(ds, tl.trans(x), PREROUND)
            dx += multiply(_weights(weight_ptr, NL + K, OUT, N, BO, BN), ds, PREROUND)
        else:
            dx += _load_vectors(sums, 0, OUT, D, BN, BD).to(tl.float32)
        _store_vectors(dx_ptr + at * N * D, 0, N, D, dx.to(x.dtype), BN, BD)
    mine = dw_ptr + tl.program_id(0).to(tl.int64) * (NL + K + (OUT if PROJECT else 0)) * N
    _store_partial(mine, 0, NL, N, dw_l, BL, BN)
    _store_partial(mine, NL, K, N, dw_k, BK, BN)
    if PROJECT:
        _store_partial(mine, NL + K, OUT, N, dw_r, BO, BN)


def _padded(count: int) -> int:
    return max(16, next_power_of_2(count))


def _launch_options(stage: int, most: int, warps: int) -> dict[str, int]:
    """Return launch options with `most` stages, or as many as fit.

    A stage holds `stage` 16-bit elements of an example and of W; everything else takes less than 16 KiB.
    """
    return {"num_warps": warps, "num_stages": max(1, min(most, (_SHARED - 16 * 1024) // (2 * stage)))}


def forward_launch(bn: int, bd: int, bk: int, bl: int, bf: int, *, project: bool) -> dict[str, int]:
    """Return launch options for `_interact`: the fastest of a sweep on an H200 that fit."""
    return _launch_options(bn * (bd + bk + bl + (bl + bf if project else 0)), 3, 4)


def gradient_launch(bn: int, bd: int, bk: int, bl: int, bo: int, *, project: bool) -> dict[str, int]:
    """Return launch options for `_interact_gradient`: the fastest of a sweep on an H200 that fit."""
    stage = bn * (bd + 3 * bk + bl) + bl * bd + (bo * (bd + bn) if project else 0)
    return _launch_options(stage, 3, 4) if bn <= 64 else _launch_options(stage, 2, 8)


class _Plan(NamedTuple):
    """Makers of the results, and the launch; None without examples."""

    products: Maker
    following: Maker
    residual: Maker
    rstd: Maker
    launch: Bound | None


@planned
def _plan_interact(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, k: int, n_l: int, n_f: int, project: bool, keep: bool
) -> _Plan:  # fmt: skip
    rows, n, d = shape
    # what the kernel is compiled for, also where fewer programs are launched
    most = _PER_PROCESSOR * processors(device)
    blocks = (_padded(n), _padded(d), _padded(k), _padded(n_l), _padded(n_f))
    launch = bind(
        _interact, (min(rows, most),), rows, n, d, k, n_l, n_f, *blocks, _padded(cdiv(n * k, NORM_BLOCK)), project, keep, most, INTERPRETED,
        **forward_launch(*blocks, project=project),
    )  # fmt: skip
    return _Plan(
        products=maker((rows, n * k), torch.float8_e4m3fn, device),
        following=maker((rows, n_f + n_l, d), dtype, device),
        residual=maker((rows, n_f, d) if project else (0,), dtype, device),
        rstd=maker((rows, n_f + n_l) if keep else (0,), torch.float32, device),
        launch=launch if rows else None,
    )


def interact(
    x: Tensor, weight: Tensor, scale: Tensor, k: int, n_l: int, n_f: int, project: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return products [B, n k], next [B, n_f + n_l, d], residual [B, n_f, d] or empty, rstd [B, n_f + n_l] or empty.

    x [B, n, d] is contiguous, and weight has its dtype. The residual is empty if it is x itself, rstd if not `keep`.
    """
    plan = _plan_interact(x.shape, x.dtype, x.device, k, n_l, n_f, project, keep)
    made = plan.products(), plan.following(), plan.residual(), plan.rstd()
    if plan.launch is not None:
        plan.launch(x, weight, scale, *made)
    return made


@planned
def _plan_finish(rows: int, d: int, strides: tuple[int, int, int], n_f: int, keep: bool) -> Bound:
    return bind(_finish, (rows,), *strides, d, n_f, _padded(n_f), _padded(d), keep, num_warps=4)


def finish(following: Tensor, tower: Tensor, residual: Tensor, rstd: Tensor, n_f: int) -> None:
    """Write BlockNorm_d(tower + residual) to following[:, :n_f], and its rstd if that is not empty.

    In all three, an example's vectors are contiguous.
    """
    rows, _, d = following.shape
    if not rows:
        return
    keep = rstd.numel() > 0
    strides = following.stride(0), residual.stride(0), rstd.stride(0) if keep else 0
    _plan_finish(rows, d, strides, n_f, keep)(following, tower, residual, rstd if keep else None)


@planned
def _plan_norm_gradient(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[Maker, Bound]:
    rows, vectors, d = shape
    launch = bind(_norm_gradient, (rows,), d, vectors, _padded(vectors), _padded(d), num_warps=4)
    return maker(shape, dtype, device), launch


def norm_gradient(g: Tensor, following: Tensor, rstd: Tensor) -> Tensor:
    """Return the gradient of the norm's input, [B, n_f + n_l, d]."""
    make, launch = _plan_norm_gradient(following.shape, following.dtype, following.device)
    ds = make()
    if following.shape[0]:
        launch(g, following, rstd, ds)
    return ds


@planned
def _plan_gradient(
    shape: tuple[int, int, int], weight: tuple[int, int], dtype: torch.dtype, device: torch.device, k: int, n_l: int, n_f: int, project: bool
) -> tuple[Maker, Maker, Bound]:  # fmt: skip
    rows, n, d = shape
    most = _GRADIENT_PER_PROCESSOR * processors(device)
    programs = max(1, min(rows, most))
    blocks = (_padded(n), _padded(d), _padded(k), _padded(n_l), _padded(n_f + n_l))
    launch = bind(
        _interact_gradient, (programs,), rows, n, d, k, n_l, n_f, *blocks, _padded(cdiv(n * k, NORM_BLOCK)), project, most, INTERPRETED,
        **gradient_launch(*blocks, project=project),
    )  # fmt: skip
    return maker(shape, dtype, device), maker((programs, *weight), torch.float32, device), launch


def interact_gradient(
    x: Tensor, weight: Tensor, dq: Tensor, ds: Tensor, k: int, n_l: int, n_f: int, project: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dx [B, n, d] and dW [rows of W, n] in float32.

    Each program sums over its examples, then the parts are summed, so results are bitwise reproducible.
    """
    make, make_parts, launch = _plan_gradient(x.shape, weight.shape, x.dtype, x.device, k, n_l, n_f, project)
    dx, parts = make(), make_parts()
    if not x.shape[0]:
        return dx, torch.zeros_like(parts[0])
    launch(x, weight, dq, ds, dx, parts)
    return dx, parts.sum(0)
