"""Flash attention of many beams over one context in E4M3: both products run in FP8, at twice the 16-bit rate.

    s   = (q8 k8^T) * scale_q            q8: a query, rounded to E4M3 with a scale of its own
    acc = acc * shrink + p8 v8           p8: 256 p rounded to E4M3, p in (0, 1] relative to the running maximum

The softmax denominator sums the unrounded p. Keys and values are E4M3 without scales. Hopper multiplies FP8 only if
both operands are contiguous along the summed dimension: keys as rows, values as columns. Otherwise the kernel is that
of `triton_kernels._attend`, and gives the same result up to the rounding of q and p.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loka.kernels.beam_attention.triton_kernels import (
    INTERPRETED,
    LOG2E,
    Tile,
    _descriptor,
    _one_matrix,
    _padded,
    _rows_of,
)
from loka.kernels.strides import cdiv
from loka.kernels.tile import finite_magnitude, inverse, scale_of, to_fp8
from loka.kernels.triton_launcher import quick

NARROWEST = 32  # K of an FP8 tensor core instruction


@triton.jit
def _update_low(q, q_scale, k, v, m, total, acc, left, MASK: tl.constexpr, PREROUND: tl.constexpr):
    """Update the running sums with keys [BN, D] and values [D, BN]; with MASK only the first `left` count."""
    s = tl.dot(q, k.T) * q_scale[:, None]
    if MASK:
        s = tl.where((tl.arange(0, k.shape[0]) < left)[None, :], s, float("-inf"))
    higher = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - higher[:, None])
    shrink = tl.exp2(m - higher)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(to_fp8(p, 256.0, 0, False, False, PREROUND, True), v.T, acc * shrink[:, None])
    return higher, total, acc


@quick
@triton.jit
def _attend_low(q_ptr, k_ptr, v_ptr, k_desc, v_desc, length_ptr, out_ptr, B, H, G, S, scale,
                q_request, q_beam, q_head, k_request, k_row, k_head, v_request, v_head, v_column,
                HG: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr,
                PREROUND: tl.constexpr):  # fmt: skip
    r, g = (tl.program_id(1) // G).to(tl.int64), tl.program_id(1) % G
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
    full = length // BN * BN
    for n in range(0, full, BN):
        if TMA:
            k = k_desc.load([(r * S).to(tl.int32) + n, g * D])
            v = v_desc.load([((r * G + g) * D).to(tl.int32), n])
        else:
            k = _rows_of(k_base, n, length, k_row, D, D, BN)
            v = tl.load(v_base + column.to(tl.int64)[:, None] * v_column + (n + tl.arange(0, BN))[None, :])
        m, total, acc = _update_low(q, q_scale, k, v, m, total, acc, BN, False, PREROUND)
    if full < length:
        k = _rows_of(k_base, full, length, k_row, D, D, BN)
        key = full + tl.arange(0, BN)
        v = tl.load(v_base + column.to(tl.int64)[:, None] * v_column + key[None, :], (key < length)[None, :], other=0.0)
        m, total, acc = _update_low(q, q_scale, k, v, m, total, acc, length - full, True, PREROUND)
    acc = tl.where((total == 0.0)[:, None], 0.0, acc / (256.0 * total)[:, None])  # 0 for requests without context
    out_at = ((r * B + beam) * H + head)[:, None] * D + column[None, :]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), there)


def fits(d: int) -> bool:
    """Return True if heads of this width can be multiplied in FP8."""
    return d >= NARROWEST and d == _padded(d)


def tile_for_low(rows: int) -> Tile:
    """Choose a tile. These compile for Hopper but have not been timed against others there."""
    if INTERPRETED:
        return (16, 32, 4, 2)
    return (64, 128, 4, 3) if rows > 16 else (16, 128, 4, 3)


def _columns_descriptor(v: Tensor, bn: int) -> TensorDescriptor | None:
    """Return a descriptor of the values as one matrix [R G D, S], or None if they are not dense and aligned."""
    requests, s, groups, d = v.shape
    dense = v.stride(2) == d * v.stride(3) and v.stride(0) == groups * v.stride(2)
    if not dense or v.stride(3) % 16 or v.data_ptr() % 16:
        return None
    return TensorDescriptor.from_tensor(v.as_strided((requests * groups * d, s), (v.stride(3), 1)), [d, bn])


def attend_low(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, tile: Tile | None = None) -> Tensor:
    """Attend with q [R, B, H, D] to k, v [R, S, G, D] in E4M3. Unit stride along D for q and k, along S for v."""
    (requests, beams, heads, d), (_, s, groups, _) = q.shape, k.shape
    out = torch.empty(requests, beams, heads, d, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    if s == 0:
        return out.zero_()
    rows = beams * (heads // groups)
    bm, bn, warps, stages = tile or tile_for_low(rows)
    keys = _descriptor(k, bn) if _one_matrix(k) else None
    values = _columns_descriptor(v, bn)
    tma = keys is not None and values is not None
    _attend_low[(cdiv(rows, bm), requests * groups)](
        q, k, v, keys if tma else None, values if tma else None, lengths, out, beams, heads, groups, s, scale * LOG2E,
        *q.stride()[:3], *k.stride()[:3], v.stride(0), v.stride(2), v.stride(3), heads // groups, d, bm, bn, tma, INTERPRETED,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
