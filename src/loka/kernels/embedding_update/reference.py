"""The reference for table updates: sum duplicates, take one step in float32, round stochastically to the row's format.

    g_r    sum over the items of row r of weight x gradient of their bag, in item order, float32
    w      the row as float32, after the step
    scale  kept while the largest |w| is between a half (E4M3: an eighth) of the format's range and all of it; else new
    q      floor(w / scale), plus one with a probability equal to the fraction cut off

A scale that followed the largest element at every step would round all other elements again each time, so that elements
without a gradient would drift. A scale that is kept leaves them bitwise unchanged. A new scale is rounded up to what
one byte holds (`loka.kernels.embedding_bag.rows`), which gives an int8 row headroom of up to an eighth, about 5 % on
average; E4M3 scales are powers of two.

The random numbers are those of `loka.formats.philox` for (step, table, row), whatever the number of processes. NaN and
Inf stay visible: as NaN in the codes (E4M3), or as a NaN scale of the row (int8). A row that grows beyond the range of
the scales becomes NaN too.
"""

import torch
from torch import Tensor

from loka.formats import Draw, Spec, encode, round_bf16, uniform_bits
from loka.formats.format import INT8
from loka.formats.quantize import scale_from_amax
from loka.kernels.backend import YES, Verdict, no
from loka.kernels.embedding_bag.rows import NAN_SCALE, Rows, decode_scale, encode_scale
from loka.kernels.embedding_update.call import TRAINABLE, Rule, UpdateCall

LEAST = {"int8": 0.5, "e4m3": 0.125}  # share of the format's largest value below which a scale is renewed


def supports(call: UpdateCall, device: torch.device) -> Verdict:
    """Accept every trainable kind of rows."""
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
    """See `loka.kernels.embedding_update.embedding_update`. Updates rows, scales and state in place."""
    unique, total = sum_gradients(indices, offsets, grad, weights, mode)
    if not len(unique):
        return
    moved = move(rows.take(unique), total, unique, rule, state, draw.step)
    write(rows, unique, moved, draw, first_row=first_row, first_column=first_column)


def sum_gradients(
    indices: Tensor, offsets: Tensor | None, grad: Tensor, weights: Tensor | None, mode: str
) -> tuple[Tensor, Tensor]:
    """Return the distinct rows, ascending, and the summed gradient of each."""
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
    """Return the rows after one step of the rule; update its state in place."""
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
    """Write float32 rows back to the table, rounded stochastically; hot rows are not rounded."""
    if rows.slot is not None and rows.hot is not None:
        place = rows.slot[unique].long()
        kept = place >= 0
        rows.hot[place[kept]] = w[kept]
        unique, w = unique[~kept], w[~kept]
    if rows.data.dtype == torch.float32:
        rows.data[unique] = w
        return
    bits = uniform_bits(unique + first_row, rows.width, draw, first_column=first_column)
    if rows.spec is None or rows.scale_code is None:
        rows.data[unique] = round_bf16(w, bits)
        return
    code = fit_scale(rows.spec, rows.scale_code[unique], w)
    scaled = w * (1.0 / decode_scale(code, rows.spec)).unsqueeze(1)
    noise = bits.to(torch.float32) * 2.0**-23
    rows.data[unique] = encode(scaled, rows.spec.format, rounding="stochastic", noise=noise)
    if rows.spec.format == INT8:
        code = torch.where(w.isfinite().all(1), code, NAN_SCALE)
    rows.scale_code[unique] = code


def fit_scale(spec: Spec, code: Tensor, w: Tensor) -> Tensor:
    """Return the stored scale of each row if it still fits, else a new one."""
    amax = w.abs().nan_to_num(nan=0.0, posinf=0.0).amax(1)
    largest = decode_scale(code, spec) * spec.format.max
    fits = (amax <= largest) & ((amax >= largest * LEAST[spec.format.name]) | (amax == 0))
    return torch.where(fits, code, encode_scale(scale_from_amax(amax, spec), spec))
