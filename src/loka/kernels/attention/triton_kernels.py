"""SiLU attention on tiles: forward, and a backward that recomputes the scores instead of storing them.

A program owns BLOCK positions of one row and one head. Forward and dq own queries and walk over the keys at or before them; dk and dv own keys and
walk over the queries at or after them, and that walk also sums the gradients of the biases. Scores never reach memory, so the cost is linear in the
total number of positions times the row length, and padding costs nothing: a program beyond the end of its row returns at once.

Bias gradients are atomic sums in float32 (a tile adds to neighbouring addresses), spread over COPIES buffers that are added up afterwards: the
order of the additions is not fixed, so these two gradients, and only these, may differ in the last bits from run to run on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
BLOCK = 16 if INTERPRETED else 64
COPIES = 2 if INTERPRETED else 16


@triton.jit
def _bucket(dt, ENTRIES: tl.constexpr):
    """Two buckets per octave of |dt|, from the bits of its float32 value: the same bits in every backend."""
    magnitude = tl.maximum(tl.abs(dt), 1).to(tl.float32)
    bits = magnitude.to(tl.int32, bitcast=True)
    return tl.minimum((bits >> 22) - 254, ENTRIES - 1)


@triton.jit
def _scores(q, k, i, j, n, h, asked_ptr, times_ptr, start, position_ptr, time_ptr, stride_p, stride_t, alpha,
            POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, IEEE: tl.constexpr):  # fmt: skip
    """s = alpha q k^T + biases for the tile of queries i and keys j; also where it counts, and the entries of the biases it read."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee" if IEEE else "tf32") * alpha
    distance = i[:, None] - j[None, :]
    seen = (distance >= 0) & (i < n)[:, None] & (j < n)[None, :]
    place = tl.minimum(tl.maximum(distance, 0), POSITIONS - 1) if POSITIONS > 0 else distance
    if POSITIONS > 0:
        s += tl.load(position_ptr + h * stride_p + place, seen, other=0.0).to(tl.float32)
    bucket = distance
    if BUCKETS > 0:
        asked = tl.load(asked_ptr + start + i, i < n, other=0)
        times = tl.load(times_ptr + start + j, j < n, other=0)
        bucket = _bucket(asked[:, None] - times[None, :], BUCKETS)
        s += tl.load(time_ptr + h * stride_t + bucket, seen, other=0.0).to(tl.float32)
    return s, seen, place, bucket


@triton.jit
def _load(ptr, start, at, n, h, stride_row, stride_head, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The [BLOCK, WIDTH] tile of one head at positions `at` of a row, zero beyond the row."""
    column = tl.arange(0, PADDED)
    inside = (at < n)[:, None] & (column < WIDTH)[None, :]
    return tl.load(ptr + (start + at)[:, None] * stride_row + h * stride_head + column[None, :], inside, other=0.0)


@triton.jit
def _store(ptr, value, start, at, n, h, heads, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Write a tile into a contiguous [total, H, WIDTH] output."""
    column = tl.arange(0, PADDED)
    inside = (at < n)[:, None] & (column < WIDTH)[None, :]
    where = ((start + at)[:, None] * heads + h) * WIDTH + column[None, :]
    tl.store(ptr + where, value.to(ptr.dtype.element_ty), inside)


@triton.jit
def _forward(q_ptr, k_ptr, v_ptr, out_ptr, offsets_ptr, asked_ptr, times_ptr, position_ptr, time_ptr,
             heads, q_row, q_head, k_row, k_head, v_row, v_head, stride_p, stride_t, alpha, divisor,
             D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
             POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, IEEE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    start = tl.load(offsets_ptr + b)
    n = (tl.load(offsets_ptr + b + 1) - start).to(tl.int32)
    first = tl.program_id(0) * BLOCK
    if first >= n:
        return
    i = first + tl.arange(0, BLOCK)
    q = _load(q_ptr, start, i, n, h, q_row, q_head, D, DP)
    total = tl.zeros((BLOCK, VP), tl.float32)
    for low in range(0, first + BLOCK, BLOCK):
        j = low + tl.arange(0, BLOCK)
        k = _load(k_ptr, start, j, n, h, k_row, k_head, D, DP)
        v = _load(v_ptr, start, j, n, h, v_row, v_head, V, VP)
        s, seen, _, _ = _scores(q, k, i, j, n, h, asked_ptr, times_ptr, start, position_ptr, time_ptr, stride_p,
                                stride_t, alpha, POSITIONS, BUCKETS, IEEE)  # fmt: skip
        weight = tl.where(seen, s * tl.sigmoid(s), 0.0)
        total += tl.dot(weight.to(v.dtype), v, input_precision="ieee" if IEEE else "tf32")
    by = tl.where(divisor > 0, divisor, n.to(tl.float32))
    _store(out_ptr, total / by, start, i, n, h, heads, V, VP)


@triton.jit
def _slope(s, seen):
    """d silu(s) / ds where the pair counts."""
    sigmoid = tl.sigmoid(s)
    return tl.where(seen, sigmoid * (1.0 + s * (1.0 - sigmoid)), 0.0)


@triton.jit
def _backward_q(q_ptr, k_ptr, v_ptr, grad_ptr, dq_ptr, offsets_ptr, asked_ptr, times_ptr, position_ptr, time_ptr,
                heads, q_row, q_head, k_row, k_head, v_row, v_head, g_row, g_head, stride_p, stride_t, alpha, divisor,
                D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
                POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, IEEE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    start = tl.load(offsets_ptr + b)
    n = (tl.load(offsets_ptr + b + 1) - start).to(tl.int32)
    first = tl.program_id(0) * BLOCK
    if first >= n:
        return
    i = first + tl.arange(0, BLOCK)
    q = _load(q_ptr, start, i, n, h, q_row, q_head, D, DP)
    grad = _load(grad_ptr, start, i, n, h, g_row, g_head, V, VP)
    dq = tl.zeros((BLOCK, DP), tl.float32)
    for low in range(0, first + BLOCK, BLOCK):
        j = low + tl.arange(0, BLOCK)
        k = _load(k_ptr, start, j, n, h, k_row, k_head, D, DP)
        v = _load(v_ptr, start, j, n, h, v_row, v_head, V, VP)
        s, seen, _, _ = _scores(q, k, i, j, n, h, asked_ptr, times_ptr, start, position_ptr, time_ptr, stride_p,
                                stride_t, alpha, POSITIONS, BUCKETS, IEEE)  # fmt: skip
        ds = tl.dot(grad, tl.trans(v), input_precision="ieee" if IEEE else "tf32") * _slope(s, seen)
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee" if IEEE else "tf32")
    by = tl.where(divisor > 0, divisor, n.to(tl.float32))
    _store(dq_ptr, dq * (alpha / by), start, i, n, h, heads, D, DP)


@triton.jit
def _backward_kv(q_ptr, k_ptr, v_ptr, grad_ptr, dk_ptr, dv_ptr, dposition_ptr, dtime_ptr,
                 offsets_ptr, asked_ptr, times_ptr, position_ptr, time_ptr,
                 heads, q_row, q_head, k_row, k_head, v_row, v_head, g_row, g_head, stride_p, stride_t, alpha, divisor,
                 D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
                 POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, COPIES: tl.constexpr,
                 IEEE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    start = tl.load(offsets_ptr + b)
    n = (tl.load(offsets_ptr + b + 1) - start).to(tl.int32)
    first = tl.program_id(0) * BLOCK
    if first >= n:
        return
    j = first + tl.arange(0, BLOCK)
    k = _load(k_ptr, start, j, n, h, k_row, k_head, D, DP)
    v = _load(v_ptr, start, j, n, h, v_row, v_head, V, VP)
    dk = tl.zeros((BLOCK, DP), tl.float32)
    dv = tl.zeros((BLOCK, VP), tl.float32)
    by = tl.where(divisor > 0, divisor, n.to(tl.float32))
    shelf = (b + tl.program_id(0)) % COPIES * heads + h
    for low in range(first, n, BLOCK):
        i = low + tl.arange(0, BLOCK)
        q = _load(q_ptr, start, i, n, h, q_row, q_head, D, DP)
        grad = _load(grad_ptr, start, i, n, h, g_row, g_head, V, VP)
        s, seen, place, bucket = _scores(q, k, i, j, n, h, asked_ptr, times_ptr, start, position_ptr, time_ptr,
                                         stride_p, stride_t, alpha, POSITIONS, BUCKETS, IEEE)  # fmt: skip
        weight = tl.where(seen, s * tl.sigmoid(s), 0.0)
        dv += tl.dot(tl.trans(weight).to(grad.dtype), grad, input_precision="ieee" if IEEE else "tf32")
        ds = tl.dot(grad, tl.trans(v), input_precision="ieee" if IEEE else "tf32") * _slope(s, seen)
        dk += tl.dot(tl.trans(ds).to(q.dtype), q, input_precision="ieee" if IEEE else "tf32")
        if POSITIONS > 0:
            tl.atomic_add(dposition_ptr + shelf * POSITIONS + place, ds / by, seen, sem="relaxed")
        if BUCKETS > 0:
            tl.atomic_add(dtime_ptr + shelf * BUCKETS + bucket, ds / by, seen, sem="relaxed")
    _store(dk_ptr, dk * (alpha / by), start, j, n, h, heads, D, DP)
    _store(dv_ptr, dv / by, start, j, n, h, heads, V, VP)


def _pad(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _common(q, k, v, position_bias, time_bias):
    """Options that all three kernels share. An absent bias has no entries, and its pointer is never read."""
    return {
        "D": q.shape[2], "DP": _pad(q.shape[2]), "V": v.shape[2], "VP": _pad(v.shape[2]),
        "POSITIONS": 0 if position_bias is None else position_bias.shape[1],
        "BUCKETS": 0 if time_bias is None else time_bias.shape[1],
        "IEEE": q.dtype == torch.float32, "BLOCK": BLOCK,
    }  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, times: Tensor | None, asked: Tensor | None,
    position_bias: Tensor | None, time_bias: Tensor | None, max_length: int, divisor: float, alpha: float,
) -> Tensor:  # fmt: skip
    """Run the forward kernel; a divisor of 0 means the length of each row."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    rows, heads = offsets.shape[0] - 1, q.shape[1]
    if rows == 0 or q.shape[0] == 0:
        return out
    _forward[triton.cdiv(max_length, BLOCK), rows * heads](
        q, k, v, out, offsets, asked, times, position_bias, time_bias,
        heads, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        0 if position_bias is None else position_bias.stride(0), 0 if time_bias is None else time_bias.stride(0),
        alpha, divisor, **_common(q, k, v, position_bias, time_bias), num_warps=4,
    )  # fmt: skip
    return out


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, times: Tensor | None, asked: Tensor | None,
    position_bias: Tensor | None, time_bias: Tensor | None, max_length: int, divisor: float, alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and the two biases (empty where a bias is absent)."""
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    rows, heads = offsets.shape[0] - 1, q.shape[1]
    options = _common(q, k, v, position_bias, time_bias)
    dposition = q.new_zeros(COPIES, heads, options["POSITIONS"], dtype=torch.float32)
    dtime = q.new_zeros(COPIES, heads, options["BUCKETS"], dtype=torch.float32)
    if rows and q.shape[0]:
        strides = (
            heads, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            grad.stride(0), grad.stride(1),
            0 if position_bias is None else position_bias.stride(0), 0 if time_bias is None else time_bias.stride(0),
        )  # fmt: skip
        grid = (triton.cdiv(max_length, BLOCK), rows * heads)
        where = (offsets, asked, times, position_bias, time_bias)
        _backward_q[grid](q, k, v, grad, dq, *where, *strides, alpha, divisor, **options, num_warps=4)
        _backward_kv[grid](q, k, v, grad, dk, dv, dposition, dtime, *where, *strides, alpha, divisor,
                           **options, COPIES=COPIES, num_warps=4)  # fmt: skip
    return dq, dk, dv, dposition.sum(0), dtime.sum(0)
