"""Tiled SiLU attention: the forward pass, and a backward pass that recomputes the scores once.

A program handles a block of positions of one row and one head. The forward and dq kernels hold queries and iterate over
the keys at or before them; the dk and dv kernel holds keys and iterates over the queries at or after them, on
transposed tiles, so that tensor core results are in the layout of the next operand. Padding costs nothing: a program
beyond the end of its row returns at once.

Masks. Operands are zero beyond the row. A query beyond it is never stored and has a zero gradient; a key beyond it
comes after every query of the row. So a tile needs the causal mask only.

Backward has three kernels. The one for dk and dv computes the gradients of the scores, which dq and the biases need
too, and writes them to `ds` [H, total, width], indexed by key and by query within the row: in bf16 for bf16 operands,
which is what the tensor cores multiply anyway, else in float32 (fp16 lacks the range). Reading them back costs a few
bytes per score; recomputing them costs two products, a sigmoid and the biases. `triton_launch.KEPT_BYTES` limits how
many heads are written at once.

Bias gradients are sums over pairs. A program reads ds of one row along its diagonals and first sums over the heads that
share a bias. It is a single warp, so that no data is exchanged between warps:

    position    each column of the tile holds one distance
    time        times grow within a row, so a tile spans few buckets: one sum for each (many are slow but correct)

Every program adds to partial sums of its own, which are added up afterwards, so gradients are bitwise reproducible. If
that takes more memory than `triton_launch.PARTIAL_BYTES` (thousands of long rows), programs share partial sums, and the
last bits of the bias gradients depend on the order of the additions.
"""

import triton
import triton.language as tl

from loka.kernels.tile import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _look_up(table, index):
    """Return table [N] at index [A, B], read from shared memory in the layout of the index.

    tl.load would return a layout of its own, which would have to be converted.
    """
    flat = tl.reshape(index, (index.shape[0] * index.shape[1],))
    return tl.reshape(tl.gather(table, flat, 0), index.shape)


@triton.jit
def _bucket(dt, BUCKETS: tl.constexpr):
    """Return the bucket of |dt|, two per octave, from the bits of its float32 value: the same in every backend."""
    bits = dt.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(((bits >> 22) & 511) - 254, 0), BUCKETS - 1)


@triton.jit
def _find_buckets(own, other, BUCKETS: tl.constexpr):
    """Return the bucket of every pair of a tile, given the times of its rows, `own` [A], and columns, `other` [B]."""
    row = tl.broadcast_to(tl.arange(0, own.shape[0])[:, None], (own.shape[0], other.shape[0]))
    column = tl.broadcast_to(tl.arange(0, other.shape[0])[None, :], (own.shape[0], other.shape[0]))
    if BUCKETS == 0:
        return row - column
    return _bucket(_look_up(own, row) - _look_up(other, column), BUCKETS)


@triton.jit
def _add_biases(s, distance, far, bucket, position_ptr, at_position, time_ptr, at_time,
                POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, ENTRIES: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Add the biases to the scores. far: the distance of the tile's first query from its first key."""
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
    """Load the [block, WIDTH] tile of one head at positions `at` of a row, zero beyond the row."""
    column = tl.arange(0, PADDED)
    inside = (at < n)[:, None]
    if WIDTH < PADDED:
        inside = inside & (column < WIDTH)[None, :]
    return tl.load(ptr + (start + at)[:, None] * stride_row + h * stride_head + column[None, :], inside, other=0.0)


@triton.jit
def _load_times(ptr, start, at, n, BUCKETS: tl.constexpr):
    """Load the times at positions `at` of a row; beyond the row its last time, to keep the range of buckets short."""
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
    """Compute 1 / (1 + exp(-s)) to 1e-6 in four instructions.

    tl.sigmoid takes fourteen, to handle denormal numbers, for which the result is 0 or 1 here anyway.
    """
    if _INTERPRETED:
        return tl.sigmoid(s)
    return tl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
        "=f,f", [s], dtype=tl.float32, is_pure=True, pack=1)  # fmt: skip


@triton.jit
def _place(blocks, heads):
    """Return the block, row and head of a program. The grid is one-dimensional: other dimensions end at 65,535."""
    pair = tl.program_id(0) // blocks
    return tl.program_id(0) % blocks, pair // heads, pair % heads


@triton.jit
def _forward(q_ptr, k_ptr, v_ptr, out_ptr, offsets_ptr, asked_ptr, times_ptr, position_ptr, time_ptr,
             blocks, heads, q_row, q_head, k_row, k_head, v_row, v_head, stride_p, stride_t, alpha, divisor,
             D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
             POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, ENTRIES: tl.constexpr, IEEE: tl.constexpr,
             QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    block, b, h = _place(blocks, heads)
    start = tl.load(offsets_ptr + b)
    n = (tl.load(offsets_ptr + b + 1) - start).to(tl.int32)
    first = (blocks - 1 - block) * QUERIES  # the programs with the most keys start first
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
def _backward_kv(q_ptr, k_ptr, v_ptr, grad_ptr, dk_ptr, dv_ptr, ds_ptr, offsets_ptr, asked_ptr, times_ptr, position_ptr, time_ptr,
                 blocks, heads, q_row, q_head, k_row, k_head, v_row, v_head, g_row, g_head, stride_p, stride_t, alpha, divisor,
                 width, stored, total,
                 D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
                 POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, ENTRIES: tl.constexpr, IEEE: tl.constexpr,
                 QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Compute dk and dv, and write ds [heads, total, width] for queries at or after a key's tile.

    stored: the number of heads of the outputs, of which `heads` are computed here.
    """
    block, b, h = _place(blocks, heads)
    start = tl.load(offsets_ptr + b)
    n = (tl.load(offsets_ptr + b + 1) - start).to(tl.int32)
    first = block * KEYS
    if first >= n:
        return
    j = first + tl.arange(0, KEYS)
    k = _load(k_ptr, start, j, n, h, k_row, k_head, D, DP)
    v = _load(v_ptr, start, j, n, h, v_row, v_head, V, VP)
    times = _load_times(times_ptr, start, j, n, BUCKETS)
    rows = ds_ptr + ((h * total + start + j) * width)[:, None]
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
        tl.store(rows + i[None, :], ds.to(ds_ptr.dtype.element_ty), (j < n)[:, None])
    scale = 1.0 / tl.where(divisor > 0, divisor, n.to(tl.float32))
    _store(dk_ptr, dk * (alpha * scale), start, j, n, h, stored, D, DP)
    _store(dv_ptr, dv * scale, start, j, n, h, stored, V, VP)


@triton.jit
def _backward_q(ds_ptr, k_ptr, dq_ptr, offsets_ptr, blocks, heads, k_row, k_head, alpha, divisor, width, stored, total,
                D: tl.constexpr, DP: tl.constexpr, IEEE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Compute dq from the ds that `_backward_kv` wrote."""
    block, b, h = _place(blocks, heads)
    start = tl.load(offsets_ptr + b)
    n = (tl.load(offsets_ptr + b + 1) - start).to(tl.int32)
    first = (blocks - 1 - block) * QUERIES  # the programs with the most keys start first
    if first >= n:
        return
    i = first + tl.arange(0, QUERIES)
    dq = tl.zeros((QUERIES, DP), tl.float32)
    for low in range(0, tl.minimum(first + QUERIES, n), KEYS):
        j = low + tl.arange(0, KEYS)
        k = _load(k_ptr, start, j, n, h, k_row, k_head, D, DP)
        seen = (j[:, None] <= i[None, :]) & (i < n)[None, :]  # the rest of ds was not written
        ds = tl.load(ds_ptr + ((h * total + start + j) * width)[:, None] + i[None, :], seen, other=0.0)
        dq += _dot(tl.trans(ds.to(k.dtype)), k, IEEE)
    scale = 1.0 / tl.where(divisor > 0, divisor, n.to(tl.float32))
    _store(dq_ptr, dq * (alpha * scale), start, i, n, h, stored, D, DP)


@triton.jit
def _whole(x):
    """Return 2^23 + x as an exact float32, for integers 0 <= x < 2^23."""
    return (x | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _exceeds(x, threshold):
    """Return 1.0 where x > threshold, else 0.0, for whole numbers, in one instruction (compare + select is slower)."""
    if _INTERPRETED:
        return tl.where(x > threshold, 1.0, 0.0)
    return tl.inline_asm_elementwise(
        "sub.sat.f32 $0, $1, $2;", "=f,f,f", [x, threshold], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _add_buckets(sum_ptr, ds, scale, bucket, BUCKETS: tl.constexpr):
    """Add the sum of ds over every bucket, scaled, to sum_ptr[bucket].

    The sum over bucket b is the sum over buckets >= b minus the sum over buckets > b. Four buckets share one reduction
    across the tile, because its cost is latency, not additions.
    """
    whole = _whole(bucket)
    lowest, highest = tl.min(tl.min(bucket, 0), 0) // 4 * 4, tl.max(tl.max(bucket, 0), 0)
    at = sum_ptr + lowest + tl.arange(0, 4)
    above = tl.sum(ds, 0)
    # Start at a multiple of four, so that a bucket's additions all come from one thread, in order.
    for b in range(lowest, highest + 1, 4):
        edge = 8388608.0 + b
        t0, t1 = tl.sum(ds * _exceeds(whole, edge), 0), tl.sum(ds * _exceeds(whole, edge + 1.0), 0)
        t2, t3 = tl.sum(ds * _exceeds(whole, edge + 2.0), 0), tl.sum(ds * _exceeds(whole, edge + 3.0), 0)
        even, odd = tl.join(above - t0, t1 - t2), tl.join(t0 - t1, t2 - t3)
        four = tl.sum(tl.reshape(tl.join(even, odd), (ds.shape[1], 4)), 0)
        tl.atomic_add(at, four * scale, b + tl.arange(0, 4) < BUCKETS, sem="relaxed")
        at += 4  # not sum_ptr + b, which would make b, and what is computed from it, 64-bit
        above = t3


@triton.jit
def _backward_biases(ds_ptr, position_ptr, time_ptr, offsets_ptr, asked_ptr, times_ptr, parts, splits, heads, sets, divisor, width, of_head,
                     span, positions, buckets,
                     POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, KEYS: tl.constexpr, APART: tl.constexpr):  # fmt: skip
    """Sum ds over the pairs of one row: APART distances, `span` keys, `heads` heads that share a bias.

    position: partial sums [positions, sets, distances]; time: [buckets, sets, BUCKETS]; both initially zero. The first
    dimension has a slot for every program, or for several. of_head: the stride between heads of ds.
    """
    part, b, z = _place(parts, splits * sets)
    b = b.to(tl.int64)
    split, set_ = z // sets, z % sets
    start = tl.load(offsets_ptr + b)
    n = (tl.load(offsets_ptr + b + 1) - start).to(tl.int32)
    first = split * span
    last = tl.minimum(first + span, n - part * APART)
    if first >= last:
        return
    far = part * APART + tl.arange(0, APART)
    scale = 1.0 / tl.where(divisor > 0, divisor, n.to(tl.float32))
    first_ptr = ds_ptr + (set_ * heads).to(tl.int64) * of_head
    time_ptr += (((b * splits + split) * parts + part) % buckets * sets + set_) * BUCKETS
    summed = tl.zeros((KEYS, APART), tl.float32)
    for low in range(first, last, KEYS):
        j = low + tl.arange(0, KEYS)
        i = j[:, None] + far[None, :]
        at = first_ptr + (start + j)[:, None] * width + i
        ds = tl.zeros((KEYS, APART), tl.float32)
        for _ in range(heads):
            ds += tl.load(at, i < n, other=0.0).to(tl.float32)
            at += of_head
        summed += ds
        if BUCKETS > 0:
            asked = tl.load(asked_ptr + start + tl.minimum(i, n - 1))
            bucket = _bucket(asked - _load_times(times_ptr, start, j, n, BUCKETS)[:, None], BUCKETS)
            _add_buckets(time_ptr, ds, scale, bucket, BUCKETS)
    if POSITIONS > 0:
        at = position_ptr + ((b * splits + split) % positions * sets + set_) * parts * APART + far
        tl.atomic_add(at, tl.sum(summed, 0) * scale, sem="relaxed")
