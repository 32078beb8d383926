"""Fused update of embedding rows: a program takes G places of the sorted batch and handles those that start a run of
equal rows.

    w       the rows, dequantized in registers; they, their scales and the optimizer state are loaded first, and arrive
            while the gradients are added up
    g       the sum of the gradients of a run, in float32: the first item of all G rows at once, then DUP at a time
    scale   kept while it fits, as in the reference
    q       rounded stochastically with Philox numbers for (step, table, row), eight columns per call

There is no host synchronization: the number of distinct rows is never needed. The table is read and written once, in
its own precision. A mean's factor and per-sample weights are one float32 per item.

All items of a row are handled by one program, but popular rows have many: 6 % of all items are of one row where
popularity follows Zipf's law, and adding up 78,000 gradients one after another took 20 ms on an H200. So a first kernel
adds up every CHUNK items of such a run, all chunks side by side, and the row's program adds up the chunks. Chunks are
counted from the start of the run, not of the batch: the sum does not depend on what else is in the batch, nor on which
rank has the row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.formats import Draw
from loka.formats.philox import GOLDEN, ROUNDS
from loka.kernels.embedding_bag.rows import BIAS, NAN_SCALE, Rows
from loka.kernels.embedding_bag.triton_kernels import decoded_scale
from loka.kernels.embedding_update.call import Rule
from loka.kernels.op import on_device
from loka.kernels.strides import cdiv, next_power_of_2
from loka.kernels.tile import divided, inverse, larger, widened
from loka.kernels.triton_launcher import quick

CHUNK = 256  # items; a run of 78,000 is added up as some 300 chunks and at most 255 single items
FLOAT, BF16, INT8, E4M3 = 0, 1, 2, 3
KINDS = {"float32": FLOAT, "bfloat16": BF16, "int8:row": INT8, "e4m3:row:pow2": E4M3}
RULES = {"sgd": 0, "rowwise_adagrad": 1, "adam": 2}
_ROUNDS, _GOLDEN = tl.constexpr(ROUNDS), tl.constexpr(GOLDEN)
_BF16, _INT8, _E4M3 = tl.constexpr(BF16), tl.constexpr(INT8), tl.constexpr(E4M3)
_BIAS, _NAN_SCALE = tl.constexpr(BIAS), tl.constexpr(NAN_SCALE)
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def random_bits(row, first_group, step, seed, BD: tl.constexpr):
    """Return 23 random bits for each of BD columns of rows [G], int32: those of `loka.formats.philox.uniform_bits`."""
    GROUPS: tl.constexpr = BD // 8
    zero = tl.zeros((row.shape[0], GROUPS), tl.uint32)
    low = zero + (row & 0xFFFFFFFF).to(tl.uint32)[:, None]
    high = zero + ((row >> 32) & 0xFFFFFFFF).to(tl.uint32)[:, None]
    group = zero + (first_group + tl.arange(0, GROUPS)).to(tl.uint32)[None, :]
    w0, w1, w2, w3 = tl.philox(seed, group, low, high, zero, _ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    first = words >> 9
    second = ((words << 7) | (words >> 25)) & 0x7FFFFF
    moved = (step.to(tl.int64) * _GOLDEN & 0x7FFFFF).to(tl.int32)
    return (tl.reshape(tl.join(first, second), (row.shape[0], BD)).to(tl.int32) + moved) & 0x7FFFFF


@triton.jit
def largest_finite(size):
    """Return the maximum of [G, BD] magnitudes over the finite ones; 0 if there are none.

    The GPU's maximum skips NaN, and Inf x 0 makes NaN of Inf: one instruction per element for both.
    """
    if _INTERPRETED:
        return tl.max(tl.where(size < float("inf"), size, 0.0), 1)
    else:
        amax = tl.max(tl.fma(size, tl.zeros_like(size), size), 1)
        return tl.where(amax >= 0, amax, 0.0)


@triton.jit
def fitted_scale(code, old, amax, KIND: tl.constexpr):
    """Return the stored scale, whose value is `old`, if it fits, else a new one, int32. See `reference.fit_scale`."""
    LARGEST: tl.constexpr = 127.0 if KIND == _INT8 else 448.0
    LEAST: tl.constexpr = 0.5 if KIND == _INT8 else 0.125
    OFFSET: tl.constexpr = (127 - _BIAS) * 8
    largest = old * LARGEST
    fits = (amax <= largest) & ((amax >= largest * LEAST) | (amax == 0))
    new = tl.maximum(divided(amax, LARGEST), 1.1754943508222875e-38)
    new = tl.where(amax > 0, new, 1.0).to(tl.int32, bitcast=True)
    if KIND == _E4M3:  # up to a power of two
        new = (new + 0x7FFFFF) >> 23 << 3
    else:  # up to three mantissa bits
        new = (new + 0xFFFFF) >> 20
    new = tl.minimum(tl.maximum(new - OFFSET, 0), _NAN_SCALE)
    return tl.where(fits, code.to(tl.int32), new)


@triton.jit
def rounded_bf16(w, bits):
    """Round stochastically to bf16 values, held in float32: up with a probability equal to the fraction cut off."""
    pattern = w.to(tl.int32, bitcast=True)
    kept = pattern & -65536
    up = (bits >> 7) < (pattern & 0xFFFF)
    rounded = tl.where(up, kept + 65536, kept).to(tl.float32, bitcast=True)
    LARGEST: tl.constexpr = 3.3895313892515355e38
    rounded = tl.minimum(tl.maximum(rounded, -LARGEST), LARGEST)
    return tl.where(tl.abs(w) < float("inf"), rounded, w)


@triton.jit
def rounded_steps(x, one, STEP: tl.constexpr):
    """Round 0 <= x <= 448 to steps of 1 (int8) or 2^-9 (E4M3), up if the noise is less than the fraction cut off.

    `one` is 1 + noise. Returns the result plus 1.5 x 2^23 steps, so that its low mantissa bits count them.

        floor(x) + (noise < x - floor(x)) = ceil(x - noise)        in steps

    Two additions that round towards plus infinity: the first may be inexact, but never passes a whole number of steps;
    of the second sum no smaller bits than steps are left.
    """
    ABOVE: tl.constexpr = 12582912.0 * STEP
    if _INTERPRETED:
        steps = x / STEP
        lower = tl.floor(steps)
        return (lower + (one - 1.0 < steps - lower).to(tl.float32)) * STEP + ABOVE
    else:
        # -1.0 and 12582913.0, or -2^-9 and 24576 + 2^-9
        ADD: tl.constexpr = (
            "{ .reg .f32 t; fma.rp.f32 t, $2, 0fBF800000, $1; add.rp.f32 $0, t, 0f4B400001; }"
            if STEP == 1.0
            else "{ .reg .f32 t; fma.rp.f32 t, $2, 0fBB000000, $1; add.rp.f32 $0, t, 0f46C00001; }"
        )
        return tl.inline_asm_elementwise(ADD, "=f,f,f", [x, one], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def above_one(bits):
    """Return 1 + bits x 2^-23 as float32 without a conversion: they are its mantissa."""
    return (bits | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def rounded_int8(y, bits):
    """Round stochastically to int8 codes, saturating at 127.

    NaN and Inf give an arbitrary code; the row's scale is NaN then.
    """
    size = rounded_steps(tl.minimum(tl.abs(y), 127.0), above_one(bits), 1.0).to(tl.int32, bitcast=True) & 0xFF
    return tl.where(y < 0, -size, size).to(tl.int8)


@triton.jit
def rounded_e4m3(w, inv, bits):
    """Round w x inv stochastically to E4M3 values, held in float32, saturating; NaN where w is NaN or Inf.

    A normal number is rounded up if its 20 dropped bits exceed 20 random bits. Below 2^-6 the grid has steps of 2^-9.
    """
    y = w * inv
    magnitude = tl.minimum(tl.abs(y), 448.0)
    pattern = magnitude.to(tl.int32, bitcast=True) + (0xFFFFF - (bits >> 3))
    normal = (pattern & -1048576).to(tl.float32, bitcast=True)
    small = rounded_steps(magnitude, above_one(bits), 0.001953125) - 24576.0
    rounded = tl.where(magnitude < 0.015625, small, normal)
    rounded = tl.fma(w, tl.zeros_like(w), rounded)  # Inf x 0 is NaN
    sign = y.to(tl.int32, bitcast=True) & -2147483648
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(y):
    """Convert values on the E4M3 grid to bytes. The interpreter's cast loses NaN, so that is set explicitly."""
    q = y.to(tl.float8e4nv)
    if _INTERPRETED:
        bits = tl.where(y == y, q.to(tl.uint8, bitcast=True), 0x7F)
        q = bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return q


@triton.jit
def _gradients(source_ptr, factor_ptr, grad_ptr, place, there, inside, D: tl.constexpr, FACTOR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Return the gradient of one item of each row, float32 [G, BD]; zero where not `there`."""
    source = tl.load(source_ptr + place, there, other=0).to(tl.int64)
    at = grad_ptr + source[:, None] * D + tl.arange(0, BD)[None, :]
    value = tl.load(at, there[:, None] & inside, other=0.0).to(tl.float32)
    if FACTOR:
        value = value * tl.load(factor_ptr + place, there, other=0.0)[:, None]
    return value


@triton.jit
def _row_at(sorted_ptr, place, L):
    """Return the row of the item at a place of the sorted batch; -1 outside."""
    return tl.load(sorted_ptr + place, (place >= 0) & (place < L), other=-1).to(tl.int64)


@triton.jit
def _start_of(sorted_ptr, row, below):
    """Return the first place of a row that is at `below`, by bisection."""
    low, high = below * 0, below
    while low < high:
        middle = (low + high) // 2
        if tl.load(sorted_ptr + middle).to(tl.int64) < row:
            low = middle + 1
        else:
            high = middle
    return low


@quick
@triton.jit(do_not_specialize=["L"])
def _sum_chunks(sorted_ptr, source_ptr, factor_ptr, grad_ptr, chunk_ptr, L,
                D: tl.constexpr, FACTOR: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Store the sum of the chunk that starts in window c of the sorted batch, if there is one.

    A window has CHUNK places. A whole chunk that starts in it also holds its last place, so there is at most one. Half
    of a chunk lies on one side of that place: without such a neighbor there is none, and the program is done.
    """
    window = tl.program_id(0).to(tl.int64)
    begin = window * CHUNK
    last = begin + CHUNK - 1
    row = _row_at(sorted_ptr, last, L)
    near = (_row_at(sorted_ptr, last - CHUNK // 2, L) == row) | (_row_at(sorted_ptr, last + CHUNK // 2, L) == row)
    if (row >= 0) & near:
        start = _start_of(sorted_ptr, row, last)
        start += tl.cdiv(tl.maximum(begin - start, 0), CHUNK) * CHUNK
        if _row_at(sorted_ptr, start + CHUNK - 1, L) == row:
            column = tl.arange(0, BD)
            inside = (column < D)[None, :]
            total = tl.zeros((R, BD), tl.float32)
            for k in range(0, CHUNK, R):
                place = start + k + tl.arange(0, R)
                total += _gradients(source_ptr, factor_ptr, grad_ptr, place, place < L, inside, D, FACTOR, BD)
            tl.store(chunk_ptr + window * D + column, tl.sum(total, 0), column < D)


@quick
@triton.jit(do_not_specialize=["L", "N", "first_row", "first_group", "step", "seed"])
def _update(data_ptr, scale_ptr, slot_ptr, hot_ptr, sorted_ptr, source_ptr, factor_ptr, grad_ptr, chunk_ptr, m_ptr, v_ptr,
            L, N, lr, eps, beta1, beta2, c1, c2, first_row, first_group, step, seed,
            D: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr,
            HOT: tl.constexpr, FACTOR: tl.constexpr, CHUNK: tl.constexpr, DUP: tl.constexpr, G: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)
    row = tl.load(sorted_ptr + place, place < L, other=-1).to(tl.int64)
    before = tl.load(sorted_ptr + place - 1, (place > 0) & (place < L), other=-1).to(tl.int64)
    first = (row != before) & (row >= 0) & (row < N)
    column = tl.arange(0, BD)[None, :]
    inside = column < D
    at = row[:, None] * STRIDE + column
    low, all_of_it = first, first[:, None] & inside
    if HOT:
        slot = tl.load(slot_ptr + row, first, other=-1).to(tl.int64)
        low = first & (slot < 0)
        kept_at = slot[:, None] * D + column
        kept = (first & (slot >= 0))[:, None] & inside
    w = tl.load(data_ptr + at, low[:, None] & inside, other=0.0)
    if KIND >= _INT8:
        code = tl.load(scale_ptr + row * STEP, low, other=0)
    if RULE == 1:
        h = tl.load(m_ptr + row, first, other=0.0)

    g = _gradients(source_ptr, factor_ptr, grad_ptr, place, first, inside, D, FACTOR, BD)
    if CHUNK:
        whole = first & (_row_at(sorted_ptr, place + CHUNK - 1, L) == row)
        # The chunk has the first item too. That was loaded all the same: it need not wait for the row CHUNK places on.
        g = tl.where(whole[:, None], 0.0, g)
        place += tl.where(whole, 0, 1)
        while tl.max(whole.to(tl.int32), 0) > 0:
            chunk = chunk_ptr + (place // CHUNK)[:, None] * D + column
            g += tl.load(chunk, whole[:, None] & inside, other=0.0)
            place += tl.where(whole, CHUNK, 0)
            whole = whole & (_row_at(sorted_ptr, place + CHUNK - 1, L) == row)
    else:
        place += 1
    there = first & (_row_at(sorted_ptr, place, L) == row)
    while tl.max(there.to(tl.int32), 0) > 0:
        for _ in tl.static_range(DUP):
            g += _gradients(source_ptr, factor_ptr, grad_ptr, place, there, inside, D, FACTOR, BD)
            place += 1
            there = there & (_row_at(sorted_ptr, place, L) == row)

    w = widened(w)
    if KIND >= _INT8:
        scale = decoded_scale(code, False)
        w = w * scale[:, None]
    if HOT:
        w = tl.where(kept, tl.load(hot_ptr + kept_at, kept, other=0.0), w)
    if RULE == 0:
        w = w - lr * g
    elif RULE == 1:
        h += tl.sum(g * g, 1) / D
        tl.store(m_ptr + row, h, first)
        w = w - g * (lr / (tl.sqrt(h) + eps))[:, None]
    else:
        moment_at = row[:, None] * D + column
        m = beta1 * tl.load(m_ptr + moment_at, all_of_it, other=0.0) + (1 - beta1) * g
        v = beta2 * tl.load(v_ptr + moment_at, all_of_it, other=0.0) + (1 - beta2) * g * g
        tl.store(m_ptr + moment_at, m, all_of_it)
        tl.store(v_ptr + moment_at, v, all_of_it)
        w = w - lr * tl.div_rn(m * c1, tl.sqrt_rn(v * c2) + eps)
    if HOT:
        tl.store(hot_ptr + kept_at, w, kept)
    written = low[:, None] & inside
    if KIND == 0:
        tl.store(data_ptr + at, w, written)
    else:
        bits = random_bits(row + first_row, first_group, step, seed, BD)
        if KIND == _BF16:
            tl.store(data_ptr + at, rounded_bf16(w, bits).to(tl.bfloat16), written)
        else:
            size = tl.abs(tl.where(inside, w, 0.0))
            if KIND == _INT8:  # int8 has no NaN: the scale of a row with NaN or Inf becomes NaN
                amax = tl.reduce(size, 1, larger)
                new = tl.where(amax < float("inf"), fitted_scale(code, scale, amax, KIND), _NAN_SCALE)
                inv = inverse(decoded_scale(new, False))[:, None]
                tl.store(data_ptr + at, rounded_int8(w * inv, bits), written)
            else:
                amax = largest_finite(size)
                new = fitted_scale(code, scale, amax, KIND)
                # a power of two: the reciprocal has the opposite exponent
                inv = (0x7F000000 - decoded_scale(new, False).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
                tl.store(data_ptr + at, to_e4m3(rounded_e4m3(w, inv[:, None], bits)), written)
            tl.store(scale_ptr + row * STEP, new.to(tl.uint8), low)


def tile_of(width: int) -> tuple[int, int, int]:
    """Choose rows and columns of a tile, and warps: 16 elements per thread, one 16-byte vector of an 8-bit row."""
    columns = max(16, next_power_of_2(width))
    warps = min(8, max(1, columns // 512))
    return max(1, 512 // columns), columns, warps


@on_device
def update(
    rows: Rows,
    ordered: Tensor,
    source: Tensor,
    factor: Tensor | None,
    grad: Tensor,
    rule: Rule,
    state: tuple[Tensor, ...],
    draw: Draw,
    first_row: int,
    first_column: int,
) -> None:
    """Update the table. Per item, sorted by row: `ordered` is its row, `source` its row of `grad`, times `factor`."""
    items = ordered.shape[0]
    if items == 0:
        return
    g, columns, warps = tile_of(rows.width)
    first, second = (*state, None, None)[:2]
    c1, c2 = rule.corrections(draw.step)
    chunk = CHUNK if items >= CHUNK else 0  # not later: a run is added up in the same order in every batch
    sums = torch.empty(cdiv(items, CHUNK), rows.width, dtype=torch.float32, device=grad.device) if chunk else None
    if chunk:
        together = min(chunk, max(1, 2048 // columns))
        _sum_chunks[(cdiv(items, chunk),)](ordered, source, factor, grad, sums, items, rows.width, factor is not None, chunk, together, columns, num_warps=4)  # fmt: skip
    _update[(cdiv(items, g),)](
        rows.data, rows.scale_code, rows.slot, rows.hot, ordered, source, factor, grad, sums, first, second,
        items, rows.count, rule.lr, rule.eps, rule.beta1, rule.beta2, c1, c2,
        first_row, first_column // 8, draw.step, (draw.stream << 32) | draw.seed,
        rows.width, rows.data.stride(0), 1 if rows.scale_code is None else rows.scale_code.stride(0), KINDS[rows.kind], RULES[rule.kind], rows.hot is not None, factor is not None,
        chunk, 2, g, columns, num_warps=warps,
    )  # fmt: skip
