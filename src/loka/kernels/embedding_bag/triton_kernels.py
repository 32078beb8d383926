"""Lookups at the speed of memory: a program owns a bag and reads U of its rows at a time, whole.

    tile     U rows x BD columns, in the type of the table; the scale, one float32 a row, is read beside it
    total    float32, BD columns; bags longer than U take several turns

What limits a lookup is how many reads are under way, not arithmetic: U is chosen so that a tile is 4 KiB, a few wide loads for each thread. A row outside the table answers NaN
and reads nothing. Rows that are kept high (`slot` >= 0) are read from `hot` instead, and not from the table.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def load_rows(data_ptr, row, there, column, D, INT4: tl.constexpr):
    """[U, BD] float32, without scales; zero where not `there`."""
    inside = there[:, None] & (column < D)[None, :]
    if INT4:
        byte = tl.load(data_ptr + row[:, None] * (D // 2) + (column // 2)[None, :], inside, other=0).to(tl.int32)
        nibble = (byte >> ((column % 2) * 4)[None, :]) & 15
        return tl.where(nibble > 7, nibble - 16, nibble).to(tl.float32)
    else:
        return tl.load(data_ptr + row[:, None] * D + column[None, :], inside, other=0.0).to(tl.float32)


@triton.jit
def dequantized_rows(data_ptr, scale_ptr, slot_ptr, hot_ptr, row, there, column, D,
                     SCALED: tl.constexpr, HOT: tl.constexpr, INT4: tl.constexpr):  # fmt: skip
    """[U, BD] float32 rows, scaled, from the table or from where they are kept high."""
    low = there
    if HOT:
        slot = tl.load(slot_ptr + row, there, other=-1)
        low = there & (slot < 0)
    values = load_rows(data_ptr, row, low, column, D, INT4)
    if SCALED:
        values = values * tl.load(scale_ptr + row, low, other=1.0)[:, None]
    if HOT:
        kept = there & (slot >= 0)
        inside = kept[:, None] & (column < D)[None, :]
        high = tl.load(hot_ptr + slot.to(tl.int64)[:, None] * D + column[None, :], inside, other=0.0)
        values = tl.where(kept[:, None], high, values)
    return values


@triton.jit
def _pool(data_ptr, scale_ptr, slot_ptr, hot_ptr, index_ptr, offset_ptr, weight_ptr, out_ptr, N, D,
          SCALED: tl.constexpr, HOT: tl.constexpr, INT4: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr,
          U: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    bag = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BD)
    start = tl.load(offset_ptr + bag)
    end = tl.load(offset_ptr + bag + 1)
    total = tl.zeros((BD,), tl.float32)
    for at in range(start, end, U):
        item = at + tl.arange(0, U)
        there = item < end
        row = tl.load(index_ptr + item, there, other=0).to(tl.int64)
        known = (row >= 0) & (row < N)
        values = dequantized_rows(
            data_ptr, scale_ptr, slot_ptr, hot_ptr, row, there & known, column, D, SCALED, HOT, INT4
        )
        values = tl.where((there & (known == 0))[:, None], float("nan"), values)
        if WEIGHTED:
            weight = tl.load(weight_ptr + item, there, other=0.0).to(tl.float32)
            values = tl.where(there[:, None], values * weight[:, None], 0.0)
        total += tl.sum(values, 0)
    if MEAN:
        total = total / tl.maximum(end - start, 1).to(tl.float32)
    tl.store(out_ptr + bag * D + column, total.to(out_ptr.dtype.element_ty), column < D)


@triton.jit
def _take(data_ptr, scale_ptr, slot_ptr, hot_ptr, index_ptr, weight_ptr, out_ptr, L, N, D,
          SCALED: tl.constexpr, HOT: tl.constexpr, INT4: tl.constexpr, WEIGHTED: tl.constexpr,
          U: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    item = tl.program_id(0).to(tl.int64) * U + tl.arange(0, U)
    column = tl.arange(0, BD)
    there = item < L
    row = tl.load(index_ptr + item, there, other=0).to(tl.int64)
    known = (row >= 0) & (row < N)
    values = dequantized_rows(data_ptr, scale_ptr, slot_ptr, hot_ptr, row, there & known, column, D, SCALED, HOT, INT4)
    values = tl.where((there & (known == 0))[:, None], float("nan"), values)
    if WEIGHTED:
        values = values * tl.load(weight_ptr + item, there, other=0.0).to(tl.float32)[:, None]
    at = item[:, None] * D + column[None, :]
    tl.store(out_ptr + at, values.to(out_ptr.dtype.element_ty), there[:, None] & (column < D)[None, :])


def tile_of(width: int, item_bytes: float) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps: about 4 KiB of the table in flight, in loads of 16 bytes a thread."""
    columns = max(16, triton.next_power_of_2(width))
    rows = min(32, max(4, 4096 // int(columns * max(item_bytes, 1))))
    warps = min(8, max(1, rows * columns // 1024))
    return rows, columns, warps


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
) -> Tensor:
    """Pooled rows [B, D], or single ones [L, D] without offsets."""
    width = data.shape[1] * (2 if int4 else 1)
    items, bags = indices.shape[0], indices.shape[0] if offsets is None else offsets.shape[0] - 1
    out = torch.empty(bags, width, dtype=out_dtype, device=data.device)
    if bags == 0:
        return out
    u, bd, warps = tile_of(width, 0.5 if int4 else data.element_size())
    flags = (scale is not None, hot is not None, int4, weights is not None)
    if offsets is None:
        grid = (triton.cdiv(items, u),)
        _take[grid](data, scale, slot, hot, indices, weights, out, items, data.shape[0], width, *flags, u, bd, num_warps=warps)  # fmt: skip
    else:
        _pool[(bags,)](data, scale, slot, hot, indices, offsets, weights, out, data.shape[0], width, *flags, mean, u, bd, num_warps=warps)  # fmt: skip
    return out
