"""Lookups at the speed of memory: a program owns G bags and reads U items of each at a time, whole rows.

    tile     U x G rows of BD columns, in the type of the table: 16 bytes of a row to a thread, an item of as many bags beside each other as 32 threads (or more) can hold, then the
             next item of the same bags in the same threads, so that their sum needs no other thread
    total    float32, G x BD; bags longer than U take several turns, and the items of the next turn are fetched while the rows of this one are on their way

What limits a lookup is how many reads are under way, not arithmetic: a row of 32 bytes takes two threads, so one program of 32 threads has U x 16 rows in flight. The scale, one float32 a
row, is read beside it and asked to stay in the cache: eight rows share a sector of them. A row outside the table answers NaN and reads nothing. Rows that are kept high (`slot` >= 0)
are read from `hot` instead, and not from the table.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.tile import widened


@triton.jit
def load_rows(data_ptr, row, scale, there, D: tl.constexpr, INT4: tl.constexpr, BD: tl.constexpr):
    """[R, BD] float32, times the scale [R, 1]; zero where not `there`."""
    if INT4:
        byte_column = tl.arange(0, BD // 2)[None, :]
        inside = there[:, None] & (byte_column < D // 2)
        byte = tl.load(data_ptr + row[:, None] * (D // 2) + byte_column, inside, other=0).to(tl.int32)
        low = ((byte << 28) >> 28).to(tl.float32) * scale  # with its sign
        high = ((byte << 24) >> 28).to(tl.float32) * scale
        return tl.reshape(tl.join(low, high), (row.shape[0], BD))
    else:
        column = tl.arange(0, BD)[None, :]
        inside = there[:, None] & (column < D)
        values = widened(tl.load(data_ptr + row[:, None] * D + column, inside, other=0.0))
        return values * scale


@triton.jit
def dequantized_rows(data_ptr, scale_ptr, slot_ptr, hot_ptr, row, there, D: tl.constexpr,
                     SCALED: tl.constexpr, HOT: tl.constexpr, INT4: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """[R, BD] float32 rows, scaled, from the table or from where they are kept high."""
    low = there
    if HOT:
        slot = tl.load(slot_ptr + row, there, other=-1)
        low = there & (slot < 0)
    scale = tl.full((row.shape[0], 1), 1.0, tl.float32)
    if SCALED:
        scale = tl.load(scale_ptr + row[:, None], low[:, None], other=1.0, eviction_policy="evict_last")
    values = load_rows(data_ptr, row, scale, low, D, INT4, BD)
    if HOT:
        kept = there & (slot >= 0)
        column = tl.arange(0, BD)[None, :]
        inside = kept[:, None] & (column < D)
        high = tl.load(hot_ptr + slot.to(tl.int64)[:, None] * D + column, inside, other=0.0)
        values = tl.where(kept[:, None], high, values)
    return values


@triton.jit
def _pool(data_ptr, scale_ptr, slot_ptr, hot_ptr, index_ptr, offset_ptr, weight_ptr, out_ptr, bags, N,
          D: tl.constexpr, SCALED: tl.constexpr, HOT: tl.constexpr, INT4: tl.constexpr, WEIGHTED: tl.constexpr,
          MEAN: tl.constexpr, U: tl.constexpr, G: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    first_bag = tl.program_id(0).to(tl.int64) * G
    place = tl.arange(0, U * G)  # of a tile's rows: an item of every bag, then the next item of every bag
    bag = first_bag + place % G
    start = tl.load(offset_ptr + bag, bag < bags, other=0)
    end = tl.load(offset_ptr + bag + 1, bag < bags, other=0)
    longest = tl.max(end - start, 0)
    item = start + place // G
    row = tl.load(index_ptr + item, item < end, other=0).to(tl.int64)
    total = tl.zeros((G, BD), tl.float32)
    missing = tl.zeros((U * G,), tl.int32)
    for _ in range(0, longest, U):
        there = item < end
        known = (row >= 0) & (row < N)
        values = dequantized_rows(data_ptr, scale_ptr, slot_ptr, hot_ptr, row, there & known, D, SCALED, HOT, INT4, BD)
        if WEIGHTED:
            weight = tl.load(weight_ptr + item, there & known, other=0.0).to(tl.float32)
            values = values * weight[:, None]
        missing |= (there & (known == 0)).to(tl.int32)
        item += U
        row = tl.load(index_ptr + item, item < end, other=0).to(tl.int64)
        total += tl.sum(tl.reshape(values, (U, G, BD)), 0)
    bag = first_bag + tl.arange(0, G)
    if MEAN:
        length = tl.load(offset_ptr + bag + 1, bag < bags, other=1) - tl.load(offset_ptr + bag, bag < bags, other=0)
        total = total / tl.maximum(length, 1).to(tl.float32)[:, None]
    lost = tl.max(tl.reshape(missing, (U, G)), 0) > 0
    column = tl.arange(0, BD)[None, :]
    inside = (bag < bags)[:, None] & (column < D)
    total = tl.where(lost[:, None], float("nan"), total)
    tl.store(out_ptr + bag[:, None] * D + column, total.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _take(data_ptr, scale_ptr, slot_ptr, hot_ptr, index_ptr, weight_ptr, out_ptr, L, N,
          D: tl.constexpr, SCALED: tl.constexpr, HOT: tl.constexpr, INT4: tl.constexpr, WEIGHTED: tl.constexpr,
          R: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    item = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    there = item < L
    row = tl.load(index_ptr + item, there, other=0).to(tl.int64)
    known = (row >= 0) & (row < N)
    values = dequantized_rows(data_ptr, scale_ptr, slot_ptr, hot_ptr, row, there & known, D, SCALED, HOT, INT4, BD)
    if WEIGHTED:
        values = values * tl.load(weight_ptr + item, there, other=0.0).to(tl.float32)[:, None]
    values = tl.where((there & (known == 0))[:, None], float("nan"), values)
    column = tl.arange(0, BD)[None, :]
    inside = there[:, None] & (column < D)
    tl.store(out_ptr + item[:, None] * D + column, values.to(out_ptr.dtype.element_ty), inside)


def tile_of(width: int, item_bytes: float) -> tuple[int, int, int, int]:
    """Items, bags and columns of a tile, and warps: 16 bytes of a row to a thread, of 8 rows at a time, or of 4 where the compiler would take more registers than pay."""
    columns = max(16, triton.next_power_of_2(width))
    row_bytes = int(columns * item_bytes)
    warps = min(8, max(1, row_bytes // 512))
    bags = max(1, 512 // max(row_bytes, 16))
    items = 4 if (item_bytes == 1 and columns > 128) or (item_bytes < 1 and columns <= 128) else 8
    return max(1, min(items, items * 512 * warps // row_bytes)), bags, columns, warps


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
    """Pooled rows [B, D], or single ones [L, D] without offsets. `tile` is for trying others than `tile_of` chooses."""
    width = data.shape[1] * (2 if int4 else 1)
    items, bags = indices.shape[0], indices.shape[0] if offsets is None else offsets.shape[0] - 1
    out = torch.empty(bags, width, dtype=out_dtype, device=data.device)
    if bags == 0:
        return out
    u, g, bd, warps = tile or tile_of(width, 0.5 if int4 else data.element_size())
    flags = (width, scale is not None, hot is not None, int4, weights is not None)
    if offsets is None:
        grid = (triton.cdiv(items, u * g),)
        _take[grid](data, scale, slot, hot, indices, weights, out, items, data.shape[0], *flags, u * g, bd, num_warps=warps)  # fmt: skip
    else:
        grid = (triton.cdiv(bags, g),)
        _pool[grid](data, scale, slot, hot, indices, offsets, weights, out, bags, data.shape[0], *flags, mean, u, g, bd, num_warps=warps)  # fmt: skip
    return out
