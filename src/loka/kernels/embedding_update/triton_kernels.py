"""The fused update of embedding rows, one program for each item of the sorted batch; only the first of a run of equal rows works.

    g       the gradients of the run's items, DUP at a time, in float32
    w       the row, dequantised in registers; moved by the rule
    scale   kept while it fits, as the law has it
    q       rounded stochastically with Philox numbers for (step, table, row), eight columns a call

No host synchronisation: how many different rows there are is never asked. The table is read and written once, in its own bytes.
A mean's factor and weights per sample come as one float32 an item.

A row that occurs very often is one program's work, DUP items a turn: a hot row of a hundred thousand items takes the time of as many reads of one gradient after another.
"""

import triton
import triton.language as tl
from torch import Tensor

from loka.formats import Draw
from loka.formats.philox import ROUNDS
from loka.kernels.embedding_bag.rows import Rows
from loka.kernels.embedding_update.call import Rule
from loka.kernels.tile import inverse

FLOAT, BF16, INT8, E4M3 = 0, 1, 2, 3
KINDS = {"float32": FLOAT, "bfloat16": BF16, "int8:row": INT8, "e4m3:row:pow2": E4M3}
RULES = {"sgd": 0, "rowwise_adagrad": 1, "adam": 2}
_ROUNDS = tl.constexpr(ROUNDS)
_BF16, _INT8, _E4M3 = tl.constexpr(BF16), tl.constexpr(INT8), tl.constexpr(E4M3)
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def random_bits(row, first_group, step, seed, BD: tl.constexpr):
    """24 bits for each of BD columns, int32: the numbers of `loka.formats.philox.uniform_bits`."""
    GROUPS: tl.constexpr = BD // 8
    low = (row & 0xFFFFFFFF).to(tl.uint32)
    high = ((row >> 32) & 0xFFFFFFFF).to(tl.uint32)
    group = (first_group + tl.arange(0, GROUPS)).to(tl.uint32)
    zero = tl.zeros((GROUPS,), tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, group, zero + low, zero + high, zero + step.to(tl.uint32), _ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    halves = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BD,))
    one = tl.zeros((1,), tl.uint32)
    row_word, _, _, _ = tl.philox(
        seed, tl.full((1,), 0xFFFFFFFF, tl.uint32), one + low, one + high, one + step.to(tl.uint32), _ROUNDS
    )
    shared = tl.max(row_word & 0xFF, 0)
    return ((halves << 8) | shared).to(tl.int32)


@triton.jit
def round_up_to_power_of_two(x):
    """Of a positive normal float32."""
    return ((x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def fitted_scale(old, amax, KIND: tl.constexpr):
    """The old scale where it fits, a new one otherwise; see the law."""
    LARGEST: tl.constexpr = 127.0 if KIND == _INT8 else 448.0
    LEAST: tl.constexpr = 0.5 if KIND == _INT8 else 0.125
    ROOM: tl.constexpr = 1.0625 if KIND == _INT8 else 1.0
    largest = old * LARGEST
    fits = (amax <= largest) & ((amax >= largest * LEAST) | (amax == 0))
    new = tl.maximum(tl.div_rn(amax * ROOM, amax * 0.0 + LARGEST), 1.1754943508222875e-38)
    if KIND == _E4M3:
        new = round_up_to_power_of_two(new)
    return tl.where(fits, old, tl.where(amax > 0, new, 1.0))


@triton.jit
def rounded_bf16(w, bits):
    """bf16 patterns, up with the probability of what is cut off."""
    pattern = w.to(tl.int32, bitcast=True)
    kept = pattern & -65536
    up = (bits >> 8) < (pattern & 0xFFFF)
    rounded = tl.where(up, kept + 65536, kept).to(tl.float32, bitcast=True)
    LARGEST: tl.constexpr = 3.3895313892515355e38
    rounded = tl.minimum(tl.maximum(rounded, -LARGEST), LARGEST)
    return tl.where(tl.abs(w) < float("inf"), rounded, w)


@triton.jit
def rounded_steps(steps, bits):
    """Non-negative numbers, rounded stochastically to whole ones."""
    lower = tl.floor(steps)
    return lower + (bits.to(tl.float32) * (1.0 / 16777216.0) < steps - lower).to(tl.float32)


@triton.jit
def rounded_e4m3(y, finite, bits):
    """E4M3 values in float32, saturating; NaN where not finite."""
    magnitude = tl.minimum(tl.abs(tl.where(finite, y, 0.0)), 448.0)
    exponent = tl.maximum((magnitude.to(tl.int32, bitcast=True) >> 23) - 127, -6) - 3
    quantum = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    per_quantum = ((127 - exponent) << 23).to(
        tl.float32, bitcast=True
    )  # exact, which an approximate division need not be
    rounded = tl.minimum(rounded_steps(magnitude * per_quantum, bits) * quantum, 448.0)
    return tl.where(finite, tl.where(y < 0, -rounded, rounded), float("nan"))


@triton.jit
def to_e4m3(y):
    """Values on the grid to bytes; the interpreter turns NaN into a number, so NaN is written by hand."""
    q = y.to(tl.float8e4nv)
    if _INTERPRETED:
        bits = tl.where(y == y, q.to(tl.uint8, bitcast=True), 0x7F)
        q = bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return q


@triton.jit(do_not_specialize=["first_row", "first_group", "step", "seed"])
def _update(data_ptr, scale_ptr, slot_ptr, hot_ptr, sorted_ptr, order_ptr, bag_ptr, factor_ptr, grad_ptr, m_ptr, v_ptr,
            L, N, D, lr, eps, beta1, beta2, c1, c2, first_row, first_group, step, seed,
            KIND: tl.constexpr, RULE: tl.constexpr, HOT: tl.constexpr, BAGS: tl.constexpr, FACTOR: tl.constexpr,
            DUP: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(sorted_ptr + at).to(tl.int64)
    before = tl.load(sorted_ptr + at - 1, at > 0, other=-1).to(tl.int64)
    if (row != before) & (row >= 0) & (row < N):
        column = tl.arange(0, BD)
        inside = column < D
        g = tl.zeros((BD,), tl.float32)
        more = 1
        start = at
        while more > 0:
            place = start + tl.arange(0, DUP)
            there = (place < L) & (tl.load(sorted_ptr + place, place < L, other=-1).to(tl.int64) == row)
            item = tl.load(order_ptr + place, there, other=0).to(tl.int64)
            source = item
            if BAGS:
                source = tl.load(bag_ptr + item, there, other=0).to(tl.int64)
            value = tl.load(
                grad_ptr + source[:, None] * D + column[None, :], there[:, None] & inside[None, :], other=0.0
            ).to(tl.float32)
            if FACTOR:
                value = value * tl.load(factor_ptr + item, there, other=0.0)[:, None]
            g += tl.sum(value, 0)
            more = tl.min(there.to(tl.int32), 0)
            start += DUP
        kept = row < 0
        if HOT:
            slot = tl.load(slot_ptr + row).to(tl.int64)
            kept = slot >= 0
        low = inside & (kept == 0)
        w = tl.load(data_ptr + row * D + column, low, other=0.0).to(tl.float32)
        scale = 1.0
        if KIND >= _INT8:
            scale = tl.load(scale_ptr + row)
            w = w * scale
        if HOT:
            w = tl.where(kept, tl.load(hot_ptr + slot * D + column, inside & kept, other=0.0), w)
        if RULE == 0:
            w = w - lr * g
        elif RULE == 1:
            h = tl.load(m_ptr + row) + tl.sum(g * g, 0) / D
            tl.store(m_ptr + row, h)
            w = w - lr * tl.div_rn(g, g * 0.0 + (tl.sqrt_rn(h) + eps))
        else:
            m = beta1 * tl.load(m_ptr + row * D + column, inside, other=0.0) + (1 - beta1) * g
            v = beta2 * tl.load(v_ptr + row * D + column, inside, other=0.0) + (1 - beta2) * g * g
            tl.store(m_ptr + row * D + column, m, inside)
            tl.store(v_ptr + row * D + column, v, inside)
            w = w - lr * tl.div_rn(m * c1, tl.sqrt_rn(v * c2) + eps)
        if HOT:
            tl.store(hot_ptr + slot * D + column, w, inside & kept)
        if KIND == 0:
            tl.store(data_ptr + row * D + column, w, low)
        else:
            bits = random_bits(row + first_row, first_group, step, seed, BD)
            if KIND == _BF16:
                tl.store(data_ptr + row * D + column, rounded_bf16(w, bits).to(tl.bfloat16), low)
            else:
                finite = tl.abs(w) < float("inf")
                amax = tl.max(tl.where(finite & inside, tl.abs(w), 0.0), 0)
                new = fitted_scale(scale, amax, KIND)
                y = w * inverse(new)
                if KIND == _INT8:
                    size = tl.minimum(rounded_steps(tl.abs(tl.where(finite, y, 0.0)), bits), 127.0)
                    q = tl.where(finite, tl.where(y < 0, -size, size), 0.0).to(tl.int8)
                    new = tl.where(tl.max((inside & (finite == 0)).to(tl.int32), 0) > 0, float("nan"), new)
                    tl.store(data_ptr + row * D + column, q, low)
                else:
                    tl.store(data_ptr + row * D + column, to_e4m3(rounded_e4m3(y, finite, bits)), low)
                tl.store(scale_ptr + row, new, kept == 0)


def update(
    rows: Rows,
    ordered: Tensor,
    order: Tensor,
    bag: Tensor | None,
    factor: Tensor | None,
    grad: Tensor,
    rule: Rule,
    state: tuple[Tensor, ...],
    draw: Draw,
    first_row: int,
    first_column: int,
) -> None:
    """`ordered` = indices[order], ascending."""
    items = ordered.shape[0]
    if items == 0:
        return
    columns = max(16, triton.next_power_of_2(rows.width))
    first, second = (*state, None, None)[:2]
    c1, c2 = rule.corrections(draw.step)
    _update[(items,)](
        rows.data, rows.scale, rows.slot, rows.hot, ordered, order, bag, factor, grad, first, second,
        items, rows.count, rows.width, rule.lr, rule.eps, rule.beta1, rule.beta2, c1, c2,
        first_row, first_column // 8, draw.step, (draw.stream << 32) | draw.seed,
        KINDS[rows.kind], RULES[rule.kind], rows.hot is not None, bag is not None, factor is not None,
        4, columns, num_warps=max(1, min(4, columns // 128)),
    )  # fmt: skip
