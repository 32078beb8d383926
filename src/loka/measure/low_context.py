"""The part of beam_attention's adapter for contexts in E4M3: what a kernel that multiplies them in FP8 may round.

The context is an operand, so its rounding is no error. A kernel may widen it and multiply in 16 bits; then it is judged
as for a context in 16 bits. Or it multiplies in FP8, and then

    queries    are rounded per beam and head as `quantize` does by e4m3:row. That is bit for bit the same everywhere,
               so the exact result is that of the rounded queries, and no error is allowed for it
    weights    are rounded relative to a maximum: 2^(s - maximum + 8), E4M3 without a scale. Which maximum, that of the
               keys so far or of a part of them, is left to the kernel
    sums       of both products keep about 14 bits (`conformance`), those of parts and the denominator are in float32

A result must be right in one of the two ways. The size of the errors by FP8 is computed from the operands, since it
depends on them: equal weights are rounded alike and their errors add up, others cancel, and one weight alone is exact.
So the weights are rounded with each of four maxima between two powers of two, which gives four errors of each result:

    sigma^2  =  max(mean of the four errors^2, sum_j e_j^2 v_j^2)      e_j: rms error of a weight, if all are independent
              + what 14 bits and the rounding of the result add

The result may be a dozen such errors off in one element, which hides much: for a thousand keys sigma is as large as the
share of one key. What is wrong in the same way in many elements shows in two more looks, which are sums of many errors:

    gain       <out - y, y> of each request and head, and of the whole: a factor that is a percent off
    a key      sum over beams of w_j <out - y, v_j>, relative to sum_j w_j^2 <v_j, v_j>: -1 if key j is left out, 1 if
               it counts twice, or although it is behind the end; of each head, and of all heads of a request

The allowed sums are those of independent errors, six standard errors, plus a bias that rounding or truncation explains.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from loka.formats import E4M3, Spec, dequantize, quantize
from loka.measure.conformance import CHANCE, TRUNCATION, ULP, Conformance, Law, judge, nominal_size, worst_of
from loka.measure.rounding import GAIN, TINY, as_share, judge_once

ROWS = Spec.parse("e4m3:row")
LARGEST = 8  # log2 of the largest weight before it is rounded
MAXIMA = (0.0, 0.25, 0.5, 0.75)  # log2 of how far the maximum of a kernel may be above the one of all keys
ALLOWED = 2.0  # sigmas of a typical error; a single element may have eight times as many
MISSING = 0.05  # of a key, besides what rounding explains
LOG2E = math.log2(math.e)
SMALLEST = torch.finfo(torch.float32).smallest_normal
_SLICE = 1 << 24  # elements of float64 scores at a time: a dozen such tensors are alive


def to_e4m3(x: Tensor) -> Tensor:
    """Round to E4M3 without a scale, saturating. Keeps NaN."""
    return x.clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)


def as_columns(x: Tensor) -> Tensor:
    """Return [R, S, G, D] with the layout of an engine's values, [G D, R S]."""
    return x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)


@dataclass(frozen=True)
class LowLaw:
    """The exact result for queries in E4M3, and how far rounding moves it.

    Args:
        law: result and sigma [R B H, D].
        q, k, v, lengths: the operands: q [R, B, H, D] is rounded, and float64.
        total: maximum and denominator of each softmax, as log2 of the sum [R, B, H].
        gain: the variance of <out - y, y> [R, B, H].
        drift: what it is by the rounding of weights, by that of the result, and by truncation, which makes sums too small
            [3, R, B, H]: each may add up over queries.
        key: the variance of the look at each key [R, H, S], summed over beams.
        own: what the rounding of its own weights adds to that look.
    """

    law: Law
    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    total: Tensor
    gain: Tensor
    drift: Tensor
    key: Tensor
    own: Tensor


@dataclass(frozen=True)
class _Slice:
    """Some beams of one request; scores [B, H, S] of all keys, of which `n` count. k and v are repeated per head."""

    r: int
    beams: slice
    n: int
    q: Tensor
    k: Tensor
    v: Tensor
    s: Tensor  # in log2


def _slices(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Iterator[_Slice]:
    beams, heads, d = q.shape[1:]
    some = max(1, _SLICE // max(heads * k.shape[1], 1))
    for r in range(q.shape[0]):
        wide_k, wide_v = (t[r].double().repeat_interleave(heads // k.shape[2], 1) for t in (k, v))
        for start in range(0, beams, some):
            part = slice(start, start + some)
            s = torch.einsum("bhd,shd->bhs", q[r, part], wide_k) * (d**-0.5 * LOG2E)
            yield _Slice(r, part, int(lengths[r]), q[r, part], wide_k, wide_v, s)


def exact(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> LowLaw:
    """Compute in float64, a few queries at a time to limit memory. k and v are in E4M3."""
    (requests, _, heads, d), s = q.shape, k.shape[1]
    rounded = dequantize(quantize(q.reshape(-1, d).float(), ROWS)).double().view(q.shape)
    nominal = _nominal(q, rounded)
    y, sigma = (torch.zeros(q.shape, dtype=torch.float64, device=q.device) for _ in range(2))
    total, gain, *drift = (torch.zeros(q.shape[:3], dtype=torch.float64, device=q.device) for _ in range(5))
    key, own = (torch.zeros(requests, heads, s, dtype=torch.float64, device=q.device) for _ in range(2))
    of_sums = TRUNCATION * math.sqrt(max(d, 32) / 32)
    for one in _slices(rounded, k, v, lengths):
        at, n = (one.r, one.beams), one.n
        if n == 0:
            continue
        k_, v_, s_ = one.k[:n], one.v[:n], one.s[..., :n]
        top = s_.amax(-1, keepdim=True)
        denominator = torch.exp2(s_ - top).sum(-1, keepdim=True)
        total[at] = (top + denominator.log2()).squeeze(-1)
        p = _weights(s_, total[at])
        mine = y[at] = torch.einsum("bhs,shd->bhd", p, v_)
        along_y = torch.einsum("bhd,shd->bhs", mine, v_)
        together, mean, most, bias = (torch.zeros_like(t) for t in (mine, p, p, total[at]))
        of_gain, of_key = torch.zeros_like(bias), torch.zeros_like(one.s)
        for shift in MAXIMA:
            weights = torch.exp2(s_ - top + (LARGEST - shift))
            e = (to_e4m3(weights).double() - weights) * (2.0 ** (shift - LARGEST) / denominator)
            error = torch.einsum("bhs,shd->bhd", e, v_)
            product = (error * mine).sum(-1)
            together += error.square() / len(MAXIMA)
            mean += e.square() / len(MAXIMA)
            most = torch.maximum(most, e.abs())
            bias += product / len(MAXIMA)
            of_gain += product.square() / len(MAXIMA)
            of_key += torch.einsum("bhd,shd->bhs", error, one.v).square() / len(MAXIMA)
        every = one.v.square()
        squares = every[:n]
        apart = torch.einsum("bhs,shd->bhd", mean, squares)
        of_gain = torch.maximum(of_gain, (mean * along_y.square()).sum(-1))
        of_key = torch.maximum(of_key, torch.einsum("bhd,shd->bhs", apart, every))
        # scores, whose sums are truncated relative to their terms, and with a score its weight
        sizes = torch.einsum("bhd,shd->bhs", nominal[at].square(), nominal_size(k_, E4M3).square()) / d
        moved = (of_sums * p).square() * (sizes + (s_ / LOG2E).square())
        first, second = (torch.einsum("bhs,shd->bhd", moved, t) for t in (v_, squares))
        of_scores = second - 2 * mine * first + mine.square() * moved.sum(-1, keepdim=True)
        of_scores = of_scores.clamp(min=0.0)
        # the sums of the second product, and the result
        terms = torch.einsum("bhs,shd->bhd", p.square(), squares) + mine.square()
        of_sum = TRUNCATION**2 * math.ceil(n / 32) * terms
        of_result = ULP[q.dtype] ** 2 / 12 * mine.square()
        rest = of_scores + of_sum + of_result
        sigma[at] = (torch.maximum(together, apart) + rest).sqrt()
        gain[at] = of_gain + (rest * mine.square()).sum(-1)
        of_type = ((mine.to(q.dtype).double() - mine) * mine).sum(-1)  # the same for beams with the same result
        drift[0][at], drift[1][at], drift[2][at] = bias, of_type, n / 32 * 2.0**-14 * mine.square().sum(-1)
        of_key += torch.einsum("bhd,shd->bhs", rest, every)
        key[one.r] += (_weights(one.s, total[at]).square() * of_key).sum(0)  # also of keys behind the end
        own[one.r, :, :n] += (p * most).sum(0) * squares.sum(-1).T
    return LowLaw(
        Law(y.view(-1, d), sigma.view(-1, d)), rounded, k, v, lengths, total, gain, torch.stack(drift), key, own
    )


def _nominal(q: Tensor, rounded: Tensor) -> Tensor:
    """Return the sizes of rounded queries that hardware aligns them by."""
    made = quantize(q.reshape(-1, q.shape[-1]).float(), ROWS).scale.double().view(*q.shape[:3], 1)
    return nominal_size(rounded / made, E4M3) * made


def _weights(s: Tensor, total: Tensor) -> Tensor:
    """Return weights [B, H, S]; of keys that do not count, which may be larger, at most 1. No float32 holds the smallest."""
    p = torch.exp2(s - total[..., None]).clamp(max=1.0)
    return torch.where(p < SMALLEST, 0.0, p)


def judge_low(out: Tensor, exact: LowLaw, dtype: torch.dtype) -> Conformance:
    """Judge a result [R, B, H, D] as that of a kernel that multiplies in FP8. The tolerance is 1."""
    return judge_once(out, exact.law.y, "FP8", partial(_judge_low, out, exact, dtype))


def _judge_low(out: Tensor, exact: LowLaw, dtype: torch.dtype) -> Conformance:
    verdict = as_share(judge(out.reshape(-1, out.shape[-1]), exact.law, ALLOWED, dtype))
    if out.numel() == 0 or not math.isfinite(verdict.error):
        return verdict
    y = exact.law.y.view(out.shape)
    error = (out.double() - y).nan_to_num(0.0, 0.0, 0.0)
    return worst_of([verdict, _judge_gain(error, y, exact), _judge_keys(error, exact)])


def _judge_gain(error: Tensor, y: Tensor, exact: LowLaw) -> Conformance:
    moved, size = ((t * y).sum(-1).nan_to_num(0.0) for t in (error, y))
    gain, drift = exact.gain.nan_to_num(0.0), exact.drift.nan_to_num(0.0)
    ratios = []
    for dims in ((1,), (0, 1, 2)):
        ways = drift.sum([dim + 1 for dim in dims]).abs().sum(0)
        allowed = GAIN * size.sum(dims) + ways + CHANCE * gain.sum(dims).sqrt()
        ratios.append((moved.sum(dims).abs() / allowed.clamp(min=TINY)).flatten())
    where = int(ratios[0].argmax())
    place = f"request {where // error.shape[2]}, head {where % error.shape[2]}"
    worst, name = max((float(ratios[0][where]), place), (float(ratios[1]), "the whole"))
    return Conformance.within(worst, 1.0, f"the gain of {name} is off by {worst:.3g} times what rounding explains")


def _judge_keys(error: Tensor, exact: LowLaw) -> Conformance:
    seen, size = torch.zeros_like(exact.key), torch.zeros_like(exact.key)
    for one in _slices(exact.q, exact.k, exact.v, exact.lengths):
        if one.n:
            p = _weights(one.s, exact.total[one.r, one.beams])
            seen[one.r] += (p * torch.einsum("bhd,shd->bhs", error[one.r, one.beams], one.v)).sum(0)
            size[one.r] += p.square().sum(0) * one.v.square().sum(-1).T
    verdicts = [Conformance(True, 0.0, 1.0)]
    for heads in (True, False) if seen.numel() else ():  # each head by itself, and all of a request
        off, whole, own, variance = (t if heads else t.sum(1) for t in (seen, size, exact.own, exact.key))
        allowed = MISSING * whole + own + CHANCE * variance.sqrt()
        ratios = (off.abs() / allowed.clamp(min=TINY)).nan_to_num(0.0)
        where = tuple(int(i) for i in torch.unravel_index(ratios.argmax(), ratios.shape))
        worst, counts = float(ratios[where]), 1 + float(off[where] / whole[where].clamp(min=TINY))
        place = f"request {where[0]}, {f'head {where[1]}' if heads else 'all heads'}, key {where[-1]}"
        reason = f"{place}: it counts {counts:.3g} times, off by {worst:.3g} times what rounding explains"
        verdicts.append(Conformance.within(worst, 1.0, reason))
    return worst_of(verdicts)
