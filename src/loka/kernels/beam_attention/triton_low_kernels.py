"""Flash attention of many beams over one context in E4M3: both products run in FP8, at twice the 16-bit rate.

    s   = (q8 k8^T) * scale_q            q8: a query, rounded to E4M3 with a scale of its own
    p   = 2^(s - maximum + 8)            256 times the weight relative to the running maximum, in one instruction
    acc = acc * shrink + p8 v8           p8: p rounded to E4M3

The softmax denominator sums the unrounded p, so that the factor 256 cancels. Keys and values are E4M3 without scales.
Hopper multiplies FP8 only if both operands are contiguous along the summed dimension: keys as rows, values as columns.
Otherwise the kernel is that of `triton_kernels._attend`, also in how few rows divide the keys into parts, and gives the
same result up to the rounding of q and p.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loka.kernels.beam_attention.triton_kernels import (
    INTERPRETED,
    LOG2E,
    SPAN,
    Tile,
    _descriptor,
    _join,
    _one_matrix,
    _padded,
    _rows_of,
    parts_for,
)
from loka.kernels.strides import cdiv
from loka.kernels.tile import finite_magnitude, inverse, scale_of, to_fp8
from loka.kernels.triton_launcher import quick

NARROWEST = 32  # K of an FP8 tensor core instruction


@triton.jit
def _update_low(q, q_scale, k, v, m, total, acc, begin, end, MASK: tl.constexpr, PREROUND: tl.constexpr):
    """Update the running sums with keys [BN, D], values [D, BN]; with MASK only those from `begin` to `end` count."""
    s = tl.dot(q, k.T)
    if MASK:
        key = tl.arange(0, k.shape[0])
        s = tl.where(((key >= begin) & (key < end))[None, :], s, float("-inf"))
    higher = tl.maximum(m, tl.max(s, 1) * q_scale)
    p = tl.exp2(s * q_scale[:, None] - (higher - 8.0)[:, None])
    shrink = tl.exp2(m - higher)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(to_fp8(p, 1.0, 0, False, False, PREROUND, True), v.T, acc * shrink[:, None])
    return higher, total, acc


@quick
@triton.jit
def _attend_low(q_ptr, k_ptr, v_ptr, k_desc, v_desc, length_ptr, out_ptr, sums_ptr, B, H, G, S, scale,
                q_request, q_beam, q_head, k_request, k_row, k_head, v_request, v_head, v_column, v_down, v_right,
                HG: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr,
                PARTS: tl.constexpr, SPAN: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """A request's values start at row r v_down and column r v_right of their descriptor. PARTS as in `_attend`."""
    r, g = (tl.program_id(1) // G).to(tl.int64), tl.program_id(1) % G
    part = tl.program_id(2)
    length = tl.minimum(tl.load(length_ptr + r).to(tl.int32), S)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    beam, head = row // HG, g * HG + row % HG
    column = tl.arange(0, D)
    there = (beam < B)[:, None]
    q_at = q_ptr + r * q_request + beam.to(tl.int64)[:, None] * q_beam + head[:, None] * q_head + column[None, :]
    wide = tl.load(q_at, there, other=0.0).to(tl.float32)
    made = scale_of(tl.max(finite_magnitude(wide), 1), False, False)
    q = to_fp8(wide, inverse(made)[:, None], 0, False, False, PREROUND)
    q_scale = made * scale
    k_base = k_ptr + r * k_request + g * k_head
    v_base = v_ptr + r * v_request + g * v_head
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    first = 0
    if PARTS > 1:
        first = part * SPAN
        length = tl.minimum(length, first + SPAN)
    full = first + tl.maximum(length - first, 0) // BN * BN
    for n in range(first, full, BN):
        if TMA:
            k = k_desc.load([(r * S).to(tl.int32) + n, g * D])
            v = v_desc.load([(r * v_down).to(tl.int32) + g * D, (r * v_right).to(tl.int32) + n])
        else:
            k = _rows_of(k_base, n, length, k_row, D, D, BN)
            v = tl.load(v_base + column.to(tl.int64)[:, None] * v_column + (n + tl.arange(0, BN))[None, :])
        m, total, acc = _update_low(q, q_scale, k, v, m, total, acc, 0, BN, False, PREROUND)
    if full < length:
        # The last block ends with the first multiple of 16 behind the keys; those before `full` have been counted.
        start = tl.maximum(length - BN + 15, 0) // 16 * 16 if TMA else full
        key = start + tl.arange(0, BN)
        if TMA:
            k = k_desc.load([(r * S).to(tl.int32) + start, g * D])
            v = v_desc.load([(r * v_down).to(tl.int32) + g * D, (r * v_right).to(tl.int32) + start])
            v = tl.where((key < length)[None, :], v, tl.zeros_like(v))
        else:
            k = _rows_of(k_base, full, length, k_row, D, D, BN)
            v_at = v_base + column.to(tl.int64)[:, None] * v_column + key[None, :]
            v = tl.load(v_at, (key < length)[None, :], other=0.0)
        m, total, acc = _update_low(q, q_scale, k, v, m, total, acc, full - start, length - start, True, PREROUND)
    if PARTS > 1:
        place = tl.program_id(1).to(tl.int64) * PARTS + part
        tl.store(sums_ptr + place * 2 * B * HG + row, m, beam < B)
        tl.store(sums_ptr + (place * 2 + 1) * B * HG + row, total, beam < B)
        tl.store(out_ptr + (place * B * HG + row)[:, None] * D + column[None, :], acc, there)
    else:
        acc = tl.where((total == 0.0)[:, None], 0.0, acc / total[:, None])  # 0 for requests without context
        out_at = ((r * B + beam) * H + head)[:, None] * D + column[None, :]
        tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), there)


def fits(d: int) -> bool:
    """Return True if heads of this width can be multiplied in FP8."""
    return d >= NARROWEST and d == _padded(d)


def tile_for_low(rows: int) -> Tile:
    """Choose a tile: for many rows the fastest of six at 3,000 keys on an H200."""
    if INTERPRETED:
        return Tile(16, 32, stages=2)
    return Tile(64 if rows > 16 else 16, 128)


def _columns_descriptor(v: Tensor, bn: int) -> tuple[TensorDescriptor, int, int] | None:
    """Return a descriptor of the values, and how many rows and columns a request is further on in it.

    They are one matrix [R G D, S], or [G D, R S], as transposing all tokens at once leaves them. None if they are
    neither, or not aligned. TMA loads rows from multiples of 16 bytes on: from anywhere else, the GPU reports an illegal
    instruction. So in the second form every request must begin at a multiple of 16.
    """
    requests, s, groups, d = v.shape
    request, _, group, column = v.stride()
    if group != d * column or column % 16 or v.data_ptr() % 16:
        return None
    if request == groups * group:
        size, down, right = (requests * groups * d, s), groups * d, 0
    elif request == s and requests * s <= column and (s % 16 == 0 or requests == 1):
        size, down, right = (groups * d, requests * s), 0, s
    else:
        return None
    return TensorDescriptor.from_tensor(v.as_strided(size, (column, 1)), [d, bn]), down, right


def attend_low(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, tile: Tile | None = None) -> Tensor:
    """Attend with the queries of all beams to the context of their request in E4M3, both products in FP8.

    Args:
        q: [R, B, H, D] in 16 bits, with unit stride along D.
        k: [R, S, G, D] in E4M3, with unit stride along D.
        v: the same shape, with unit stride along S.
        lengths, scale, tile: as in `attend`.

    Returns:
        [R, B, H, D] in q's dtype.
    """
    (requests, beams, heads, d), (_, s, groups, _) = q.shape, k.shape
    out = torch.empty(requests, beams, heads, d, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    if s == 0:
        return out.zero_()
    if scale <= 0:  # as in `attend`
        q, scale = q * (-1.0 if scale < 0 else 0.0), -scale or 1.0
    rows = beams * (heads // groups)
    bm, bn, warps, stages, registers = tile or tile_for_low(rows)
    keys = _descriptor(k, bn) if _one_matrix(k) else None
    columns = _columns_descriptor(v, bn) if keys is not None else None
    values, down, right = columns or (None, 0, 0)
    tma = values is not None
    parts, pairs, sums, made = parts_for(rows, s), requests * groups, None, out
    if parts > 1:
        sums = torch.empty(pairs, parts, 2, rows, dtype=torch.float32, device=q.device)
        made = torch.empty(pairs, parts, rows, d, dtype=torch.float32, device=q.device)
    _attend_low[(cdiv(rows, bm), pairs, parts)](
        q, k, v, keys if tma else None, values, lengths, made, sums, beams, heads, groups, s, scale * LOG2E,
        *q.stride()[:3], *k.stride()[:3], v.stride(0), v.stride(2), v.stride(3), down, right, heads // groups, d, bm, bn, tma,
        parts, SPAN, INTERPRETED, num_warps=warps, num_stages=stages, maxnreg=registers,
    )  # fmt: skip
    if parts > 1:
        _join[(rows, pairs)](sums, made, out, rows, heads, groups, parts, heads // groups, d, d, num_warps=1)
    return out
