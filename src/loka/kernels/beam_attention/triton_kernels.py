"""Flash attention of many beams over one context, and attention to a beam's few ancestors.

A program owns BM rows of one request and one key-value head; a row is a (beam, query head of the group) pair, so all of them read the same keys and values: the
context crosses memory once per request and layer, whatever the number of beams, and stays in L2 for the few programs that share it.

    m, l, acc      running maximum, sum and weighted values of each row; exp2 with log2(e) folded into the scale
    full blocks    loaded by TMA, no comparison with the length; the last, partial one by pointers that never touch what lies beyond
    v is k         one load feeds both products

Ancestors: the P <= 8 keys and values of a beam's own past lie where they were made; a table says which beam of each step it descends from. One pass, no reordering
of caches, no tensor cores: P is too small for them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
LOG2E = 1.4426950408889634
Tile = tuple[int, int, int, int]  # BM, BN, warps, stages


@triton.jit
def _update(q, k, v, m, total, acc, scale, left, MASK: tl.constexpr, IEEE: tl.constexpr):
    """One block of keys: `left` of them count where MASK."""
    s = tl.dot(q, k.T, input_precision="ieee" if IEEE else "tf32") * scale
    if MASK:
        s = tl.where((tl.arange(0, k.shape[0]) < left)[None, :], s, float("-inf"))
    higher = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - higher[:, None])
    shrink = tl.exp2(m - higher)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee" if IEEE else "tf32")
    return higher, total, acc


@triton.jit
def _rows_of(ptr, first, length, stride, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr):
    """[BN, DP] rows of one head, zero beyond the length and the width."""
    row = first + tl.arange(0, BN)
    column = tl.arange(0, DP)
    return tl.load(ptr + row.to(tl.int64)[:, None] * stride + column[None, :],
                   (row < length)[:, None] & (column < D)[None, :], other=0.0)  # fmt: skip


@triton.jit
def _attend(q_ptr, k_ptr, v_ptr, k_desc, v_desc, length_ptr, out_ptr, B, H, G, S, scale,
            q_request, q_beam, q_head, k_request, k_row, k_head, v_request, v_row, v_head,
            HG: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
            SHARED: tl.constexpr, TMA: tl.constexpr, IEEE: tl.constexpr):  # fmt: skip
    r, g = (tl.program_id(1) // G).to(tl.int64), tl.program_id(1) % G
    length = tl.minimum(tl.load(length_ptr + r).to(tl.int32), S)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    beam, head = row // HG, g * HG + row % HG
    column = tl.arange(0, DP)
    there = (beam < B)[:, None] & (column < D)[None, :]
    q_at = q_ptr + r * q_request + beam.to(tl.int64)[:, None] * q_beam + head[:, None] * q_head + column[None, :]
    q = tl.load(q_at, there, other=0.0)
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DP), tl.float32)
    k_base = k_ptr + r * k_request + g * k_head
    v_base = v_ptr + r * v_request + g * v_head
    full = length // BN * BN
    for n in range(0, full, BN):
        if TMA:
            at = (r * S).to(tl.int32) + n
            k = k_desc.load([at, g * D])
            v = k if SHARED else v_desc.load([at, g * D])
        else:
            k = _rows_of(k_base, n, length, k_row, D, DP, BN)
            v = k if SHARED else _rows_of(v_base, n, length, v_row, D, DP, BN)
        m, total, acc = _update(q, k, v, m, total, acc, scale, BN, False, IEEE)
    if full < length:
        k = _rows_of(k_base, full, length, k_row, D, DP, BN)
        v = k if SHARED else _rows_of(v_base, full, length, v_row, D, DP, BN)
        m, total, acc = _update(q, k, v, m, total, acc, scale, length - full, True, IEEE)
    acc = tl.where((total == 0.0)[:, None], 0.0, acc / total[:, None])  # without context
    out_at = ((r * B + beam) * H + head)[:, None] * D + column[None, :]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), there)


@triton.jit
def _ancestors(q_ptr, k_ptr, v_ptr, ancestor_ptr, out_ptr, R, B, W, H, P, scale, q_request, q_beam, q_head,
               step, request, place, head_stride,
               D: tl.constexpr, DP: tl.constexpr, BB: tl.constexpr):  # fmt: skip
    r, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    beam = tl.program_id(0) * BB + tl.arange(0, BB)
    column = tl.arange(0, DP)
    there = (beam < B)[:, None] & (column < D)[None, :]
    q_at = q_ptr + r * q_request + beam.to(tl.int64)[:, None] * q_beam + h * q_head + column[None, :]
    q = tl.load(q_at, there, other=0.0).to(tl.float32) * scale
    m = tl.full((BB,), float("-inf"), tl.float32)
    total = tl.zeros((BB,), tl.float32)
    acc = tl.zeros((BB, DP), tl.float32)
    base = r * request
    for p in range(P):
        parent = tl.load(ancestor_ptr + (p * R + r) * B + beam, beam < B, other=0).to(tl.int64)
        at = base + parent[:, None] * place + h * head_stride + column[None, :]
        k = tl.load(k_ptr + at, there, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, there, other=0.0).to(tl.float32)
        s = tl.sum(q * k, 1)
        higher = tl.maximum(m, s)
        weight, shrink = tl.exp2(s - higher), tl.exp2(m - higher)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + weight[:, None] * v
        m = higher
        base += step
    out_at = ((r * B + beam) * H + h)[:, None] * D + column[None, :]
    tl.store(out_ptr + out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), there)


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def tile_for(rows: int, d: int, item: int) -> Tile:
    """(BM, BN, warps, stages) for `rows` (beam, head) rows a request and group."""
    if INTERPRETED:
        return (16, 16, 4, 2)
    return (
        (64, 64, 4, 3) if rows > 16 else (16, 64, 4, 3)
    )  # of nine tiles the fastest at 512 and at 3000 keys on an H200


def _one_matrix(x: Tensor) -> bool:
    """Whether keys [R, S, G, D] are one matrix [R S, G D] that TMA can read: rows at multiples of 16 bytes, from an aligned start."""
    s, d = x.shape[1], x.shape[3]
    dense = x.stride(3) == 1 and x.stride(2) == d and x.stride(0) == s * x.stride(1)
    return dense and x.stride(1) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0 and d == _padded(d)


def _descriptor(x: Tensor, bn: int) -> TensorDescriptor:
    r, s, g, d = x.shape
    return TensorDescriptor.from_tensor(x.as_strided((r * s, g * d), (x.stride(1), 1)), [bn, d])


def attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, shared: bool, tile: Tile | None = None
) -> Tensor:
    """q [R, B, H, D], k, v [R, S, G, D] with unit stride along D."""
    (requests, beams, heads, d), (_, s, groups, _) = q.shape, k.shape
    out = torch.empty(requests, beams, heads, d, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    if s == 0:
        return out.zero_()
    rows = beams * (heads // groups)
    bm, bn, warps, stages = tile or tile_for(rows, d, q.element_size())
    tma = _one_matrix(k) and (shared or _one_matrix(v))
    _attend[(triton.cdiv(rows, bm), requests * groups)](
        q, k, v, _descriptor(k, bn) if tma else None, _descriptor(v, bn) if tma and not shared else None, lengths, out,
        beams, heads, groups, s, scale * LOG2E, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        heads // groups, d, _padded(d), bm, bn, shared, tma, q.dtype == torch.float32, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def ancestors(q: Tensor, k: Tensor, v: Tensor, table: Tensor, scale: float) -> Tensor:
    """q [R, B, H, D], k, v [P, R, W, H, D] with the same strides, unit along D; table contiguous [P, R, B]."""
    (requests, beams, heads, d), (steps, _, width) = q.shape, k.shape[:3]
    out = torch.empty(requests, beams, heads, d, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    block = 4 if INTERPRETED else 16
    _ancestors[(triton.cdiv(beams, block), requests * heads)](
        q, k, v, table, out, requests, beams, width, heads, steps, scale * LOG2E, *q.stride()[:3], *k.stride()[:4],
        d, _padded(d), block, num_warps=4,
    )  # fmt: skip
    return out
