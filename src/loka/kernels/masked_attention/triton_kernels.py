"""Tiled masked softmax attention: forward, and a backward that recomputes the weights from the saved log-sum-exp.

A program handles a block of queries (forward, dq) or keys (dk, dv) of one row and one head, and iterates over the other
side from the first position that the mask allows to the last (`ends`), so padding on either side of a row costs
nothing. Between these ends the mask decides key by key.

    lse_i = log2 sum_j 2^(s_ij),   s_ij = scale log2(e) <q_i, k_j>
    delta_i = <out_i, d out_i>,    ds_ij = w_ij (<d out_i, v_j> - delta_i),    w_ij = 2^(s_ij - lse_i)

lse is +inf for a query without a result, so that its weights and everything computed from them are zero. The dq kernel
runs first and writes delta, which the dk and dv kernel reads. There are no atomics: results are bitwise reproducible.
"""

import triton
import triton.language as tl


@triton.jit
def _find_ends(mask_ptr, ends_ptr, length, BLOCK: tl.constexpr):
    """Write the first allowed position of a row, and the one after the last; (length, 0) if there is none."""
    b = tl.program_id(0).to(tl.int64)
    first = tl.zeros((), tl.int32) + length
    last = tl.zeros((), tl.int32)
    for low in range(0, length, BLOCK):
        at = low + tl.arange(0, BLOCK)
        counts = tl.load(mask_ptr + b * length + at, at < length, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(counts, at, length), 0))
        last = tl.maximum(last, tl.max(tl.where(counts, at + 1, 0), 0))
    tl.store(ends_ptr + 2 * b, first)
    tl.store(ends_ptr + 2 * b + 1, last)


@triton.jit
def _place(blocks, heads, BLOCK: tl.constexpr):
    """Return the row, head and first position of a program.

    Programs of one head are consecutive, so that they share the cache. The grid is one-dimensional: other dimensions
    end at 65,535.
    """
    pair = tl.program_id(0) // blocks
    return (pair // heads).to(tl.int64), pair % heads, tl.program_id(0) % blocks * BLOCK


@triton.jit
def _ends(ends_ptr, b, length, GIVEN: tl.constexpr):
    if GIVEN:
        return tl.load(ends_ptr + 2 * b), tl.load(ends_ptr + 2 * b + 1)
    else:
        return tl.zeros((), tl.int32), tl.zeros((), tl.int32) + length


@triton.jit
def _counts(mask_ptr, b, at, length, GIVEN: tl.constexpr):
    """Return which positions the mask allows."""
    if GIVEN:
        return tl.load(mask_ptr + b * length + at, at < length, other=0) != 0
    else:
        return at < length


@triton.jit
def _load(ptr, b, h, at, counts, row, head, step, D: tl.constexpr, DP: tl.constexpr):
    """Load the [block, D] tile at positions `at`, zero where not allowed."""
    column = tl.arange(0, DP)
    inside = counts[:, None]
    if D < DP:
        inside = inside & (column < D)[None, :]
    return tl.load(ptr + b * row + h * head + at[:, None] * step + column[None, :], inside, other=0.0)


@triton.jit
def _store(ptr, value, b, h, heads, at, length, D: tl.constexpr, DP: tl.constexpr):
    """Write a tile of a contiguous [B, length, heads, D] tensor."""
    column = tl.arange(0, DP)
    where = ((b * length + at)[:, None] * heads + h) * D + column[None, :]
    tl.store(ptr + where, value.to(ptr.dtype.element_ty), (at < length)[:, None] & (column < D)[None, :])


@triton.jit
def _dot(a, b, IEEE: tl.constexpr):
    return tl.dot(a, b, input_precision="ieee" if IEEE else "tf32")


@triton.jit
def _forward(q_ptr, k_ptr, v_ptr, mask_ptr, wanted_ptr, seen_ends_ptr, wanted_ends_ptr, out_ptr, lse_ptr, blocks, heads, shared, queries, keys, scale,
             q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step,
             D: tl.constexpr, DP: tl.constexpr, WANTED: tl.constexpr, IEEE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    b, h, first = _place(blocks, heads, QUERIES)
    g = h // (heads // shared)
    at = first + tl.arange(0, QUERIES)
    begin, end = _ends(wanted_ends_ptr, b, queries, WANTED)
    low_key, high_key = _ends(seen_ends_ptr, b, keys, True)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, DP), tl.float32)
    wanted = _counts(wanted_ptr, b, at, queries, WANTED)
    if (first < end) & (first + QUERIES > begin):
        q = _load(q_ptr, b, h, at, wanted, q_row, q_head, q_step, D, DP)
        for low in range(low_key // KEYS * KEYS, high_key, KEYS):
            j = low + tl.arange(0, KEYS)
            seen = _counts(mask_ptr, b, j, keys, True)
            k = _load(k_ptr, b, g, j, seen, k_row, k_head, k_step, D, DP)
            v = _load(v_ptr, b, g, j, seen, v_row, v_head, v_step, D, DP)
            s = tl.where(seen[None, :], _dot(q, tl.trans(k), IEEE) * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # no key yet
            w = tl.exp2(s - base[:, None])
            shrink = tl.exp2(top - base)
            total = total * shrink + tl.sum(w, 1)
            out = out * shrink[:, None] + _dot(w.to(v.dtype), v, IEEE)
            top = higher
    answered = wanted & (total != 0)  # not > 0, so that NaN stays NaN
    some = tl.where(answered, total, 1.0)
    tl.store(
        lse_ptr + (b * heads + h) * queries + at,
        tl.where(answered, top + tl.log2(some), float("inf")),
        at < queries,
    )
    _store(out_ptr, tl.where(answered[:, None], out / some[:, None], 0.0), b, h, heads, at, queries, D, DP)


@triton.jit
def _backward_q(q_ptr, k_ptr, v_ptr, mask_ptr, wanted_ptr, seen_ends_ptr, wanted_ends_ptr, out_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr, blocks, heads, shared, queries, keys, scale, natural,
                q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step, o_row, o_head, o_step, g_row, g_head, g_step,
                D: tl.constexpr, DP: tl.constexpr, WANTED: tl.constexpr, IEEE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Compute dq and delta."""
    b, h, first = _place(blocks, heads, QUERIES)
    g = h // (heads // shared)
    at = first + tl.arange(0, QUERIES)
    begin, end = _ends(wanted_ends_ptr, b, queries, WANTED)
    low_key, high_key = _ends(seen_ends_ptr, b, keys, True)
    dq = tl.zeros((QUERIES, DP), tl.float32)
    delta = tl.zeros((QUERIES,), tl.float32)
    if (first < end) & (first + QUERIES > begin):
        wanted = _counts(wanted_ptr, b, at, queries, WANTED)
        q = _load(q_ptr, b, h, at, wanted, q_row, q_head, q_step, D, DP)
        grad = _load(grad_ptr, b, h, at, wanted, g_row, g_head, g_step, D, DP)
        out = _load(out_ptr, b, h, at, wanted, o_row, o_head, o_step, D, DP)
        delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
        lse = tl.load(lse_ptr + (b * heads + h) * queries + at, wanted, other=float("inf"))
        for low in range(low_key // KEYS * KEYS, high_key, KEYS):
            j = low + tl.arange(0, KEYS)
            seen = _counts(mask_ptr, b, j, keys, True)
            k = _load(k_ptr, b, g, j, seen, k_row, k_head, k_step, D, DP)
            v = _load(v_ptr, b, g, j, seen, v_row, v_head, v_step, D, DP)
            w = tl.where(seen[None, :], tl.exp2(_dot(q, tl.trans(k), IEEE) * scale - lse[:, None]), 0.0)
            ds = w * (_dot(grad, tl.trans(v), IEEE) - delta[:, None])
            dq += _dot(ds.to(k.dtype), k, IEEE)
    tl.store(delta_ptr + (b * heads + h) * queries + at, delta, at < queries)
    _store(dq_ptr, dq * natural, b, h, heads, at, queries, D, DP)


@triton.jit
def _backward_kv(q_ptr, k_ptr, v_ptr, mask_ptr, wanted_ptr, seen_ends_ptr, wanted_ends_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, blocks, heads, shared, queries, keys, scale, natural,
                 q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step, g_row, g_head, g_step,
                 D: tl.constexpr, DP: tl.constexpr, WANTED: tl.constexpr, IEEE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Compute dk and dv, on transposed tiles, so that tensor core results are in the layout of the next operand."""
    b, g, first = _place(blocks, shared, KEYS)
    j = first + tl.arange(0, KEYS)
    begin, end = _ends(wanted_ends_ptr, b, queries, WANTED)
    low_key, high_key = _ends(seen_ends_ptr, b, keys, True)
    dk = tl.zeros((KEYS, DP), tl.float32)
    dv = tl.zeros((KEYS, DP), tl.float32)
    if (first < high_key) & (first + KEYS > low_key):
        seen = _counts(mask_ptr, b, j, keys, True)
        k = _load(k_ptr, b, g, j, seen, k_row, k_head, k_step, D, DP)
        v = _load(v_ptr, b, g, j, seen, v_row, v_head, v_step, D, DP)
        for h in range(g * (heads // shared), (g + 1) * (heads // shared)):
            for low in range(begin // QUERIES * QUERIES, end, QUERIES):
                at = low + tl.arange(0, QUERIES)
                wanted = _counts(wanted_ptr, b, at, queries, WANTED)
                q = _load(q_ptr, b, h, at, wanted, q_row, q_head, q_step, D, DP)
                grad = _load(grad_ptr, b, h, at, wanted, g_row, g_head, g_step, D, DP)
                lse = tl.load(lse_ptr + (b * heads + h) * queries + at, wanted, other=float("inf"))
                delta = tl.load(delta_ptr + (b * heads + h) * queries + at, wanted, other=0.0)
                w = tl.where(seen[:, None], tl.exp2(_dot(k, tl.trans(q), IEEE) * scale - lse[None, :]), 0.0)
                dv += _dot(w.to(grad.dtype), grad, IEEE)
                ds = w * (_dot(v, tl.trans(grad), IEEE) - delta[None, :])
                dk += _dot(ds.to(q.dtype), q, IEEE)
    _store(dk_ptr, dk * natural, b, g, shared, j, keys, D, DP)
    _store(dv_ptr, dv, b, g, shared, j, keys, D, DP)
