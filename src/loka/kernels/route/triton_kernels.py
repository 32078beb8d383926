"""A router in one kernel, which also counts visits for the sort. The scores of a token are never written to memory.

A program handles BM tokens and all experts, padded to a power of two:

    logits    BM x EP, on tensor cores, summed in float32 over K in steps of BK
    key       sigmoid + balance; NaN counts as the largest, padding as the smallest
    choice    TOP times, the largest key (lowest index first) is taken and removed

For widths such as 53 experts, libraries run kernels that read one element at a time, and need five more launches for
the choice; here a masked load handles the padding. TOP distinct experts are chosen for any input: removed keys and
padding are below every key.

Sorting by expert is a counting sort (`grouped_mm.triton_kernels.place`) that uses the router's counts per block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.grouped_mm.triton_kernels import place
from loka.kernels.strides import cdiv, next_power_of_2
from loka.kernels.triton_launcher import quick

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
ONE_WAVE = 16 * 132  # tokens in one wave of small tiles on the multiprocessors of an H200
MANY = 16384  # above so many tokens blocks are larger: every program of the sort reads the counts of all blocks


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
    """Return the columns per step, such that four steps of x and of `padded` experts fit into shared memory."""
    return 128 if padded * item <= 128 else 64 if padded * item <= 512 else 32


def block_of(tokens: int, item: int) -> int:
    """Return the tokens per program."""
    if tokens <= ONE_WAVE or INTERPRETED:
        return 16
    return 64 if tokens > MANY and item == 2 else 32


def _choose(
    x: Tensor, weight: Tensor, balance: Tensor, top: int, always: bool, ids: Tensor, counts: Tensor | None
) -> Tensor:
    """Write ids, and counts [blocks, EP] if given; return the weights."""
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
    """Return the columns of a tile: a power of two, at least the tensor core minimum, including the shared expert."""
    return max(16, next_power_of_2(experts + int(always)))


def route(x: Tensor, weight: Tensor, balance: Tensor, top: int, always: bool) -> tuple[Tensor, Tensor]:
    """Return int64 ids and weights. x [T, K] and weight [E, K] have unit stride along K."""
    ids = torch.empty(x.shape[0], top + int(always), dtype=torch.int64, device=x.device)
    return ids, _choose(x, weight, balance, top, always, ids, None)


def route_sorted(
    x: Tensor, weight: Tensor, balance: Tensor, top: int, always: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return order, offsets and inverse of the visits, and the weights."""
    tokens, experts = x.shape[0], weight.shape[0] + int(always)
    block, padded = block_of(tokens, x.element_size()), padding_of(weight.shape[0], always)
    ids = torch.empty(tokens, top + int(always), dtype=torch.int32, device=x.device)
    counts = torch.empty(cdiv(tokens, block), padded, dtype=torch.int32, device=x.device)
    gates = _choose(x, weight, balance, top, always, ids, counts)
    return *place(ids, counts, experts, block), gates
