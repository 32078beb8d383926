"""Exact selection with one read of the scores, whatever their distribution.

The k largest elements are in the k chunks with the largest maxima: if an element is among the k best, so is the best
element of its chunk, which is at least as good; hence its chunk is among the k best chunks. This holds for any total
order. Here the order is (value descending, index ascending) and chunks are runs of C adjacent elements, so comparing
chunks by (maximum, position) is that order, ties included. The kernels:

    maxima    one pass over the scores writes the maximum of every C adjacent scores [n / C], and of every C of those
              maxima [n / C^2]
    select    one program per row takes the k best of the top level (at most 16384 keys), then the k best of their k C
              children, level by level; ids in ascending order
    rank      for sorted output: the position of each of the k is the number of better ones

After the first pass only k C scores per row are read. There are no atomics and no fallback.

Keys are float32 mapped to int32 in the same order: NaN at the top, -0 as 0, -inf ("absent") at the bottom. The k-th
largest key of a block in registers is found bit by bit, from the highest bit in which any two differ, until exactly k
keys are left above. Scores differ in few bits: this takes 14 or so steps.

For beams, score = beam_score + (logit - lse) rises with the logit, so chunk maxima are taken of logits, in the same
pass that sums their exponentials. Neither scores nor log-probabilities are ever written to memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.strides import cdiv, next_power_of_2
from loka.kernels.tile import larger
from loka.kernels.triton_launcher import quick

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
_INTERPRETED = tl.constexpr(INTERPRETED)
# most candidates per program; the interpreter's tests are small and must still cover every level
SELECTED = 512 if INTERPRETED else 16384
LARGEST_K = SELECTED // 2
WIDEST = 16384  # most codes per beam for which the log-sum-exp is computed in the pass over maxima
KEYS, SCORES, BEAMS = 0, 1, 2
_KEYS = tl.constexpr(0)
_BEAMS = tl.constexpr(2)
_ABSENT = tl.constexpr(-2147483648)


@triton.jit
def _ordered(x):
    """Map float32 to int32 in the same order; NaN is the largest, -inf the smallest."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(x != x, 0x7FFFFFFF, key)
    return tl.where(x == float("-inf"), _ABSENT, key)


@triton.jit
def _value(key):
    """Return the float32 of a key."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return tl.where(key == _ABSENT, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _largest_key(x):
    """Return the key of the largest value in each row of a float32 tile.

    A NaN-propagating maximum takes one instruction per element, so keys are made only of the results.
    """
    if _INTERPRETED:
        return tl.max(_ordered(x), 1)
    else:
        return _ordered(tl.reduce(x, 1, larger))


@quick
@triton.jit
def _maxima(x_ptr, mask_ptr, score_ptr, lse_ptr, first_ptr, second_ptr, W, W1, W2, stride, mask_stride,
            C: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr, LSE: tl.constexpr,
            TWO: tl.constexpr):  # fmt: skip
    """Write the keys of the maxima of every C of BLOCK elements of a row, and of every C of those maxima."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    HIGH: tl.constexpr = BLOCK // C
    place = block * BLOCK + tl.arange(0, HIGH)[:, None] * C + tl.arange(0, C)[None, :]
    there = place < W
    if KIND == _KEYS:
        chunk = tl.max(tl.load(x_ptr + row * stride + place, there, other=_ABSENT), 1)
    else:
        x = tl.load(x_ptr + row * stride + place, there, other=float("-inf")).to(tl.float32)
        if KIND == _BEAMS:
            if LSE:
                top = tl.max(x)
                lse = top + tl.log(tl.sum(tl.exp2((x - top) * 1.4426950408889634)))
                tl.store(lse_ptr + row, lse)
            else:
                lse = tl.load(lse_ptr + row)
            if MASKED:
                x = tl.where(tl.load(mask_ptr + row * mask_stride + place, there, other=0) != 0, x, float("-inf"))
            if _INTERPRETED:
                best = tl.max(x, 1)
            else:
                best = tl.reduce(x, 1, larger)
            chunk = _ordered(tl.load(score_ptr + row) + (best - lse))
        else:
            chunk = _largest_key(x)
    at = block * HIGH + tl.arange(0, HIGH)
    tl.store(first_ptr + row * W1 + at, chunk, at < W1)
    if TWO:
        if HIGH <= C:
            tl.store(second_ptr + row * W2 + block, tl.max(chunk, 0))
        else:
            pairs = tl.max(tl.reshape(chunk, (HIGH // C, C)), 1)
            up = block * (HIGH // C) + tl.arange(0, HIGH // C)
            tl.store(second_ptr + row * W2 + up, pairs, up < W2)


@quick
@triton.jit
def _log_sum_exp(x_ptr, lse_ptr, W, stride, BLOCK: tl.constexpr):
    """Compute the log-sum-exp of one row."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, W, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + place, place < W, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # for lanes with no finite value yet
        total = total * tl.exp2((top - safe) * 1.4426950408889634) + tl.exp2((x - safe) * 1.4426950408889634)
        top = higher
    peak = tl.max(top)
    total = tl.sum(total * tl.exp2((top - peak) * 1.4426950408889634))
    tl.store(lse_ptr + row, peak + tl.log(total))


@triton.jit
def _count(where):
    return tl.sum(tl.reshape(where.to(tl.int32), (where.shape[0] * where.shape[1],), can_reorder=True), 0)


@triton.jit
def _threshold(key, k):
    """Return a key T and whether at most k keys are >= T; otherwise T is the k-th largest. Absent keys do not count."""
    present = key > _ABSENT
    count = _count(present)
    high = tl.max(tl.max(key, 1), 0)
    low = tl.min(tl.min(tl.where(present, key, 0x7FFFFFFF), 1), 0)
    differ = high ^ low
    shift = tl.full((), 31, tl.int32)
    while (shift >= 0) & (((differ >> tl.maximum(shift, 0)) & 1) == 0):
        shift -= 1
    kept = tl.maximum(shift, 0)
    prefix = (low >> kept) & ~1
    threshold = tl.where(shift == 31, _ABSENT, tl.where(shift < 0, low, prefix << kept))
    enough = count > k  # otherwise all present keys are taken
    threshold = tl.where(enough, threshold, low)
    shift = tl.where(enough, shift, -1)
    while (shift >= 0) & (count != k):
        candidate = threshold ^ (tl.full((), 1, tl.int32) << shift)
        above = _count(key >= candidate)
        threshold = tl.where(above >= k, candidate, threshold)
        count = tl.where(above >= k, above, count)
        shift -= 1
    return threshold, count <= k


@quick
@triton.jit
def _select(x_ptr, mask_ptr, score_ptr, lse_ptr, parent_ptr, id_ptr, key_ptr, k, rows, W, PW, stride, mask_stride,
            HIGH: tl.constexpr, C: tl.constexpr, FIRST: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
            KP: tl.constexpr):  # fmt: skip
    """Select the k best of a request's candidates, a tile [HIGH, C].

    The candidates are all `rows` x W elements of the top level, or the C children of each of k parents. Ids are written
    in ascending order, -1 for empty slots.
    """
    r = tl.program_id(0).to(tl.int64)
    child = tl.arange(0, C)[None, :]
    if FIRST:
        index = tl.arange(0, HIGH)[:, None] * C + child
        beam, place = index // W, index % W
        there = beam < rows
    else:
        slot = tl.arange(0, HIGH)
        parent = tl.load(parent_ptr + r * k + slot, slot < k, other=-1)
        known = tl.maximum(parent, 0)
        beam = (known // PW)[:, None]
        place = (known % PW * C)[:, None] + child
        there = (parent >= 0)[:, None] & (place < W)
    row = r * rows + beam
    if KIND == _KEYS:
        key = tl.load(x_ptr + row * stride + place, there, other=_ABSENT)
    else:
        x = tl.load(x_ptr + row * stride + place, there, other=float("-inf")).to(tl.float32)
        if KIND == _BEAMS:
            real = beam < rows
            x = tl.load(score_ptr + row, real, other=0.0) + (x - tl.load(lse_ptr + row, real, other=0.0))
            if MASKED:
                x = tl.where(tl.load(mask_ptr + row * mask_stride + place, there, other=0) != 0, x, float("-inf"))
        key = tl.where(there, _ordered(x), _ABSENT)
    threshold, clean = _threshold(key, k)
    above = ((key > threshold) | ((key == threshold) & clean)) & (key > _ABSENT)
    equal = (key == threshold) & (key > _ABSENT) & ~above
    packed = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    in_row = tl.sum(packed, 1)
    before = tl.cumsum(packed, 1) - packed + (tl.cumsum(in_row, 0) - in_row)[:, None]
    total = tl.sum(in_row, 0)
    wanted = k - (total & 0xFFFF)  # of those equal to the threshold, the first ones
    chosen = above | (equal & ((before >> 16) < wanted))
    target = (before & 0xFFFF) + tl.minimum(before >> 16, wanted)
    tl.store(id_ptr + r * k + target, beam * W + place, chosen)
    tl.store(key_ptr + r * k + target, key, chosen)
    found = (total & 0xFFFF) + tl.minimum(total >> 16, wanted)
    slot_out = tl.arange(0, KP)
    rest = (slot_out >= found) & (slot_out < k)
    tl.store(id_ptr + r * k + slot_out, tl.full((KP,), -1, tl.int32), rest)
    tl.store(key_ptr + r * k + slot_out, tl.full((KP,), _ABSENT, tl.int32), rest)


@quick
@triton.jit
def _rank(id_ptr, key_ptr, value_ptr, beam_ptr, index_ptr, k, W, SORTED: tl.constexpr, BEAM: tl.constexpr,
          BI: tl.constexpr, BJ: tl.constexpr):  # fmt: skip
    """Write BI of the k chosen to their places."""
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    mine = tl.load(key_ptr + r * k + i, i < k, other=_ABSENT)
    chosen = tl.maximum(tl.load(id_ptr + r * k + i, i < k, other=0), 0)
    place = i
    if SORTED:
        place = tl.zeros((BI,), tl.int32)
        for start in range(0, k, BJ):
            j = start + tl.arange(0, BJ)
            other = tl.load(key_ptr + r * k + j, j < k, other=_ABSENT)
            better = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & (j[None, :] < i[:, None]))
            place += tl.sum((better & (j < k)[None, :]).to(tl.int32), 1)
    value = _value(mine)
    tl.store(value_ptr + r * k + place, value.to(value_ptr.dtype.element_ty), i < k)
    if BEAM:
        tl.store(beam_ptr + r * k + place, (chosen // W).to(tl.int64), i < k)
        tl.store(index_ptr + r * k + place, (chosen % W).to(tl.int64), i < k)
    else:
        tl.store(index_ptr + r * k + place, chosen.to(tl.int64), i < k)


def chunk_size(k: int) -> int:
    """Return C, the largest chunk of up to 128 elements such that k chunks fit into one program."""
    return min(8 if INTERPRETED else 128, SELECTED // next_power_of_2(k))


LAUNCH = {"select_warps": 16, "maxima_block": 8192, "maxima_warps": 8}  # tuned by benchmarks/generative_kernels.py


def _warps(elements: int) -> int:
    return max(1, min(LAUNCH["select_warps"], elements // 512))


class _Rows:
    """The input of a level: keys, scores, or logits with their mask, beam scores and log-sum-exp."""

    def __init__(self, x, mask, scores, lse, kind):
        self.x, self.mask, self.scores, self.lse, self.kind = x, mask, scores, lse, kind
        self.width, self.stride = x.shape[-1], x.stride(-2)

    def operands(self):
        mask = None if self.mask is None else self.mask.view(torch.int8)
        return self.x, mask, self.scores, self.lse

    def mask_stride(self):
        return 0 if self.mask is None else self.mask.stride(-2)


def _levels(data: _Rows, requests: int, rows: int, c: int, known_lse: bool) -> list[tuple[Tensor, int, int]]:
    """Return (keys, rows, width) per level of maxima, lowest first; the last has up to SELECTED keys per request."""
    levels: list[tuple[Tensor, int, int]] = []
    width, source = data.width, data
    while rows * width > SELECTED:
        if width == 1 and levels:  # one maximum per beam is left: view those of a request as one row
            rows, width = 1, rows
            levels[-1] = (levels[-1][0], rows, width)
            source = _Rows(source.x.view(requests, 1, width), None, None, None, KEYS)
        first, second = cdiv(width, c), cdiv(cdiv(width, c), c)
        two = first > 1 and rows * first > SELECTED
        whole = source.kind == BEAMS and not known_lse
        block = max(next_power_of_2(width), c) if whole else max(min(LAUNCH["maxima_block"], next_power_of_2(width)), c)
        block = max(block, min(c * c, next_power_of_2(cdiv(width, c)) * c)) if two else block
        count = requests * rows
        kept = torch.empty(count, first, dtype=torch.int32, device=data.x.device)
        above = torch.empty(count if two else 0, second, dtype=torch.int32, device=data.x.device)
        _maxima[(count, cdiv(width, block))](
            *source.operands(), kept, above, width, first, second, source.stride, source.mask_stride(),
            c, block, source.kind, source.mask is not None, whole, two, num_warps=max(1, min(LAUNCH["maxima_warps"], block // 1024)),
        )  # fmt: skip
        for keys, wide in ((kept, first), (above, second))[: 1 + two]:
            levels.append((keys, rows, wide))
            source, width = _Rows(keys, None, None, None, KEYS), wide
    return levels


def _select_all(
    data: _Rows, requests: int, rows: int, k: int, known_lse: bool, beam: bool, in_order: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Select down the levels and rank the k chosen. Returns values, beams (empty if not `beam`) and indices."""
    device = data.x.device
    values = torch.empty(requests, k, dtype=dtype, device=device)
    beams = torch.empty(requests if beam else 0, k, dtype=torch.int64, device=device)
    indices = torch.empty(requests, k, dtype=torch.int64, device=device)
    if requests == 0 or k == 0:
        return values, beams, indices
    c, wide_k = chunk_size(k), next_power_of_2(k)
    levels = _levels(data, requests, rows, c, known_lse)
    if not levels and not known_lse and data.kind == BEAMS:
        log_sum_exp(data.x, data.lse)
    parents = None
    for keys, level_rows, width in [*reversed(levels), (None, rows, data.width)]:
        source = data if keys is None else _Rows(keys.view(requests, level_rows, width), None, None, None, KEYS)
        first = parents is None
        size = max(next_power_of_2(level_rows * width), c) if first else wide_k * c
        ids = torch.empty(requests, k, dtype=torch.int32, device=device)
        found = torch.empty(requests, k, dtype=torch.int32, device=device)
        _select[(requests,)](
            *source.operands(), parents, ids, found, k, level_rows, width, cdiv(width, c), source.stride,
            source.mask_stride(), size // c, c, first, source.kind, source.mask is not None, wide_k,
            num_warps=_warps(max(size, wide_k)),
        )  # fmt: skip
        parents = ids
    block = min(32, max(16, wide_k))
    _rank[(requests, cdiv(k, block))](
        ids, found, values, beams, indices, k, data.width, in_order, beam, block, min(256, max(16, wide_k)), num_warps=4
    )
    return values, beams, indices


def log_sum_exp(x: Tensor, out: Tensor) -> None:
    """Write the log-sum-exp of each row of x [..., W] to out."""
    width = x.shape[-1]
    block = max(16, min(4096, next_power_of_2(width)))
    _log_sum_exp[(out.numel(),)](x, out, width, x.stride(-2), block, num_warps=max(1, min(8, block // 512)))


def topk(scores: Tensor, k: int, in_order: bool) -> tuple[Tensor, Tensor]:
    """See `loka.kernels.topk.topk`. scores have unit stride along n."""
    data = _Rows(scores, None, None, None, SCORES)
    values, _, indices = _select_all(data, scores.shape[0], 1, k, True, False, in_order, scores.dtype)
    return values, indices


def beam_topk(
    logits: Tensor, beam_scores: Tensor, k: int, mask: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `loka.kernels.topk.beam_topk`. Scores and lse are contiguous; logits and mask as from `triton._dense`."""
    requests, beams, codes = logits.shape
    known = lse is not None
    if lse is None:
        lse = torch.empty(requests, beams, dtype=torch.float32, device=logits.device)
        if codes > WIDEST and lse.numel():
            log_sum_exp(logits, lse)
            known = True
    data = _Rows(logits, mask, beam_scores, lse, BEAMS)
    return _select_all(data, requests, beams, k, known, True, True, torch.float32)
