"""Lookups at the speed of memory: a program owns G bags and reads U items of each at a time, whole rows.

    tile     U items x G bags x BD columns, in the type of the table: 16 bytes of a row to a thread, as many bags beside each other as 32 threads (or more) can hold,
             and the U items of a bag after one another in the same thread, so that their sum needs no other thread
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
def load_rows(data_ptr, row, there, D: tl.constexpr, INT4: tl.constexpr, BD: tl.constexpr):
    """[U, G, BD] float32, without scales; zero where not `there`."""
    if INT4:
        byte_column = tl.arange(0, BD // 2)[None, None, :]
        inside = there[:, :, None] & (byte_column < D // 2)
        byte = tl.load(data_ptr + row[:, :, None] * (D // 2) + byte_column, inside, other=0).to(tl.int32)
        low = ((byte << 28) >> 28).to(tl.float32)  # with its sign
        high = ((byte << 24) >> 28).to(tl.float32)
        return tl.reshape(tl.join(low, high), (row.shape[0], row.shape[1], BD))
    else:
        column = tl.arange(0, BD)[None, None, :]
        inside = there[:, :, None] & (column < D)
        return widened(tl.load(data_ptr + row[:, :, None] * D + column, inside, other=0.0))


@triton.jit
def dequantized_rows(data_ptr, scale_ptr, slot_ptr, hot_ptr, row, there, D: tl.constexpr,
                     SCALED: tl.constexpr, HOT: tl.constexpr, INT4: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """[U, G, BD] float32 rows, scaled, from the table or from where they are kept high."""
    low = there
    if HOT:
        slot = tl.load(slot_ptr + row, there, other=-1)
        low = there & (slot < 0)
    if SCALED:
        scale = tl.load(scale_ptr + row, low, other=1.0, eviction_policy="evict_last")
    values = load_rows(data_ptr, row, low, D, INT4, BD)
    if SCALED:
        values = values * scale[:, :, None]
    if HOT:
        kept = there & (slot >= 0)
        column = tl.arange(0, BD)[None, None, :]
        inside = kept[:, :, None] & (column < D)
        high = tl.load(hot_ptr + slot.to(tl.int64)[:, :, None] * D + column, inside, other=0.0)
        values = tl.where(kept[:, :, None], high, values)
    return values


@triton.jit
def _pool(data_ptr, scale_ptr, slot_ptr, hot_ptr, index_ptr, offset_ptr, weight_ptr, out_ptr, bags, N,
          D: tl.constexpr, SCALED: tl.constexpr, HOT: tl.constexpr, INT4: tl.constexpr, WEIGHTED: tl.constexpr,
          MEAN: tl.constexpr, U: tl.constexpr, G: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    bag = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)
    start = tl.load(offset_ptr + bag, bag < bags, other=0)
    end = tl.load(offset_ptr + bag + 1, bag < bags, other=0)
    longest = tl.max(end - start, 0)
    item = start[None, :] + tl.arange(0, U)[:, None]
    row = tl.load(index_ptr + item, item < end[None, :], other=0).to(tl.int64)
    total = tl.zeros((G, BD), tl.float32)
    missing = tl.zeros((G,), tl.int32)
    for _ in range(0, longest, U):
        there = item < end[None, :]
        known = (row >= 0) & (row < N)
        values = dequantized_rows(data_ptr, scale_ptr, slot_ptr, hot_ptr, row, there & known, D, SCALED, HOT, INT4, BD)
        if WEIGHTED:
            weight = tl.load(weight_ptr + item, there & known, other=0.0).to(tl.float32)
            values = values * weight[:, :, None]
        missing += tl.sum((there & (known == 0)).to(tl.int32), 0)
        item += U
        row = tl.load(index_ptr + item, item < end[None, :], other=0).to(tl.int64)
        total += tl.sum(values, 0)
    if MEAN:
        total = total / tl.maximum(end - start, 1).to(tl.float32)[:, None]
    total = tl.where((missing > 0)[:, None], float("nan"), total)
    column = tl.arange(0, BD)[None, :]
    inside = (bag < bags)[:, None] & (column < D)
    tl.store(out_ptr + bag[:, None] * D + column, total.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _take(data_ptr, scale_ptr, slot_ptr, hot_ptr, index_ptr, weight_ptr, out_ptr, L, N,
          D: tl.constexpr, SCALED: tl.constexpr, HOT: tl.constexpr, INT4: tl.constexpr, WEIGHTED: tl.constexpr,
          U: tl.constexpr, G: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    item = tl.program_id(0).to(tl.int64) * (U * G) + tl.arange(0, U)[:, None] * G + tl.arange(0, G)[None, :]
    there = item < L
    row = tl.load(index_ptr + item, there, other=0).to(tl.int64)
    known = (row >= 0) & (row < N)
    values = dequantized_rows(data_ptr, scale_ptr, slot_ptr, hot_ptr, row, there & known, D, SCALED, HOT, INT4, BD)
    if WEIGHTED:
        values = values * tl.load(weight_ptr + item, there, other=0.0).to(tl.float32)[:, :, None]
    values = tl.where((there & (known == 0))[:, :, None], float("nan"), values)
    column = tl.arange(0, BD)[None, None, :]
    inside = there[:, :, None] & (column < D)
    tl.store(out_ptr + item[:, :, None] * D + column, values.to(out_ptr.dtype.element_ty), inside)


def tile_of(width: int, item_bytes: float) -> tuple[int, int, int, int]:
    """Items, bags and columns of a tile, and warps: 16 bytes of a row to a thread, of 8 rows at a time, or of 4 where so many more would not stay in registers."""
    columns = max(16, triton.next_power_of_2(width))
    row_bytes = int(columns * item_bytes)
    warps = min(8, max(1, row_bytes // 512))
    bags = max(1, 512 // max(row_bytes, 16))
    items = 4 if item_bytes < 1 or (item_bytes == 1 and columns > 128) else 8
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
        _take[grid](data, scale, slot, hot, indices, weights, out, items, data.shape[0], *flags, u, g, bd, num_warps=warps)  # fmt: skip
    else:
        grid = (triton.cdiv(bags, g),)
        _pool[grid](data, scale, slot, hot, indices, offsets, weights, out, bags, data.shape[0], *flags, mean, u, g, bd, num_warps=warps)  # fmt: skip
    return out
