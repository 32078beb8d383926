"""A router in one pass, which also counts for the sort of what it chose: the scores of a token never leave the program that made them.

A program owns BM tokens and all experts, padded to a power of two:

    logits    BM x EP, tensor cores, summed in float32 over K in steps of BK
    key       sigmoid + balance; NaN counts as the largest, padding as the smallest
    TOP times the largest key, lowest index first, is taken and struck out

Widths of 53 experts send a library to kernels that read one element at a time, and choosing takes it five more launches; here a masked load covers the padding.
Whatever the numbers are, TOP different experts are chosen: those struck out and the padding are below every key.

Sorting by expert is a counting sort (`grouped_mm.triton_kernels.place`) whose counts, per block of tokens, the router leaves behind.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.grouped_mm.triton_kernels import place
from loka.kernels.strides import cdiv, next_power_of_2
from loka.kernels.triton_launcher import quick

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
ONE_WAVE = 16 * 132  # tokens that small tiles spread over the multiprocessors of an H200
MANY = 16384  # tokens from which on larger blocks keep the counts of all blocks, which every program of the sort reads, few


@quick
@triton.jit
def _route(x_ptr, w_ptr, balance_ptr, id_ptr, gate_ptr, count_ptr, T, K, E, stride_x, stride_weight,
           TOP: tl.constexpr, COLUMNS: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr, EP: tl.constexpr, BK: tl.constexpr,
           IEEE: tl.constexpr, COUNT: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    expert = tl.arange(0, EP)
    logits = tl.zeros((BM, EP), tl.float32)
    for start in range(0, K, BK):
        column = start + tl.arange(0, BK)
        x = tl.load(x_ptr + token[:, None] * stride_x + column[None, :],
                    (token < T)[:, None] & (column < K)[None, :], other=0.0)  # fmt: skip
        w = tl.load(w_ptr + expert[None, :] * stride_weight + column[:, None],
                    (expert < E)[None, :] & (column < K)[:, None], other=0.0)  # fmt: skip
        logits = tl.dot(x, w, logits, input_precision="ieee" if IEEE else "tf32")
    logits = logits.to(x_ptr.dtype.element_ty).to(tl.float32)
    score = tl.div_rn(tl.full((BM, EP), 1.0, tl.float32), 1.0 + tl.exp(-logits))
    key = score + tl.load(balance_ptr + expert, expert < E, other=0.0)[None, :]
    key = tl.where(key == key, tl.maximum(key, -3.4028234663852886e38), float("inf"))
    key = tl.where((expert < E)[None, :], key, float("-inf"))
    place = tl.arange(0, CP)
    ids = tl.zeros((BM, CP), tl.int32) + E
    gates = tl.zeros((BM, CP), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    taken = tl.zeros((BM, EP), tl.int32)
    for j in tl.static_range(TOP):
        best = tl.argmax(key, 1)
        struck = expert[None, :] == best[:, None]
        gate = tl.sum(tl.where(struck, score, 0.0), 1)
        total += gate
        ids = tl.where((place == j)[None, :], best[:, None], ids)
        gates = tl.where((place == j)[None, :], gate[:, None], gates)
        key = tl.where(struck, float("-inf"), key)
        taken += struck.to(tl.int32)
    gates = tl.where((place < TOP)[None, :], tl.div_rn(gates, tl.broadcast_to(total[:, None], (BM, CP))), 1.0)
    at = token[:, None] * COLUMNS + place[None, :]
    there = (token < T)[:, None] & (place < COLUMNS)[None, :]
    tl.store(id_ptr + at, ids.to(id_ptr.dtype.element_ty), there)
    tl.store(gate_ptr + at, gates, there)
    if COUNT:
        if COLUMNS > TOP:
            taken += (expert == E)[None, :].to(tl.int32)
        count = tl.sum(tl.where((token < T)[:, None], taken, 0), 0)
        tl.store(count_ptr + tl.program_id(0) * EP + expert, count)


def depth_of(padded: int, item: int) -> int:
    """Columns a step reads: what keeps four steps of x and of `padded` experts in shared memory."""
    return 128 if padded * item <= 128 else 64 if padded * item <= 512 else 32


def block_of(tokens: int, item: int) -> int:
    """Tokens of a program."""
    if tokens <= ONE_WAVE or INTERPRETED:
        return 16
    return 64 if tokens > MANY and item == 2 else 32


def _choose(
    x: Tensor, weight: Tensor, balance: Tensor, top: int, always: bool, ids: Tensor, counts: Tensor | None
) -> Tensor:
    """Writes the ids, and the counts where given [blocks, EP]; gives the weights."""
    (tokens, k), experts, columns = x.shape, weight.shape[0], top + int(always)
    gates = torch.empty(tokens, columns, dtype=torch.float32, device=x.device)
    padded = padding_of(experts, always)
    block = block_of(tokens, x.element_size())
    if tokens:
        _route[(cdiv(tokens, block),)](
            x, weight, balance, ids, gates, counts, tokens, k, experts, x.stride(0), weight.stride(0),
            top, columns, next_power_of_2(columns), block, padded, depth_of(padded, x.element_size()),
            x.dtype == torch.float32, counts is not None, num_warps=4, num_stages=5,
        )  # fmt: skip
    return gates


def padding_of(experts: int, always: bool) -> int:
    """Columns of a tile: a power of two, at least what tensor cores multiply, with room for the shared expert."""
    return max(16, next_power_of_2(experts + int(always)))


def route(x: Tensor, weight: Tensor, balance: Tensor, top: int, always: bool) -> tuple[Tensor, Tensor]:
    """x [T, K] and weight [E, K] with unit stride along K -> ids int64, weights."""
    ids = torch.empty(x.shape[0], top + int(always), dtype=torch.int64, device=x.device)
    return ids, _choose(x, weight, balance, top, always, ids, None)


def route_sorted(
    x: Tensor, weight: Tensor, balance: Tensor, top: int, always: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """order, offsets, inverse of the visits, and weights."""
    tokens, experts = x.shape[0], weight.shape[0] + int(always)
    block, padded = block_of(tokens, x.element_size()), padding_of(weight.shape[0], always)
    ids = torch.empty(tokens, top + int(always), dtype=torch.int32, device=x.device)
    counts = torch.empty(cdiv(tokens, block), padded, dtype=torch.int32, device=x.device)
    gates = _choose(x, weight, balance, top, always, ids, counts)
    return *place(ids, counts, experts, block), gates
