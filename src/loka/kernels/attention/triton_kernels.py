"""SiLU attention on tiles: forward, and a backward that recomputes the scores instead of storing them.

A program owns a block of positions of one row and one head. Forward and dq own queries and walk over the keys at or before them; dk and dv own keys and
walk over the queries at or after them, on transposed tiles, so that what the tensor cores wrote is what they read next. Scores never reach memory, so
the cost is linear in the total number of positions times the row length, and padding costs nothing: a program beyond the end of its row returns at once.

Masks. Operands are zero beyond the row. A query beyond it is never stored and has a zero gradient; a key beyond it lies after every query of the
row. So the one mask a tile needs is the causal one.

Bias gradients are summed in the dq walk, inside the tile, before memory is touched: one atomic addition per score cost more than all products together.

    position    i - j is constant on a diagonal: row r of the tile is rotated by r, and a diagonal becomes a column
    time        times grow within a row, so a tile holds a short range of buckets: one sum for each of them (a long range is slow, not wrong)

Every program adds to numbers of its own (`partial`), which are summed afterwards: all gradients are the same bits from run to run. Where that would take more memory
than `triton_launch.PARTIAL_BYTES` (thousands of long rows) programs share numbers, and the last bits of the bias gradients depend on their order.
"""

import triton
import triton.language as tl

from loka.kernels.tile import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _look_up(table, index):
    """table [N] at index [A, B]: read from shared memory in the layout of the index. tl.load would bring a layout of its own, and a conversion."""
    flat = tl.reshape(index, (index.shape[0] * index.shape[1],))
    return tl.reshape(tl.gather(table, flat, 0), index.shape)


@triton.jit
def _bucket(dt, BUCKETS: tl.constexpr):
    """Two per octave of |dt|, from the bits of its float32 value without the sign: the same bits in every backend."""
    bits = dt.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(((bits >> 22) & 511) - 254, 0), BUCKETS - 1)


@triton.jit
def _find_buckets(own, other, BUCKETS: tl.constexpr):
    """The bucket of every pair of a tile, own [A] and other [B] being the times of its rows and its columns."""
    row = tl.broadcast_to(tl.arange(0, own.shape[0])[:, None], (own.shape[0], other.shape[0]))
    column = tl.broadcast_to(tl.arange(0, other.shape[0])[None, :], (own.shape[0], other.shape[0]))
    if BUCKETS == 0:
        return row - column
    return _bucket(_look_up(own, row) - _look_up(other, column), BUCKETS)


@triton.jit
def _bound_buckets(own, other, BUCKETS: tl.constexpr):
    """The lowest and the highest bucket that the pairs of a tile can have."""
    a0, a1, t0, t1 = tl.min(own, 0), tl.max(own, 0), tl.min(other, 0), tl.max(other, 0)
    near = tl.maximum(tl.maximum(a0 - t1, t0 - a1), 0)
    far = tl.maximum(a1 - t0, t1 - a0)
    safe = (tl.maximum(a1, t1) < 2**62) & (tl.minimum(a0, t0) > -(2**62))  # no difference overflows
    return tl.where(safe, _bucket(near, BUCKETS), 0), tl.where(safe, _bucket(far, BUCKETS), BUCKETS - 1)


@triton.jit
def _add_biases(s, distance, far, bucket, position_ptr, at_position, time_ptr, at_time,
                POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, ENTRIES: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Scores plus biases. far: the distance of the tile's first query from its first key."""
    if POSITIONS > 0:
        WINDOW: tl.constexpr = 2 * max(QUERIES, KEYS)
        place = far - KEYS + tl.arange(0, WINDOW)
        window = tl.load(position_ptr + at_position + tl.minimum(tl.maximum(place, 0), POSITIONS - 1)).to(tl.float32)
        s += _look_up(window, distance - far + KEYS)
    if BUCKETS > 0:
        entry = tl.arange(0, ENTRIES)
        table = tl.load(time_ptr + at_time + tl.minimum(entry, BUCKETS - 1)).to(tl.float32)
        s += _look_up(table, bucket)
    return s


@triton.jit
def _load(ptr, start, at, n, h, stride_row, stride_head, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The [block, WIDTH] tile of one head at positions `at` of a row, zero beyond the row."""
    column = tl.arange(0, PADDED)
    inside = (at < n)[:, None]
    if WIDTH < PADDED:
        inside = inside & (column < WIDTH)[None, :]
    return tl.load(ptr + (start + at)[:, None] * stride_row + h * stride_head + column[None, :], inside, other=0.0)


@triton.jit
def _load_times(ptr, start, at, n, BUCKETS: tl.constexpr):
    """The times at positions `at` of a row; beyond the row the last one, which keeps the range of buckets short."""
    return tl.load(ptr + start + tl.minimum(at, n - 1)) if BUCKETS > 0 else at


@triton.jit
def _store(ptr, value, start, at, n, h, heads, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Write a tile into a contiguous [total, H, WIDTH] output."""
    column = tl.arange(0, PADDED)
    inside = (at < n)[:, None] & (column < WIDTH)[None, :]
    where = ((start + at)[:, None] * heads + h) * WIDTH + column[None, :]
    tl.store(ptr + where, value.to(ptr.dtype.element_ty), inside)


@triton.jit
def _dot(a, b, IEEE: tl.constexpr):
    return tl.dot(a, b, input_precision="ieee" if IEEE else "tf32")


@triton.jit
def _sigmoid(s):
    """1 / (1 + exp(-s)) to 1e-6 in four instructions; tl.sigmoid takes fourteen, to keep denormal numbers that end in 0 or 1 here."""
    if _INTERPRETED:
        return tl.sigmoid(s)
    return tl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
        "=f,f", [s], dtype=tl.float32, is_pure=True, pack=1)  # fmt: skip


@triton.jit
def _forward(q_ptr, k_ptr, v_ptr, out_ptr, offsets_ptr, asked_ptr, times_ptr, position_ptr, time_ptr,
             heads, q_row, q_head, k_row, k_head, v_row, v_head, stride_p, stride_t, alpha, divisor,
             D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
             POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, ENTRIES: tl.constexpr, IEEE: tl.constexpr,
             QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    start = tl.load(offsets_ptr + b)
    n = (tl.load(offsets_ptr + b + 1) - start).to(tl.int32)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES  # the longest walks start first
    if first >= n:
        return
    i = first + tl.arange(0, QUERIES)
    q = _load(q_ptr, start, i, n, h, q_row, q_head, D, DP)
    asked = _load_times(asked_ptr, start, i, n, BUCKETS)
    total = tl.zeros((QUERIES, VP), tl.float32)
    for low in range(0, tl.minimum(first + QUERIES, n), KEYS):
        j = low + tl.arange(0, KEYS)
        k = _load(k_ptr, start, j, n, h, k_row, k_head, D, DP)
        v = _load(v_ptr, start, j, n, h, v_row, v_head, V, VP)
        distance = i[:, None] - j[None, :]
        bucket = _find_buckets(asked, _load_times(times_ptr, start, j, n, BUCKETS), BUCKETS)
        s = _dot(q, tl.trans(k), IEEE) * alpha
        s = _add_biases(s, distance, first - low, bucket, position_ptr, h * stride_p, time_ptr, h * stride_t,
                        POSITIONS, BUCKETS, ENTRIES, QUERIES, KEYS)  # fmt: skip
        weight = tl.where(distance >= 0, s * _sigmoid(s), 0.0)
        total += _dot(weight.to(v.dtype), v, IEEE)
    scale = 1.0 / tl.where(divisor > 0, divisor, n.to(tl.float32))
    _store(out_ptr, total * scale, start, i, n, h, heads, V, VP)


@triton.jit
def _whole(x):
    """2^23 + x as a float32, exactly, for whole numbers 0 <= x < 2^23."""
    return (x | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _exceeds(x, threshold):
    """1.0 where x > threshold, else 0.0, for whole numbers: one instruction, where a comparison and a choice are two slow ones."""
    if _INTERPRETED:
        return tl.where(x > threshold, 1.0, 0.0)
    return tl.inline_asm_elementwise(
        "sub.sat.f32 $0, $1, $2;", "=f,f,f", [x, threshold], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _add_diagonals(sum_ptr, ds, scale, far, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Add the diagonals of ds, scaled, to sum_ptr[distance]; far: the first query's distance from the first key.

    Column c of the rotated tile holds in row r the element of column (r - c) mod KEYS, whose distance is far + c + (turn - 1) KEYS. The sum over a
    turn is what lies above the turn before it, less what lies above itself.
    """
    r, c = tl.arange(0, QUERIES)[:, None], tl.arange(0, KEYS)[None, :]
    rotated = tl.gather(ds, (r - c) & (KEYS - 1), 1)
    turn = _whole((r - c + KEYS) // KEYS)
    place = far - KEYS + tl.arange(0, KEYS)
    above = tl.sum(rotated, 0)
    for u in tl.static_range((QUERIES + KEYS - 1) // KEYS):
        rest = tl.sum(rotated * _exceeds(turn, 8388608.0 + u), 0)
        tl.atomic_add(sum_ptr + place, (above - rest) * scale, place >= 0, sem="relaxed")
        place += KEYS
        above = rest
    tl.atomic_add(sum_ptr + place, above * scale, place >= 0, sem="relaxed")


@triton.jit
def _add_buckets(sum_ptr, ds, scale, bucket, lowest, highest, BUCKETS: tl.constexpr):
    """Add the sum of ds over every bucket, scaled, to sum_ptr[bucket].

    The sum over a bucket is what lies above the bucket before it, less what lies above itself. Four of them share one reduction across the
    tile: its latency counts, not its additions.
    """
    whole = _whole(bucket)
    lowest = lowest // 4 * 4  # so that a bucket's additions all come from one thread, in order
    at = sum_ptr + lowest + tl.arange(0, 4)
    above = tl.sum(ds, 1)
    for b in range(lowest, highest + 1, 4):
        edge = 8388608.0 + b
        t0, t1 = tl.sum(ds * _exceeds(whole, edge), 1), tl.sum(ds * _exceeds(whole, edge + 1.0), 1)
        t2, t3 = tl.sum(ds * _exceeds(whole, edge + 2.0), 1), tl.sum(ds * _exceeds(whole, edge + 3.0), 1)
        even, odd = tl.join(above - t0, t1 - t2), tl.join(t0 - t1, t2 - t3)
        four = tl.sum(tl.reshape(tl.join(even, odd), (ds.shape[0], 4)), 0)
        tl.atomic_add(at, four * scale, b + tl.arange(0, 4) < BUCKETS, sem="relaxed")
        at += 4  # not sum_ptr + b, which would make b, and what is computed from it, 64 bits wide
        above = t3


@triton.jit
def _backward_q(q_ptr, k_ptr, v_ptr, grad_ptr, dq_ptr, partial_ptr, offsets_ptr, asked_ptr, times_ptr, position_ptr, time_ptr,
                heads, q_row, q_head, k_row, k_head, v_row, v_head, g_row, g_head, stride_p, stride_t, alpha, divisor,
                distances, slots,
                D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
                POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, ENTRIES: tl.constexpr, IEEE: tl.constexpr,
                QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """partial: [slots, H, distances + BUCKETS], zero; a slot for every block of queries, a row's blocks after those of the rows before it, or for several."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    start = tl.load(offsets_ptr + b)
    n = (tl.load(offsets_ptr + b + 1) - start).to(tl.int32)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    first = block * QUERIES
    if first >= n:
        return
    i = first + tl.arange(0, QUERIES)
    q = _load(q_ptr, start, i, n, h, q_row, q_head, D, DP)
    grad = _load(grad_ptr, start, i, n, h, g_row, g_head, V, VP)
    asked = _load_times(asked_ptr, start, i, n, BUCKETS)
    scale = 1.0 / tl.where(divisor > 0, divisor, n.to(tl.float32))
    sum_ptr = partial_ptr + ((start // QUERIES + b + block) % slots * heads + h) * (distances + BUCKETS)
    dq = tl.zeros((QUERIES, DP), tl.float32)
    for low in range(0, tl.minimum(first + QUERIES, n), KEYS):
        j = low + tl.arange(0, KEYS)
        k = _load(k_ptr, start, j, n, h, k_row, k_head, D, DP)
        v = _load(v_ptr, start, j, n, h, v_row, v_head, V, VP)
        distance = i[:, None] - j[None, :]
        times = _load_times(times_ptr, start, j, n, BUCKETS)
        bucket = _find_buckets(asked, times, BUCKETS)
        s = _dot(q, tl.trans(k), IEEE) * alpha
        s = _add_biases(s, distance, first - low, bucket, position_ptr, h * stride_p, time_ptr, h * stride_t,
                        POSITIONS, BUCKETS, ENTRIES, QUERIES, KEYS)  # fmt: skip
        sigmoid = _sigmoid(s)
        slope = tl.where(distance >= 0, sigmoid * (1.0 + s * (1.0 - sigmoid)), 0.0)
        ds = _dot(grad, tl.trans(v), IEEE) * slope
        dq += _dot(ds.to(k.dtype), k, IEEE)
        if BUCKETS > 0:
            lowest, highest = _bound_buckets(asked, times, BUCKETS)
            _add_buckets(sum_ptr + distances, ds, scale, bucket, lowest, highest, BUCKETS)
        if POSITIONS > 0:
            _add_diagonals(sum_ptr, ds, scale, first - low, QUERIES, KEYS)
    _store(dq_ptr, dq * (alpha * scale), start, i, n, h, heads, D, DP)


@triton.jit
def _backward_kv(q_ptr, k_ptr, v_ptr, grad_ptr, dk_ptr, dv_ptr, offsets_ptr, asked_ptr, times_ptr, position_ptr, time_ptr,
                 heads, q_row, q_head, k_row, k_head, v_row, v_head, g_row, g_head, stride_p, stride_t, alpha, divisor,
                 D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
                 POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, ENTRIES: tl.constexpr, IEEE: tl.constexpr,
                 QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    start = tl.load(offsets_ptr + b)
    n = (tl.load(offsets_ptr + b + 1) - start).to(tl.int32)
    first = tl.program_id(0) * KEYS
    if first >= n:
        return
    j = first + tl.arange(0, KEYS)
    k = _load(k_ptr, start, j, n, h, k_row, k_head, D, DP)
    v = _load(v_ptr, start, j, n, h, v_row, v_head, V, VP)
    times = _load_times(times_ptr, start, j, n, BUCKETS)
    dk = tl.zeros((KEYS, DP), tl.float32)
    dv = tl.zeros((KEYS, VP), tl.float32)
    for low in range(first // QUERIES * QUERIES, n, QUERIES):
        i = low + tl.arange(0, QUERIES)
        q = _load(q_ptr, start, i, n, h, q_row, q_head, D, DP)
        grad = _load(grad_ptr, start, i, n, h, g_row, g_head, V, VP)
        distance = i[None, :] - j[:, None]
        bucket = _find_buckets(times, _load_times(asked_ptr, start, i, n, BUCKETS), BUCKETS)
        s = _dot(k, tl.trans(q), IEEE) * alpha
        s = _add_biases(s, distance, low - first, bucket, position_ptr, h * stride_p, time_ptr, h * stride_t,
                        POSITIONS, BUCKETS, ENTRIES, QUERIES, KEYS)  # fmt: skip
        sigmoid = tl.where(distance >= 0, _sigmoid(s), 0.0)
        weight = s * sigmoid
        dv += _dot(weight.to(grad.dtype), grad, IEEE)
        ds = _dot(v, tl.trans(grad), IEEE) * (sigmoid + weight * (1.0 - sigmoid))
        dk += _dot(ds.to(q.dtype), q, IEEE)
    scale = 1.0 / tl.where(divisor > 0, divisor, n.to(tl.float32))
    _store(dk_ptr, dk * (alpha * scale), start, j, n, h, heads, D, DP)
    _store(dv_ptr, dv * scale, start, j, n, h, heads, V, VP)
