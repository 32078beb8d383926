"""Quantisers that run at the speed of a copy.

Three kernels cover every granularity:

* `_rows`   one scale per row. A row (up to 16384 wide) stays in registers between its amax and its cast: one read, one write.
* `_tiles`  a 128-wide tile in registers; scales are computed in it (1x128, 128x128) or given (tensor, row); writes the tensor, its transpose, or both
            from one read. The transpose goes through shared memory, so that both writes are whole 128-byte lines.
* `_amax`   row, column and tensor maxima in one read, for the scales no tile can know alone: dynamic `tensor`, and `row` of the transpose.

So dynamic `tensor`, and `row` together with its transpose, take two reads; everything else takes one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.tile import INTERPRETED, finite_magnitude, inverse, scale_of, to_fp8

GROUP = 128
WIDEST_ROW = 16384  # elements one program keeps in registers

# Where a tile's scales come from.
ABSENT, SCALAR, VECTOR, GROUPED, SQUARE = 0, 1, 2, 3, 4
_NO_OUTPUT = tl.constexpr(0)
_SCALAR = tl.constexpr(1)
_VECTOR = tl.constexpr(2)
_GROUPED = tl.constexpr(3)
_SQUARE = tl.constexpr(4)


@triton.jit
def _rows(x_ptr, q_ptr, s_ptr, M, K, stride_x, seed,
          ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
          E5M2: tl.constexpr, POW2: tl.constexpr, STOCHASTIC: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    if WHOLE:
        inside = (row < M)[:, None] & (column < K)[None, :]
        x = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], inside, other=0.0).to(tl.float32)
        amax = tl.max(finite_magnitude(x), 1)
        scale = scale_of(amax, E5M2, POW2)
        offset = row[:, None] * K + column[None, :]
        noise = tl.randint(seed, offset) if STOCHASTIC else 0
        q = to_fp8(x, inverse(scale)[:, None], noise, E5M2, STOCHASTIC, PREROUND)
        tl.store(q_ptr + offset, q, inside)
        tl.store(s_ptr + row, scale, row < M)
    else:
        amax = tl.zeros((ROWS,), tl.float32)
        for start in range(0, K, BLOCK):
            inside = (row < M)[:, None] & (start + column < K)[None, :]
            x = tl.load(x_ptr + row[:, None] * stride_x + (start + column)[None, :], inside, other=0.0)
            amax = tl.maximum(amax, tl.max(finite_magnitude(x.to(tl.float32)), 1))
        scale = scale_of(amax, E5M2, POW2)
        inv = inverse(scale)[:, None]
        tl.store(s_ptr + row, scale, row < M)
        for start in range(0, K, BLOCK):
            inside = (row < M)[:, None] & (start + column < K)[None, :]
            x = tl.load(x_ptr + row[:, None] * stride_x + (start + column)[None, :], inside, other=0.0)
            offset = row[:, None] * K + (start + column)[None, :]
            noise = tl.randint(seed, offset) if STOCHASTIC else 0
            tl.store(q_ptr + offset, to_fp8(x.to(tl.float32), inv, noise, E5M2, STOCHASTIC, PREROUND), inside)


@triton.jit
def _group_scale(
    magnitude, s_ptr, first, index, count, stride, AXIS: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr
):
    """Scales of a tile's rows (AXIS 1) or columns (AXIS 0) over the whole tile: computed, stored, returned."""
    scale = scale_of(tl.max(magnitude, AXIS), E5M2, POW2)
    tl.store(s_ptr + index * stride + first, scale, index < count)
    return scale


@triton.jit
def _tiles(x_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, M, K, stride_x, seed,
           BM: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, TSCALE: tl.constexpr,
           E5M2: tl.constexpr, POW2: tl.constexpr, STOCHASTIC: tl.constexpr,
           T_E5M2: tl.constexpr, T_POW2: tl.constexpr, T_STOCHASTIC: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    wide = tl.cdiv(K, BK)
    tile_m = (tl.program_id(0) // wide).to(tl.int64)
    tile_k = (tl.program_id(0) % wide).to(tl.int64)
    row = tile_m * BM + tl.arange(0, BM)
    column = tile_k * BK + tl.arange(0, BK)
    inside = (row < M)[:, None] & (column < K)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], inside, other=0.0).to(tl.float32)
    magnitude = finite_magnitude(x)
    if SCALE != _NO_OUTPUT:
        if SCALE == _SCALAR:
            inv = inverse(tl.load(s_ptr))
        elif SCALE == _VECTOR:
            inv = inverse(tl.load(s_ptr + row, row < M, other=1.0))[:, None]
        elif SCALE == _GROUPED:
            inv = inverse(_group_scale(magnitude, s_ptr, tile_k, row, M, wide, 1, E5M2, POW2))[:, None]
        else:
            scale = scale_of(tl.max(magnitude), E5M2, POW2)
            tl.store(s_ptr + tile_m * wide + tile_k, scale)
            inv = inverse(scale)
        offset = row[:, None] * K + column[None, :]
        noise = tl.randint(seed, offset) if STOCHASTIC else 0
        q = to_fp8(x, inv, noise, E5M2, STOCHASTIC, PREROUND)
        tl.store(q_ptr + offset, q, inside)
    if TSCALE != _NO_OUTPUT:
        high = tl.cdiv(M, BM)
        if TSCALE == _SCALAR:
            inv = inverse(tl.load(st_ptr))
        elif TSCALE == _VECTOR:
            inv = inverse(tl.load(st_ptr + column, column < K, other=1.0))[None, :]
        elif TSCALE == _GROUPED:
            inv = inverse(_group_scale(magnitude, st_ptr, tile_m, column, K, high, 0, T_E5M2, T_POW2))[None, :]
        else:
            scale = scale_of(tl.max(magnitude), T_E5M2, T_POW2)
            tl.store(st_ptr + tile_k * high + tile_m, scale)
            inv = inverse(scale)
        noise = tl.randint(seed + 1, row[:, None] * K + column[None, :]) if T_STOCHASTIC else 0
        q = to_fp8(x, inv, noise, T_E5M2, T_STOCHASTIC, PREROUND)
        tl.store(qt_ptr + column[:, None] * M + row[None, :], tl.trans(q), tl.trans(inside))


@triton.jit
def _amax(x_ptr, row_ptr, column_ptr, tensor_ptr, M, K, stride_x,
          BM: tl.constexpr, BK: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, TENSOR: tl.constexpr):  # fmt: skip
    """Maxima of |x|. Non-negative floats order like their bits, so the atomics are on integers."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    per_row = tl.zeros((BM,), tl.float32)
    for start in range(0, K, BK):
        column = start + tl.arange(0, BK)
        inside = (row < M)[:, None] & (column < K)[None, :]
        x = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], inside, other=0.0).to(tl.float32)
        magnitude = finite_magnitude(x)
        per_row = tl.maximum(per_row, tl.max(magnitude, 1))
        if COLUMN:
            per_column = tl.max(magnitude, 0)
            tl.atomic_max(column_ptr + column, per_column.to(tl.int32, bitcast=True), column < K, sem="relaxed")
    if ROW:
        tl.store(row_ptr + row, per_row, row < M)
    if TENSOR:
        tl.atomic_max(tensor_ptr, tl.max(per_row).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _scales(amax_ptr, s_ptr, count, BLOCK: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(amax_ptr + index, index < count, other=0.0)
    tl.store(s_ptr + index, scale_of(amax, E5M2, POW2), index < count)


def quantize_rows(x: Tensor, *, e5m2: bool, pow2: bool, stochastic: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Per-row scales; x [M, K] with unit stride along K."""
    m, k = x.shape
    q = torch.empty(m, k, device=x.device, dtype=torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn)
    scale = torch.empty(m, 1, device=x.device, dtype=torch.float32)
    if m == 0 or k == 0:
        return q, scale.fill_(1.0)
    whole = k <= WIDEST_ROW
    block = triton.next_power_of_2(k) if whole else 4096
    rows = max(1, min(32, 4096 // block)) if whole else 1
    warps = 4 if block * rows <= 4096 else 8
    _rows[(triton.cdiv(m, rows),)](
        x, q, scale, m, k, x.stride(0), seed, rows, block, whole, e5m2, pow2, stochastic, INTERPRETED, num_warps=warps
    )  # fmt: skip
    return q, scale


def maxima(x: Tensor, *, row: bool, column: bool, tensor: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Largest finite magnitudes per row [M], per column [K] and of the tensor [], float32, in one read."""
    m, k = x.shape
    per_row = torch.zeros(m if row else 0, device=x.device, dtype=torch.float32)
    per_column = torch.zeros(k if column else 0, device=x.device, dtype=torch.float32)
    total = torch.zeros((), device=x.device, dtype=torch.float32)
    if m and k:
        bm = 64 if column else (16 if m >= 4096 else 4)
        _amax[(triton.cdiv(m, bm),)](
            x, per_row, per_column.view(torch.int32), total.view(torch.int32), m, k, x.stride(0),
            bm, 128 if column else 512, row, column, tensor, num_warps=8,
        )  # fmt: skip
    return per_row, per_column, total


def scales_from(amax: Tensor, *, e5m2: bool, pow2: bool) -> Tensor:
    """Scales of given maxima, by the law, on the device."""
    scale = torch.empty_like(amax)
    if amax.numel():
        _scales[(triton.cdiv(amax.numel(), 1024),)](amax, scale, amax.numel(), 1024, e5m2, pow2)
    return scale


def quantize_tiles(
    x: Tensor,
    *,
    source: int,
    scale: Tensor | None,
    e5m2: bool,
    pow2: bool,
    stochastic: bool,
    t_source: int,
    t_scale: Tensor | None,
    t_e5m2: bool,
    t_pow2: bool,
    t_stochastic: bool,
    seed: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Quantise tiles of x [M, K] into q [M, K] and / or the transpose qt [K, M], with scales given or made in the tile."""
    m, k = x.shape
    high, wide = triton.cdiv(m, GROUP), triton.cdiv(k, GROUP)
    q = qt = None
    if source != ABSENT:
        q = torch.empty(m, k, device=x.device, dtype=torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn)
        if source in (GROUPED, SQUARE):
            scale = torch.empty(m if source == GROUPED else high, wide, device=x.device, dtype=torch.float32)
    if t_source != ABSENT:
        qt = torch.empty(k, m, device=x.device, dtype=torch.float8_e5m2 if t_e5m2 else torch.float8_e4m3fn)
        if t_source in (GROUPED, SQUARE):
            t_scale = torch.empty(k if t_source == GROUPED else wide, high, device=x.device, dtype=torch.float32)
    if m and k:
        # A tile must hold whole groups: 128 along K for 1x128, 128 along M for its transpose. Without a transpose, shallow tiles keep more loads in flight.
        bm = 32 if t_source == ABSENT and source != SQUARE else GROUP
        _tiles[(triton.cdiv(m, bm) * wide,)](
            x, q, scale, qt, t_scale, m, k, x.stride(0), seed, bm, GROUP, source, t_source,
            e5m2, pow2, stochastic, t_e5m2, t_pow2, t_stochastic, INTERPRETED, num_warps=4 if bm == 32 else 8,
        )  # fmt: skip
    return q, scale, qt, t_scale
