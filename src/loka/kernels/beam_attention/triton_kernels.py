"""Flash attention of many beams over one context, and attention to a beam's few ancestors.

A program handles BM rows of one request and one key-value head. A row is a (beam, query head of the group) pair, so all
of them read the same keys and values: the context is read from memory once per request and layer, whatever the number
of beams, and stays in L2 for the few programs that share it.

    m, total, acc  running maximum, sum and weighted values of each row; exp2 with log2(e) folded into the scale
    first key      starts the sums without a tile product: a context is one user token and, mostly, 2^n item tokens
    full blocks    are loaded by TMA without a length mask. So is a last, partial block: it is moved back to end at the
                   length, and the keys that have been counted are masked. Its values need no mask, which would take
                   four times as many instructions as the block. Fewer keys than a block are loaded with a mask
    v is k         one load feeds both products
    few rows       at the first level of a search a request has one beam: one program per request and group would read
                   thousands of keys in turn on an otherwise idle GPU. So the keys are divided into parts of SPAN, each
                   with its own maximum and sums, which a second kernel joins in order. The size of a part is fixed: a
                   result does not depend on the number of requests or on how far the context is padded
    FP8 context    is widened to the queries' dtype, for head widths that `triton_low_kernels` does not take

Ancestors: the few keys and values of a beam's past stay in the cache where they were written, and a table says which
beam of each step it descends from. One pass, no reordering of caches, and no tensor cores: the past is too short. The
new keys and values come straight from the projection; the same pass writes them to the cache and quantizes the result,
in which case a program has all heads of its beams.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loka.kernels.quantize.triton_kernels import aligned
from loka.kernels.strides import cdiv, next_power_of_2
from loka.kernels.tile import finite_magnitude, inverse, scale_of, to_fp8
from loka.kernels.triton_launcher import quick

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
LOG2E = 1.4426950408889634
FEW = 64  # rows of a request and group up to which its keys are divided
SPAN = 32 if INTERPRETED else 256  # keys of a part


class Tile(NamedTuple):
    """A launch: rows and keys of a tile, warps, stages, and the most registers of a thread if they are capped."""

    rows: int
    keys: int
    warps: int = 4
    stages: int = 3
    registers: int | None = None


@triton.jit
def _update(q, k, v, m, total, acc, scale, begin, end, MASK: tl.constexpr, IEEE: tl.constexpr):
    """Update the running sums with one block of keys; with MASK only those from `begin` to `end` count."""
    s = tl.dot(q, k.T, input_precision="ieee" if IEEE else "tf32")
    if MASK:
        key = tl.arange(0, k.shape[0])
        s = tl.where(((key >= begin) & (key < end))[None, :], s, float("-inf"))
    higher = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - higher[:, None])  # one instruction: the scores are scaled nowhere else
    shrink = tl.exp2(m - higher)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee" if IEEE else "tf32")
    return higher, total, acc


@triton.jit
def _rows_of(ptr, first, length, stride, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr):
    """Load [BN, DP] rows of one head, zero beyond the length and the width."""
    row = first + tl.arange(0, BN)
    column = tl.arange(0, DP)
    return tl.load(ptr + row.to(tl.int64)[:, None] * stride + column[None, :],
                   (row < length)[:, None] & (column < D)[None, :], other=0.0)  # fmt: skip


@quick
@triton.jit
def _attend(q_ptr, k_ptr, v_ptr, k_desc, v_desc, length_ptr, out_ptr, sums_ptr, B, H, G, S, scale,
            q_request, q_beam, q_head, k_request, k_row, k_head, v_request, v_row, v_head,
            HG: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
            SHARED: tl.constexpr, TMA: tl.constexpr, IEEE: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    """With PARTS > 1, out is float32 [R, G, PARTS, rows, D], the weighted values; sums [R, G, PARTS, 2, rows] has their maxima and totals."""
    r, g = (tl.program_id(1) // G).to(tl.int64), tl.program_id(1) % G
    part = tl.program_id(2)
    length = tl.minimum(tl.load(length_ptr + r).to(tl.int32), S)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    beam, head = row // HG, g * HG + row % HG
    column = tl.arange(0, DP)
    there = (beam < B)[:, None] & (column < D)[None, :]
    q_at = q_ptr + r * q_request + beam.to(tl.int64)[:, None] * q_beam + head[:, None] * q_head + column[None, :]
    q = tl.load(q_at, there, other=0.0)
    k_base = k_ptr + r * k_request + g * k_head
    v_base = v_ptr + r * v_request + g * v_head
    seen = (length > 0) & (part == 0)  # the first part has the first key
    k0 = tl.load(k_base + column, (column < D) & seen, other=0.0).to(tl.float32)
    v0 = k0 if SHARED else tl.load(v_base + column, (column < D) & seen, other=0.0).to(tl.float32)
    m = tl.where(seen, tl.sum(q.to(tl.float32) * k0[None, :], 1) * scale, float("-inf"))
    # no maximum below keeps a NaN, and with one key there is none below
    total = tl.where(m == m, tl.zeros((BM,), tl.float32) + tl.where(seen, 1.0, 0.0), m)
    acc = tl.zeros((BM, DP), tl.float32) + v0[None, :]
    first = 1
    if PARTS > 1:
        first = 1 + part * SPAN
        length = tl.minimum(length, first + SPAN)
    full = first + tl.maximum(length - first, 0) // BN * BN
    for n in range(first, full, BN):
        if TMA:
            at = (r * S).to(tl.int32) + n
            k = k_desc.load([at, g * D]).to(q.dtype)
            v = k if SHARED else v_desc.load([at, g * D]).to(q.dtype)
        else:
            k = _rows_of(k_base, n, length, k_row, D, DP, BN).to(q.dtype)
            v = k if SHARED else _rows_of(v_base, n, length, v_row, D, DP, BN).to(q.dtype)
        m, total, acc = _update(q, k, v, m, total, acc, scale, 0, BN, False, IEEE)
    if full < length:
        start = tl.maximum(length - BN, 0) if TMA else full  # keys before `full` have been counted
        if TMA:
            at = (r * S).to(tl.int32) + start
            k = k_desc.load([at, g * D]).to(q.dtype)
            v = k if SHARED else v_desc.load([at, g * D]).to(q.dtype)
            if length < BN:
                v = tl.where((start + tl.arange(0, BN) < length)[:, None], v, tl.zeros_like(v))
        else:
            k = _rows_of(k_base, full, length, k_row, D, DP, BN).to(q.dtype)
            v = k if SHARED else _rows_of(v_base, full, length, v_row, D, DP, BN).to(q.dtype)
        m, total, acc = _update(q, k, v, m, total, acc, scale, full - start, length - start, True, IEEE)
    if PARTS > 1:
        place = tl.program_id(1).to(tl.int64) * PARTS + part
        tl.store(sums_ptr + place * 2 * B * HG + row, m, beam < B)
        tl.store(sums_ptr + (place * 2 + 1) * B * HG + row, total, beam < B)
        tl.store(out_ptr + (place * B * HG + row)[:, None] * D + column[None, :], acc, there)
    else:
        acc = tl.where((total == 0.0)[:, None], 0.0, acc / total[:, None])  # 0 for requests without context
        out_at = ((r * B + beam) * H + head)[:, None] * D + column[None, :]
        tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), there)


@quick
@triton.jit
def _join(
    sums_ptr, values_ptr, out_ptr, rows, H, G, PARTS: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):
    """Join the parts of one row in order: each counts by its own maximum."""
    row = tl.program_id(0)
    r, g = (tl.program_id(1) // G).to(tl.int64), tl.program_id(1) % G
    column = tl.arange(0, DP)
    place = tl.program_id(1).to(tl.int64) * PARTS
    m = float("-inf")
    for part in range(PARTS):
        m = tl.maximum(m, tl.load(sums_ptr + (place + part) * 2 * rows + row))
    total = 0.0
    acc = tl.zeros((DP,), tl.float32)
    for part in range(PARTS):
        at = place + part
        its = tl.load(sums_ptr + at * 2 * rows + row)
        weight = tl.where(its == float("-inf"), 0.0, tl.exp2(its - m))  # a part beyond the end has no keys
        total += weight * tl.load(sums_ptr + (at * 2 + 1) * rows + row)
        acc += weight * tl.load(values_ptr + (at * rows + row) * D + column, column < D, other=0.0)
    acc = tl.where(total == 0.0, 0.0, acc / total)  # 0 for requests without context
    out_at = ((r * (rows // HG) + row // HG) * H + g * HG + row % HG) * D + column
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), column < D)


@triton.jit
def _take(q, k, v, m, total, acc):
    """Update the running sums with one key and value for every row."""
    s = tl.sum(q * k, 1)
    higher = tl.maximum(m, s)
    weight, shrink = tl.exp2(s - higher), tl.exp2(m - higher)
    return higher, total * shrink + weight, acc * shrink[:, None] + weight[:, None] * v


@quick
@triton.jit
def _ancestors(q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, ancestor_ptr, out_ptr, scale_ptr, R, B, H, P, scale,
               q_request, q_beam, q_head, c_step, c_request, c_beam, c_head, stride_out,
               D: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr, BB: tl.constexpr, BR: tl.constexpr,
               KEEP: tl.constexpr, FP8: tl.constexpr, POW2: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    r = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    beam, head = (row // HP).to(tl.int64), row % HP
    column = tl.arange(0, DP)
    live = (beam < B) & (head < H)
    there = live[:, None] & (column < D)[None, :]
    at = (r * q_request + beam * q_beam + head * q_head)[:, None] + column[None, :]
    q = tl.load(q_ptr + at, there, other=0.0).to(tl.float32) * scale
    m = tl.full((BR,), float("-inf"), tl.float32)
    total = tl.zeros((BR,), tl.float32)
    acc = tl.zeros((BR, DP), tl.float32)
    base = r * c_request
    for p in range(P):
        parent = tl.load(ancestor_ptr + (p * R + r) * B + beam, live, other=0).to(tl.int64)
        past = (base + parent * c_beam + head * c_head)[:, None] + column[None, :]
        k = tl.load(keys_ptr + past, there, other=0.0).to(tl.float32)
        v = tl.load(values_ptr + past, there, other=0.0).to(tl.float32)
        m, total, acc = _take(q, k, v, m, total, acc)
        base += c_step
    k = tl.load(k_ptr + at, there, other=0.0)
    v = tl.load(v_ptr + at, there, other=0.0)
    if KEEP:
        new = (base + beam * c_beam + head * c_head)[:, None] + column[None, :]
        tl.store(keys_ptr + new, k, there)
        tl.store(values_ptr + new, v, there)
    m, total, acc = _take(q, k.to(tl.float32), v.to(tl.float32), m, total, acc)
    y = acc / total[:, None]
    out_at = ((r * B + beam) * stride_out + head * D)[:, None] + column[None, :]
    if FP8:  # the heads of a beam share a scale; HP is a power of two, so a beam is HP adjacent rows of the tile
        y = tl.where(there, y.to(q_ptr.dtype.element_ty).to(tl.float32), 0.0)
        largest = tl.max(tl.reshape(tl.max(finite_magnitude(y), 1), (BB, HP)), 1)
        made = scale_of(largest, False, POW2)
        one = tl.program_id(0) * BB + tl.arange(0, BB)
        tl.store(scale_ptr + r * B + one, made, one < B)
        inv = tl.reshape(tl.broadcast_to(inverse(made)[:, None], (BB, HP)), (BR,))
        tl.store(out_ptr + out_at, to_fp8(y, inv[:, None], 0, False, False, PREROUND), there)
    else:
        tl.store(out_ptr + out_at, y.to(out_ptr.dtype.element_ty), there)


def _padded(width: int) -> int:
    return max(16, next_power_of_2(width))


def tile_for(rows: int, shared: bool) -> Tile:
    """Choose a tile for `rows` (beam, head) rows per request and group. shared: the keys are also the values."""
    if INTERPRETED:
        return Tile(16, 16, stages=2)
    if rows <= 16:
        return Tile(16, 64)
    # The fastest of sixteen tiles at 512 and at 3,000 keys on an H200. With values of their own, three stages of 128
    # keys would leave room for one program per multiprocessor, and softmax and products overlap between programs only.
    return Tile(64, 128 if shared else 64)


def parts_for(rows: int, keys: int) -> int:
    """Choose the number of parts the keys are divided into, from what all requests of a bucket have in common."""
    return cdiv(keys, SPAN) if rows <= FEW and keys > SPAN else 1


def _one_matrix(x: Tensor) -> bool:
    """Return True if TMA can read keys [R, S, G, D] as one matrix [R S, G D]: dense and aligned to 16 bytes."""
    s, d = x.shape[1], x.shape[3]
    dense = x.stride(3) == 1 and x.stride(2) == d and x.stride(0) == s * x.stride(1)
    return dense and x.stride(1) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0 and d == _padded(d)


def _descriptor(x: Tensor, bn: int) -> TensorDescriptor:
    r, s, g, d = x.shape
    return TensorDescriptor.from_tensor(x.as_strided((r * s, g * d), (x.stride(1), 1)), [bn, d])


def attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, shared: bool, tile: Tile | None = None
) -> Tensor:
    """Attend with the queries of all beams to the context of their request.

    Args:
        q: [R, B, H, D]; like k and v with unit stride along D.
        k, v: [R, S, G, D]; H is a multiple of G.
        lengths: [R] int32, how many of the S keys each request has.
        scale: of the scores.
        shared: whether v is k.
        tile: how to launch; default: chosen by the number of rows.

    Returns:
        [R, B, H, D] in q's dtype; zeros for a request without keys.
    """
    (requests, beams, heads, d), (_, s, groups, _) = q.shape, k.shape
    out = torch.empty(requests, beams, heads, d, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    if s == 0:
        return out.zero_()
    if scale <= 0:  # the kernel scales the maximum of the scores: the largest only times a positive number
        q, scale = q * (-1.0 if scale < 0 else 0.0), -scale or 1.0
    rows = beams * (heads // groups)
    bm, bn, warps, stages, registers = tile or tile_for(rows, shared)
    tma = _one_matrix(k) and (shared or _one_matrix(v))
    parts = parts_for(rows, s - 1)  # the first key starts the sums
    pairs, sums, values = requests * groups, None, out
    if parts > 1:
        sums = torch.empty(pairs, parts, 2, rows, dtype=torch.float32, device=q.device)
        values = torch.empty(pairs, parts, rows, d, dtype=torch.float32, device=q.device)
    _attend[(cdiv(rows, bm), pairs, parts)](
        q, k, v, _descriptor(k, bn) if tma else None, _descriptor(v, bn) if tma and not shared else None, lengths, values, sums,
        beams, heads, groups, s, scale * LOG2E, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        heads // groups, d, _padded(d), bm, bn, shared, tma, q.dtype == torch.float32, parts, SPAN, num_warps=warps, num_stages=stages,
        maxnreg=registers,
    )  # fmt: skip
    if parts > 1:
        _join[(rows, pairs)](sums, values, out, rows, heads, groups, parts, heads // groups, d, _padded(d), num_warps=1)
    return out


def ancestors(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, table: Tensor, scale: float, keep: bool, fp8: bool, pow2: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend to ancestors; return the result and its scales (empty if not `fp8`).

    q, k, v [R, B, H, D] have the same strides, and so have keys, values [L, R, W, H, D]; all have unit stride along D.
    The table of ancestors [P, R, B] is contiguous.
    """
    (requests, beams, heads, d), rows = q.shape, q.shape[0] * q.shape[1]
    if fp8:
        out = aligned(rows, heads * d, torch.float8_e4m3fn, q.device)
        made = torch.empty(rows, 1, dtype=torch.float32, device=q.device)
    else:
        out = torch.empty(requests, beams, heads, d, dtype=q.dtype, device=q.device)
        made = torch.empty(0, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, made
    wide = _padded(d)
    heads_padded = next_power_of_2(heads) if fp8 else heads
    some = max(1, 2048 // (heads_padded * wide)) if fp8 else 1  # beams per program
    block = some * heads_padded if fp8 else 16
    _ancestors[(cdiv(beams * heads_padded, block), requests)](
        q, k, v, keys, values, table, out, made, requests, beams, heads, table.shape[0], scale * LOG2E, *q.stride()[:3],
        *keys.stride()[:4], out.stride(0) if fp8 else heads * d, d, wide, heads_padded, some, block, keep, fp8, pow2, INTERPRETED,
        num_warps=8 if block * wide > 4096 else 4,
    )  # fmt: skip
    return out, made
