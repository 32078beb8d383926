"""Launch the SiLU attention kernels: choose tiles and heads per launch, and add up partial bias gradients."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from loka.kernels.attention.triton_kernels import _backward_biases, _backward_kv, _backward_q, _forward
from loka.kernels.strides import cdiv, next_power_of_2
from loka.kernels.tile import INTERPRETED


@dataclass(frozen=True)
class Tile:
    """A tile of queries x keys (distances x keys for bias gradients), and how a program is launched.

    `registers` caps the registers per thread; None means no cap.
    """

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2
    registers: int | None = None


# Memory for the score gradients that dq and the biases read: as many heads at a time as fit, at least one.
KEPT_BYTES = 2**28
PARTIAL_BYTES = 2**27  # memory for the partial gradients of one bias
Tiles = dict[str, Tile]  # by kernel
MOST_QUERIES = 64  # in a tile of the dk and dv kernel
# 16-bit operands. SHORT and LONGER: heads up to 128 wide, rows up to LONG and beyond; the fastest of 18 on an H200
# (benchmarks/attention_h200.py). WIDE: wider heads.
LONG = 1024
SHORT: Tiles = {"forward": Tile(64, 32, registers=168), "backward_kv": Tile(32, 64, stages=3), "backward_q": Tile(64, 32, stages=4)}  # fmt: skip
LONGER: Tiles = {"forward": Tile(64, 64), "backward_kv": Tile(64, 128, 8, stages=3), "backward_q": Tile(64, 64, stages=3)}  # fmt: skip
WIDE: Tiles = {"forward": Tile(64, 32, 8), "backward_kv": Tile(32, 64, 8), "backward_q": Tile(64, 32, 8)}
# 32-bit operands are multiplied without tensor cores. EXACT: heads up to 128 wide; EXACT_WIDE: wider ones.
EXACT, EXACT_WIDE = Tile(32, 32, 8, stages=1), Tile(16, 16, 8, stages=1)
TINY = Tile(16, 16)  # for the interpreter, whose test rows are short
BIASES = Tile(32, 8, 1)  # for heads of any width
# Bias gradients: a warp mostly waits for memory, so there should be many programs, most of them with work.
SPLIT = 4  # tiles of keys that one program sums, or more ...
SPLITS = 16  # ... if the longest row would otherwise be split into more parts than this


def choose(kernel: str, q: Tensor, v: Tensor, max_length: int) -> Tile:
    """Choose the tile of a kernel for these operands."""
    wide = max(q.shape[2], v.shape[2]) > 128
    if INTERPRETED:
        return TINY
    if kernel == "backward_biases":
        return BIASES
    if q.dtype == torch.float32:
        return EXACT_WIDE if wide else EXACT
    return (WIDE if wide else SHORT if max_length <= LONG else LONGER)[kernel]


@dataclass(frozen=True)
class Problem:
    """The inputs of all kernels. A divisor of 0 means the length of each row; times and asked belong to time_bias."""

    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    times: Tensor | None
    asked: Tensor | None
    position_bias: Tensor | None
    time_bias: Tensor | None
    max_length: int
    divisor: float
    alpha: float

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.offsets.shape[0] - 1

    @property
    def positions(self) -> int:
        """Return the number of entries of the position bias, 0 if there is none."""
        return 0 if self.position_bias is None else self.position_bias.shape[1]

    @property
    def buckets(self) -> int:
        """Return the number of entries of the time bias, 0 if there is none."""
        return 0 if self.time_bias is None else self.time_bias.shape[1]

    def grid(self, block: int) -> tuple[int]:
        """Return a grid with a program for every block, row and head."""
        return (self.blocks(block) * self.rows * self.q.shape[1],)

    def blocks(self, block: int) -> int:
        """Return the number of blocks in the longest row."""
        return cdiv(self.max_length, block)

    def inputs(self) -> tuple[Tensor | None, ...]:
        """Return the offsets, times and biases. An absent bias has no entries, so its pointer is never read."""
        return self.offsets, self.asked, self.times, self.position_bias, self.time_bias

    @property
    def biases(self) -> list[Tensor]:
        """Return the biases that are given, [1 or H, entries] each."""
        return [bias for bias in (self.position_bias, self.time_bias) if bias is not None]

    @property
    def width(self) -> int:
        """Return the length of a row of `ds`: the queries, padded to whole tiles."""
        return cdiv(self.max_length, MOST_QUERIES) * MOST_QUERIES

    @property
    def kept_dtype(self) -> torch.dtype:
        """Return the dtype of `ds`."""
        return torch.bfloat16 if self.q.dtype == torch.bfloat16 else torch.float32

    def heads(self, first: int, last: int) -> "Problem":
        """Return the problem restricted to some heads."""
        q, k, v = (t[:, first:last] for t in (self.q, self.k, self.v))
        biases = [b if b is None or b.shape[0] == 1 else b[first:last] for b in (self.position_bias, self.time_bias)]
        return replace(self, q=q, k=k, v=v, position_bias=biases[0], time_bias=biases[1])

    def numbers(self, *more: Tensor) -> tuple[float, ...]:
        """Return the scalar arguments: heads, strides of q, k, v, `more` and the biases, alpha and divisor."""
        strides = [s for t in (self.q, self.k, self.v, *more) for s in t.stride()[:2]]
        biases = [0 if b is None or b.shape[0] == 1 else b.stride(0) for b in (self.position_bias, self.time_bias)]
        return self.q.shape[1], *strides, *biases, self.alpha, self.divisor

    def options(self, tile: Tile) -> dict[str, Any]:
        """Return the compile-time constants and launch options."""
        return {
            "D": self.q.shape[2], "DP": _pad(self.q.shape[2]), "V": self.v.shape[2], "VP": _pad(self.v.shape[2]),
            "POSITIONS": self.positions, "BUCKETS": self.buckets, "ENTRIES": _pad(self.buckets),
            "IEEE": self.q.dtype == torch.float32, "QUERIES": tile.queries, "KEYS": tile.keys,
            "num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers,
        }  # fmt: skip


def run_forward(problem: Problem, tile: Tile) -> Tensor:
    """Return out [total, H, d_v]."""
    q, k, v = problem.q, problem.k, problem.v
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    _forward[problem.grid(tile.queries)](q, k, v, out, *problem.inputs(), problem.blocks(tile.queries), *problem.numbers(), **problem.options(tile))  # fmt: skip
    return out


def run_backward_kv(problem: Problem, grad: Tensor, dk: Tensor, dv: Tensor, tile: Tile) -> Tensor:
    """Write dk and dv, and return the gradients of the scores.

    Args:
        problem: the inputs.
        grad: gradient of the output, [total, H, d_v].
        dk, dv: outputs; may be views of some heads of a larger tensor.
        tile: of the kernel.

    Returns:
        ds [H, total, width]: for each key, the queries at or after it; the rest is uninitialized.
    """
    q, k, v = problem.q, problem.k, problem.v
    ds = q.new_empty(q.shape[1], q.shape[0], problem.width, dtype=problem.kept_dtype)
    _backward_kv[problem.grid(tile.keys)](
        q, k, v, grad, dk, dv, ds, *problem.inputs(), problem.blocks(tile.keys), *problem.numbers(grad), problem.width, dk.stride(0) // dk.shape[2], q.shape[0], **problem.options(tile)
    )  # fmt: skip
    return ds


def run_backward_q(problem: Problem, ds: Tensor, dq: Tensor, tile: Tile) -> None:
    """Write dq."""
    k, options = problem.k, problem.options(tile)
    for name in ("V", "VP", "POSITIONS", "BUCKETS", "ENTRIES"):
        del options[name]
    _backward_q[problem.grid(tile.queries)](
        ds, k, dq, problem.offsets, problem.blocks(tile.queries), k.shape[1], *k.stride()[:2], problem.alpha, problem.divisor, problem.width, dq.stride(0) // dq.shape[2], k.shape[0], **options
    )  # fmt: skip


def run_backward_biases(problem: Problem, ds: Tensor, tile: Tile) -> list[Tensor]:
    """Return the gradients of both biases, [1 or H, entries] each, with no entries if a bias is absent."""
    heads, parts = problem.q.shape[1], problem.blocks(tile.queries)
    sets = 1 if all(bias.shape[0] == 1 for bias in problem.biases) else heads
    span = tile.keys * max(SPLIT, cdiv(problem.max_length, tile.keys * SPLITS))
    splits = cdiv(problem.max_length, span)
    distances = parts * tile.queries if problem.positions else 0
    places = [min(most, max(1, PARTIAL_BYTES // max(4 * sets * entries, 1))) for most, entries in ((problem.rows * splits, distances), (problem.rows * splits * parts, problem.buckets))]  # fmt: skip
    position = ds.new_zeros(places[0], sets, distances, dtype=torch.float32)
    time = ds.new_zeros(places[1], sets, problem.buckets, dtype=torch.float32)
    if problem.biases:
        _backward_biases[(parts * problem.rows * splits * sets,)](
            ds, position, time, problem.offsets, problem.asked, problem.times, parts, splits, heads // sets, sets, problem.divisor, problem.width, ds.stride(0),
            span, *places, POSITIONS=problem.positions, BUCKETS=problem.buckets, KEYS=tile.keys, APART=tile.queries, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    found = [_fold(position.sum(0), problem.positions, problem.max_length), time.sum(0)]
    biases = (problem.position_bias, problem.time_bias)
    return [g.sum(0, keepdim=True) if b is not None and b.shape[0] < sets else g for g, b in zip(found, biases, strict=True)]  # fmt: skip


def forward(*operands: Any) -> Tensor:
    """Return the output; the operands are the fields of a `Problem`."""
    problem = Problem(*operands)
    if not (problem.rows and problem.q.shape[0]):
        return torch.empty_like(problem.v, memory_format=torch.contiguous_format)
    return run_forward(problem, choose("forward", problem.q, problem.v, problem.max_length))


def backward(grad: Tensor, *operands: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and both biases, with no entries if a bias is absent."""
    problem = Problem(*operands)
    q, v, heads = problem.q, problem.v, problem.q.shape[1]
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, problem.k, v))
    sums = [q.new_zeros(*((heads, 0) if bias is None else bias.shape), dtype=torch.float32) for bias in (problem.position_bias, problem.time_bias)]  # fmt: skip
    if problem.rows and q.shape[0]:
        kv, of_q, of_biases = (choose(f"backward_{name}", q, v, problem.max_length) for name in ("kv", "q", "biases"))
        at_once = min(heads, max(1, KEPT_BYTES // (q.shape[0] * problem.width * problem.kept_dtype.itemsize)))
        for first in range(0, heads, at_once):
            some = slice(first, min(first + at_once, heads))
            part = problem.heads(some.start, some.stop)
            ds = run_backward_kv(part, grad[:, some], dk[:, some], dv[:, some], kv)
            run_backward_q(part, ds, dq[:, some], of_q)
            for whole, found in zip(sums, run_backward_biases(part, ds, of_biases), strict=True):
                (whole if whole.shape[0] == 1 else whole[some]).add_(found)
    return dq, dk, dv, sums[0], sums[1]


def _pad(width: int) -> int:
    return max(16, int(next_power_of_2(width)))


def _copy(view: Tensor) -> Tensor:
    return view.clone(memory_format=torch.contiguous_format)  # outputs of an op may not share memory


def _fold(sums: Tensor, entries: int, max_length: int) -> Tensor:
    """Turn sums by distance [H, distances] into [H, entries]: distances beyond the last entry are added to it."""
    if entries > sums.shape[1]:
        return pad(sums, (0, entries - sums.shape[1]))
    kept = _copy(sums[:, :entries])
    if 0 < entries < max_length:
        kept[:, -1] += sums[:, entries:].sum(1)
    return kept
