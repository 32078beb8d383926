"""Lookups at memory speed: a program handles G bags and loads U whole rows of each before it adds up the first.

    item     G x BD codes in the table's dtype, one item of every bag: 16 bytes of a row per thread, as many bags side by
             side as its warps hold
    total    float32, G x BD; an item is converted to float32 just before it is added, so that pending loads hold bytes
             and need a quarter of the registers

A lookup is limited by the number of reads in flight, not by arithmetic: the indices of the next U items are read while
the rows of these arrive, so that no row waits for its index. The scale, one byte per row, is read from an array of its
own, which stays in the L2 cache. A row outside the table gives NaN and reads nothing. Hot rows (`slot` >= 0) are read
from `hot`, not from the table.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.embedding_bag.rows import BIAS, BIAS_INT4, NAN_SCALE
from loka.kernels.strides import cdiv, next_power_of_2
from loka.kernels.tile import widened
from loka.kernels.triton_launcher import quick

_BIAS, _BIAS_INT4, _NAN_SCALE = tl.constexpr(BIAS), tl.constexpr(BIAS_INT4), tl.constexpr(NAN_SCALE)


@triton.jit
def load_codes(data_ptr, row, there, D: tl.constexpr, STRIDE: tl.constexpr, INT4: tl.constexpr, BD: tl.constexpr):
    """Load [R, BD] codes, or [R, BD / 2] bytes of two int4 codes; zero where not `there`."""
    BYTES: tl.constexpr = BD // 2 if INT4 else BD
    LAST: tl.constexpr = D // 2 if INT4 else D
    column = tl.arange(0, BYTES)[None, :]
    if INT4:
        return tl.load(data_ptr + row[:, None] * STRIDE + column, there[:, None] & (column < LAST), other=0)
    else:
        return tl.load(data_ptr + row[:, None] * STRIDE + column, there[:, None] & (column < LAST), other=0.0)


@triton.jit
def load_scales(scale_ptr, row, there, STEP: tl.constexpr, SCALED: tl.constexpr):
    """Load [R] stored scales, a byte each; zeros if the rows have none."""
    if SCALED:
        return tl.load(scale_ptr + row * STEP, there, other=0, eviction_policy="evict_last")
    else:
        return tl.zeros(row.shape, tl.uint8)


@triton.jit
def decoded_scale(code, INT4: tl.constexpr):
    """Decode stored scales to float32: `rows.decode_scale`."""
    OFFSET: tl.constexpr = (127 - (_BIAS_INT4 if INT4 else _BIAS)) * 8
    scale = ((code.to(tl.int32) + OFFSET) << 20).to(tl.float32, bitcast=True)
    return tl.where(code == _NAN_SCALE, float("nan"), scale)


@triton.jit
def load_kept(slot_ptr, hot_ptr, row, there, D: tl.constexpr, HOT: tl.constexpr, BD: tl.constexpr):
    """Return which of the rows [R] are hot, and their float32 values [R, BD]."""
    if HOT:
        slot = tl.load(slot_ptr + row, there, other=-1)
        kept = there & (slot >= 0)
        column = tl.arange(0, BD)[None, :]
        high = tl.load(hot_ptr + slot.to(tl.int64)[:, None] * D + column, kept[:, None] & (column < D), other=0.0)
        return kept, high
    else:
        return there & (row < 0), tl.zeros((1, 1), tl.float32)


@triton.jit
def decoded(codes, scale, kept, high, SCALED: tl.constexpr, HOT: tl.constexpr, INT4: tl.constexpr, BD: tl.constexpr):
    """Decode loaded rows to float32 [R, BD]."""
    if SCALED:
        scale = decoded_scale(scale, INT4)[:, None]
    if INT4:
        byte = codes.to(tl.int32)
        low = ((byte << 28) >> 28).to(tl.float32) * scale  # sign-extended
        values = tl.reshape(tl.join(low, ((byte << 24) >> 28).to(tl.float32) * scale), (codes.shape[0], BD))
    elif SCALED:
        values = widened(codes) * scale
    else:
        values = widened(codes)
    if HOT:
        values = tl.where(kept[:, None], high, values)
    return values


@triton.jit
def _load_items(at, left, U: tl.constexpr):
    """Load the next U items of each bag, [G] each, from a pointer into it; 0 beyond the `left` ones."""
    items = ()
    for i in tl.static_range(U):
        items = items + (tl.load(at + i, i < left, other=0),)  # noqa: RUF005
    return items


@quick
@triton.jit
def _pool(data_ptr, scale_ptr, slot_ptr, hot_ptr, index_ptr, offset_ptr, weight_ptr, out_ptr, bags, N,
          D: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr, SCALED: tl.constexpr, HOT: tl.constexpr,
          INT4: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr, U: tl.constexpr, G: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    bag = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)
    start = tl.load(offset_ptr + bag, bag < bags, other=0)
    length = (tl.load(offset_ptr + bag + 1, bag < bags, other=0) - start).to(tl.int32)
    total = tl.zeros((G, BD), tl.float32)
    lost = bag < 0
    at, left = index_ptr + start, length
    items = _load_items(at, left, U)
    for turn in range(0, tl.max(length, 0), U):
        codes, scales, kept = (), (), ()
        for i in tl.static_range(U):
            row = items[i].to(tl.int64)
            there = i < left
            known = row.to(tl.uint64) < tl.cast(N, tl.uint64)  # a negative row is a huge one
            high = load_kept(slot_ptr, hot_ptr, row, there & known, D, HOT, BD)
            low = there & known & (high[0] == 0)
            codes = codes + (load_codes(data_ptr, row, low, D, STRIDE, INT4, BD),)  # noqa: RUF005  Triton cannot unpack tuples here
            scale = load_scales(scale_ptr, row, low, STEP, SCALED)
            if SCALED:
                scale = tl.where(there & (known == 0), _NAN_SCALE, scale)
            else:
                lost = lost | (there & (known == 0))
            scales = scales + (scale,)  # noqa: RUF005
            kept = kept + high
        at += U
        items = _load_items(at, left - U, U)  # of the next turn, while rows of this one arrive
        for i in tl.static_range(U):
            values = decoded(codes[i], scales[i], kept[2 * i], kept[2 * i + 1], SCALED, HOT, INT4, BD)
            if WEIGHTED:
                weight = tl.load(weight_ptr + start + turn + i, i < left, other=0.0)
                values = values * weight.to(tl.float32)[:, None]
            total += values
        left -= U
    if MEAN:
        total = total / tl.maximum(length, 1).to(tl.float32)[:, None]
    column = tl.arange(0, BD)[None, :]
    inside = (bag < bags)[:, None] & (column < D)
    if not SCALED:
        total = tl.where(lost[:, None], float("nan"), total)
    tl.store(out_ptr + bag[:, None] * D + column, total.to(out_ptr.dtype.element_ty), inside)


@quick
@triton.jit
def _take(data_ptr, scale_ptr, slot_ptr, hot_ptr, index_ptr, out_ptr, L, N,
          D: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr, SCALED: tl.constexpr, HOT: tl.constexpr,
          INT4: tl.constexpr, R: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    item = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    there = item < L
    row = tl.load(index_ptr + item, there, other=0).to(tl.int64)
    known = (row >= 0) & (row < N)
    kept, high = load_kept(slot_ptr, hot_ptr, row, there & known, D, HOT, BD)
    low = there & known & (kept == 0)
    scale = load_scales(scale_ptr, row, low, STEP, SCALED)
    values = decoded(load_codes(data_ptr, row, low, D, STRIDE, INT4, BD), scale, kept, high, SCALED, HOT, INT4, BD)
    values = tl.where((there & (known == 0))[:, None], float("nan"), values)
    column = tl.arange(0, BD)[None, :]
    inside = there[:, None] & (column < D)
    tl.store(out_ptr + item[:, None] * D + column, values.to(out_ptr.dtype.element_ty), inside)


def tile_of(width: int, item_bytes: float) -> tuple[int, int, int, int]:
    """Choose items, bags and columns of a tile, and warps.

    Of about ten tiles for each width from 32 to 256, of bf16 and int8 rows, these were the fastest on an H200.
    A thread reads 16 bytes of a row, 8 of rows of one byte per value that are shorter than 128 bytes, and of 4 items at
    a time. Rows of one byte are better read by two warps: 32 programs fill a multiprocessor, whatever their warps.
    """
    columns = max(16, next_power_of_2(width))
    row_bytes = int(columns * item_bytes)
    small = item_bytes <= 1
    warps = min(8, max(2 if small else 1, row_bytes // 512))
    bags = max(1, warps * (256 if small and row_bytes < 128 else 512) // max(row_bytes, 16))
    return max(1, min(4, 4 * 512 * warps // row_bytes)), bags, columns, warps


def look_up(
    data: Tensor,
    scale: Tensor | None,
    slot: Tensor | None,
    hot: Tensor | None,
    indices: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    mean: bool,
    int4: bool,
    out_dtype: torch.dtype,
    tile: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """Return pooled rows [B, D], or single rows [L, D] without offsets. `tile` overrides `tile_of`, for tuning."""
    width = data.shape[1] * (2 if int4 else 1)
    items, bags = indices.shape[0], indices.shape[0] if offsets is None else offsets.shape[0] - 1
    out = torch.empty(bags, width, dtype=out_dtype, device=data.device)
    if bags == 0:
        return out
    u, g, bd, warps = tile or tile_of(width, 0.5 if int4 else data.element_size())
    step = 1 if scale is None else scale.stride(0)
    flags = (width, data.stride(0), step, scale is not None, hot is not None, int4)
    if offsets is None:
        grid = (cdiv(items, u * g),)
        _take[grid](data, scale, slot, hot, indices, out, items, data.shape[0], *flags, u * g, bd, num_warps=warps)  # fmt: skip
    else:
        grid = (cdiv(bags, g),)
        _pool[grid](data, scale, slot, hot, indices, offsets, weights, out, bags, data.shape[0], *flags, weights is not None, mean, u, g, bd, num_warps=warps)  # fmt: skip
    return out
