"""A Wukong layer around its tower. Memory-bound: x is read once, everything made of it is written once.

Unfused this is a batched GEMM, another, a norm, a quantiser, a concatenation, an addition and a norm: each reads or writes B n d elements again. On an
H200 they take longer than the FP8 tower between them (NOTES.md).

One program walks over examples. Of one example it holds x [n, d] and multiplies it by the rows of W_l, W_k (and W_r) with small tensor-core products; the
flattened products are normalised in blocks of 256, which do not end where a vector's k products do: two sums a vector, one for each block it may lie in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.interaction.call import NORM_BLOCK, NORM_EPS
from loka.kernels.scaled_mm.triton_kernels import processors
from loka.kernels.tile import INTERPRETED, inverse, to_fp8

_EPS = tl.constexpr(NORM_EPS)
_BLOCK = tl.constexpr(NORM_BLOCK)
_LAUNCH = {"num_warps": 4, "num_stages": 3}
_PER_PROCESSOR = 4


@triton.jit
def _multiply(a, b, PREROUND: tl.constexpr):
    if PREROUND:  # the interpreter multiplies the bits of bf16 numbers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


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
    """Rows first .. first + count of W times x [n, d], in float32."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BN)
    inside = (row < count)[:, None] & (column < N)[None, :]
    weight = tl.load(weight_ptr + (first + row)[:, None] * N + column[None, :], inside, other=0.0)
    return _multiply(weight, x, PREROUND)


@triton.jit
def _normalize(y, D: tl.constexpr):
    return y * tl.rsqrt(tl.sum(y * y, 1) / D + _EPS)[:, None]


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
def _interact(x_ptr, weight_ptr, scale_ptr, q_ptr, next_ptr, residual_ptr, B,
              N: tl.constexpr, D: tl.constexpr, K: tl.constexpr, NL: tl.constexpr, NF: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, BF: tl.constexpr,
              BLOCKS: tl.constexpr, PROJECT: tl.constexpr, PROGRAMS: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    vector, mixture = tl.arange(0, BN), tl.arange(0, BK)
    flat = vector[:, None] * K + mixture[None, :]
    real = (vector < N)[:, None] & (mixture < K)[None, :]
    # The K products of a vector lie in at most two blocks of 256: the one its first product is in, and the next.
    first = vector * K // _BLOCK
    late = flat // _BLOCK != first[:, None]
    block = tl.arange(0, BLOCKS)
    in_first, in_next = first[:, None] == block[None, :], first[:, None] + 1 == block[None, :]
    width = tl.minimum(N * K - block * _BLOCK, _BLOCK).to(tl.float32)
    inv = inverse(tl.load(scale_ptr))
    for example in tl.range(tl.program_id(0), B, PROGRAMS):
        at = tl.full((), 0, tl.int64) + example
        x = _load_vectors(x_ptr + at * N * D, 0, N, D, BN, BD)
        mixtures = _mix(weight_ptr, NL, K, x, N, BK, BN, PREROUND).to(x.dtype)
        products = _multiply(x, tl.trans(mixtures), PREROUND)  # rows and columns beyond n and k are zero
        square = products * products
        early_sum, late_sum = tl.sum(tl.where(late, 0.0, square), 1), tl.sum(tl.where(late, square, 0.0), 1)
        share = tl.where(in_first, early_sum[:, None], 0.0) + tl.where(in_next, late_sum[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(share, 0) / tl.maximum(width, 1.0) + _EPS)
        early_factor = tl.sum(tl.where(in_first, rstd[None, :], 0.0), 1)
        late_factor = tl.sum(tl.where(in_next, rstd[None, :], 0.0), 1)
        factor = tl.where(late, late_factor[:, None], early_factor[:, None])
        q = to_fp8(products * factor, inv, 0, False, False, PREROUND, True)
        tl.store(q_ptr + at * N * K + flat, q, real)

        linear = _mix(weight_ptr, 0, NL, x, N, BL, BN, PREROUND)
        if PROJECT:
            other = _mix(weight_ptr, NL + K + NF, NL, x, N, BL, BN, PREROUND)
            kept = _mix(weight_ptr, NL + K, NF, x, N, BF, BN, PREROUND)
            _store_vectors(residual_ptr + at * NF * D, 0, NF, D, kept.to(x.dtype), BF, BD)
        else:
            other = _load_vectors(x_ptr + at * N * D, NF, NL, D, BL, BD).to(tl.float32)
        following = _normalize(linear + other, D).to(x.dtype)
        _store_vectors(next_ptr + at * (NF + NL) * D, NF, NL, D, following, BL, BD)


@triton.jit
def _finish(next_ptr, tower_ptr, residual_ptr, next_stride, residual_stride, D: tl.constexpr, NF: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    example = tl.program_id(0).to(tl.int64)
    made = _load_vectors(tower_ptr + example * NF * D, 0, NF, D, BF, BD).to(tl.float32)
    kept = _load_vectors(residual_ptr + example * residual_stride, 0, NF, D, BF, BD).to(tl.float32)
    y = _normalize(made + kept, D)
    _store_vectors(next_ptr + example * next_stride, 0, NF, D, y.to(next_ptr.dtype.element_ty), BF, BD)


def _power(count: int) -> int:
    return max(16, triton.next_power_of_2(count))


def interact(
    x: Tensor, weight: Tensor, scale: Tensor, *, k: int, n_l: int, n_f: int, project: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, n, d] contiguous, weight in its type -> products [B, n k], next [B, n_f + n_l, d], residual [B, n_f, d] or empty."""
    rows, n, d = x.shape
    products = torch.empty(rows, n * k, device=x.device, dtype=torch.float8_e4m3fn)
    following = torch.empty(rows, n_f + n_l, d, device=x.device, dtype=x.dtype)
    residual = torch.empty((rows, n_f, d) if project else (0,), device=x.device, dtype=x.dtype)
    if rows:
        programs = min(rows, _PER_PROCESSOR * processors(x.device))
        _interact[(programs,)](
            x, weight, scale, products, following, residual, rows, n, d, k, n_l, n_f,
            _power(n), _power(d), _power(k), _power(n_l), _power(n_f), _power(triton.cdiv(n * k, NORM_BLOCK)),
            project, programs, INTERPRETED, **_LAUNCH,
        )  # fmt: skip
    return products, following, residual


def finish(following: Tensor, tower: Tensor, residual: Tensor, *, n_f: int) -> None:
    """following[:, :n_f] = BlockNorm_d(tower + residual); the vectors of an example lie together in each of them."""
    rows, _, d = following.shape
    if rows:
        _finish[(rows,)](
            following, tower, residual, following.stride(0), residual.stride(0), d, n_f, _power(n_f), _power(d), num_warps=4
        )  # fmt: skip
