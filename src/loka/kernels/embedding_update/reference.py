"""The law of table updates: duplicates summed first, one step of the rule in float32, stochastic rounding back into the row's format.

    g_r    sum over the items of row r of weight x gradient of their bag, in the order of the items, float32
    w      the row as float32, moved by the rule
    scale  kept while it fits: the largest |w| between a half (E4M3: an eighth) of what the format holds and all of it; otherwise made anew
    q      floor(w / scale), plus one with a probability equal to what was cut off

A scale that followed the largest element of every step would round all other elements again each time, and what did not move would wander. One that is kept leaves elements without
a gradient where they are, to the bit. A new int8 scale has a sixteenth of room to grow, so that it is not renewed in the next step; E4M3 scales are powers of two.

The random numbers are those of `loka.formats.philox` for (step, table, row): the same on one process and on many.
A row that holds NaN or Inf shows it: in the codes (E4M3), or as a NaN scale (int8).
"""

import torch
from torch import Tensor

from loka.formats import E4M3, Draw, encode, round_bf16, uniform_bits
from loka.formats.format import INT8
from loka.formats.quantize import SMALLEST_SCALE, scale_from_amax
from loka.kernels.backend import YES, Verdict, no
from loka.kernels.embedding_bag.rows import Rows
from loka.kernels.embedding_update.call import TRAINABLE, Rule, UpdateCall

ROOM = 1 + 1 / 16  # of a new int8 scale
LEAST = {"int8": 0.5, "e4m3": 0.125}  # of the format's largest value: below it a scale is renewed


def supports(call: UpdateCall, device: torch.device) -> Verdict:
    """Every trainable kind of rows."""
    return YES if call.kind in TRAINABLE else no(f"trains {', '.join(TRAINABLE)}, not {call.kind}")


def run(
    rows: Rows,
    indices: Tensor,
    offsets: Tensor | None,
    grad: Tensor,
    rule: Rule,
    state: tuple[Tensor, ...],
    draw: Draw,
    *,
    weights: Tensor | None = None,
    mode: str = "sum",
    first_row: int = 0,
    first_column: int = 0,
) -> None:
    """In place: rows, scales and state."""
    unique, total = sum_gradients(indices, offsets, grad, weights, mode)
    if not len(unique):
        return
    moved = move(rows.take(unique), total, unique, rule, state, draw.step)
    write(rows, unique, moved, draw, first_row=first_row, first_column=first_column)


def sum_gradients(
    indices: Tensor, offsets: Tensor | None, grad: Tensor, weights: Tensor | None, mode: str
) -> tuple[Tensor, Tensor]:
    """The different rows, ascending, and the summed gradient of each."""
    values = grad.detach().float()
    if offsets is not None:
        lengths = offsets.diff()
        bag = torch.repeat_interleave(torch.arange(len(lengths), device=indices.device), lengths)
        if mode == "mean":
            values = values / lengths.clamp(min=1).unsqueeze(1)
        values = values[bag]
    if weights is not None:
        values = values * weights.float().unsqueeze(1)
    unique, place = torch.unique(indices.long(), return_inverse=True)
    total = values.new_zeros(len(unique), values.shape[1]).index_add_(0, place, values)
    return unique, total


def move(w: Tensor, g: Tensor, unique: Tensor, rule: Rule, state: tuple[Tensor, ...], step: int) -> Tensor:
    """The rows after one step of the rule; writes its state."""
    if rule.kind == "sgd":
        return w - rule.lr * g
    if rule.kind == "rowwise_adagrad":
        (history,) = state
        h = history[unique] + g.square().mean(1)
        history[unique] = h
        return w - rule.lr * (g / (h.sqrt() + rule.eps).unsqueeze(1))
    first, second = state
    m = rule.beta1 * first[unique] + (1 - rule.beta1) * g
    v = rule.beta2 * second[unique] + (1 - rule.beta2) * g.square()
    first[unique], second[unique] = m, v
    c1, c2 = rule.corrections(step)
    return w - rule.lr * (m * c1 / ((v * c2).sqrt() + rule.eps))


def write(rows: Rows, unique: Tensor, w: Tensor, draw: Draw, *, first_row: int = 0, first_column: int = 0) -> None:
    """Float rows back into the table, rounded stochastically; rows that are kept high as they are."""
    if rows.slot is not None and rows.hot is not None:
        place = rows.slot[unique].long()
        kept = place >= 0
        rows.hot[place[kept]] = w[kept]
        unique, w = unique[~kept], w[~kept]
    if rows.data.dtype == torch.float32:
        rows.data[unique] = w
        return
    bits = uniform_bits(unique + first_row, rows.width, draw, first_column=first_column)
    if rows.spec is None or rows.scale is None:
        rows.data[unique] = round_bf16(w, bits)
        return
    scale = fit_scale(rows, rows.scale[unique], w)
    scaled = w * (1.0 / scale.clamp(min=SMALLEST_SCALE)).unsqueeze(1)
    noise = bits.to(torch.float32) * 2.0**-23
    rows.data[unique] = encode(scaled, rows.spec.format, rounding="stochastic", noise=noise)
    if rows.spec.format == INT8:
        scale = torch.where(w.isfinite().all(1), scale, torch.nan)
    rows.scale[unique] = scale


def fit_scale(rows: Rows, old: Tensor, w: Tensor) -> Tensor:
    """The old scale of each row where it still fits, a new one otherwise."""
    assert rows.spec is not None
    kind = rows.spec.format
    amax = w.abs().nan_to_num(nan=0.0, posinf=0.0).amax(1)
    largest = old * kind.max
    fits = (amax <= largest) & ((amax >= largest * LEAST[kind.name]) | (amax == 0))
    return torch.where(fits, old, scale_from_amax(amax if kind == E4M3 else amax * ROOM, rows.spec))
