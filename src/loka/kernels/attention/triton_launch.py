"""Launches of the SiLU attention kernels: which tile for which operands, and the sums of the biases' partial gradients."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from loka.kernels.attention.triton_kernels import _backward_kv, _backward_q, _forward
from loka.kernels.strides import cdiv, next_power_of_2
from loka.kernels.tile import INTERPRETED


@dataclass(frozen=True)
class Tile:
    """queries x keys of a tile; warps and stages of a program, and how many registers a thread may have (None: all)."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2
    registers: int | None = None


PARTIAL_BYTES = 2**28  # of bias gradients that wait to be summed
Tiles = dict[str, Tile]  # by kernel
# 16-bit operands: heads up to 128 wide in rows up to LONG and beyond, the fastest of 34 on an H200 (benchmarks/attention_h200.py); wider heads
LONG = 1024
_NARROW = Tile(64, 32, registers=168)
SHORT: Tiles = {"forward": _NARROW, "backward_q": _NARROW, "backward_kv": Tile(32, 64, stages=3)}
LONGER: Tiles = {"forward": Tile(64, 64), "backward_q": _NARROW, "backward_kv": Tile(64, 128, 8, stages=3)}
WIDE: Tiles = {"forward": Tile(64, 32, 8), "backward_q": Tile(64, 32, 8), "backward_kv": Tile(32, 64, 8)}
# 32-bit operands are multiplied without tensor cores: heads up to 128 wide, wider ones
EXACT, EXACT_WIDE = Tile(32, 32, 8, stages=1), Tile(16, 16, 8, stages=1)
TINY = Tile(16, 16)  # the rows of the interpreter's tests are short


def choose(kernel: str, q: Tensor, v: Tensor, max_length: int) -> Tile:
    """The tile of a kernel for these operands."""
    wide = max(q.shape[2], v.shape[2]) > 128
    if INTERPRETED:
        return TINY
    if q.dtype == torch.float32:
        return EXACT_WIDE if wide else EXACT
    return (WIDE if wide else SHORT if max_length <= LONG else LONGER)[kernel]


@dataclass(frozen=True)
class Problem:
    """What the three kernels read. A divisor of 0 means the length of each row; times and asked belong to time_bias."""

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
        """How many rows."""
        return self.offsets.shape[0] - 1

    @property
    def positions(self) -> int:
        """Entries of the position bias."""
        return 0 if self.position_bias is None else self.position_bias.shape[1]

    @property
    def buckets(self) -> int:
        """Entries of the time bias."""
        return 0 if self.time_bias is None else self.time_bias.shape[1]

    def grid(self, block: int) -> tuple[int, int]:
        """Blocks of the longest row, rows x heads."""
        return cdiv(self.max_length, block), self.rows * self.q.shape[1]

    def inputs(self) -> tuple[Tensor | None, ...]:
        """An absent bias has no entries, and its pointer is never read."""
        return self.offsets, self.asked, self.times, self.position_bias, self.time_bias

    def numbers(self, *more: Tensor) -> tuple[float, ...]:
        """Heads, strides of q, k, v and more, strides of the biases, factors."""
        strides = [s for t in (self.q, self.k, self.v, *more) for s in t.stride()[:2]]
        biases = [0 if bias is None else bias.stride(0) for bias in (self.position_bias, self.time_bias)]
        return self.q.shape[1], *strides, *biases, self.alpha, self.divisor

    def options(self, tile: Tile) -> dict[str, Any]:
        """Compile-time constants and launch options of every kernel."""
        return {
            "D": self.q.shape[2], "DP": _pad(self.q.shape[2]), "V": self.v.shape[2], "VP": _pad(self.v.shape[2]),
            "POSITIONS": self.positions, "BUCKETS": self.buckets, "ENTRIES": _pad(self.buckets),
            "IEEE": self.q.dtype == torch.float32, "QUERIES": tile.queries, "KEYS": tile.keys,
            "num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers,
        }  # fmt: skip


def run_forward(problem: Problem, tile: Tile) -> Tensor:
    """out [total, H, d_v]."""
    q, k, v = problem.q, problem.k, problem.v
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if problem.rows and q.shape[0]:
        _forward[problem.grid(tile.queries)](
            q, k, v, out, *problem.inputs(), *problem.numbers(), **problem.options(tile)
        )
    return out


def run_backward_q(problem: Problem, grad: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """dq and the gradients of the biases (without entries where a bias is absent)."""
    q, k, v = problem.q, problem.k, problem.v
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    blocks = q.shape[0] // tile.queries + problem.rows  # of queries in all rows, some of which do not exist
    distances = cdiv(problem.max_length, tile.queries) * tile.queries if problem.positions else 0
    width = distances + problem.buckets
    slots = min(blocks, max(1, PARTIAL_BYTES // max(4 * q.shape[1] * width, 1)))
    partial = q.new_zeros(slots, q.shape[1], width, dtype=torch.float32)
    if problem.rows and q.shape[0]:
        _backward_q[problem.grid(tile.queries)](
            q,
            k,
            v,
            grad,
            dq,
            partial,
            *problem.inputs(),
            *problem.numbers(grad),
            distances,
            slots,
            **problem.options(tile),
        )
    sums = partial.sum(0)
    return dq, _fold(sums[:, :distances], problem.positions, problem.max_length), _copy(sums[:, distances:])


def run_backward_kv(problem: Problem, grad: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """dk and dv."""
    q, k, v = problem.q, problem.k, problem.v
    dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (k, v))
    if problem.rows and q.shape[0]:
        _backward_kv[problem.grid(tile.keys)](
            q, k, v, grad, dk, dv, *problem.inputs(), *problem.numbers(grad), **problem.options(tile)
        )
    return dk, dv


def forward(*operands: Any) -> Tensor:
    """The fields of a Problem -> out."""
    problem = Problem(*operands)
    return run_forward(problem, choose("forward", problem.q, problem.v, problem.max_length))


def backward(grad: Tensor, *operands: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the two biases (without entries where a bias is absent)."""
    problem = Problem(*operands)
    tiles = [choose(name, problem.q, problem.v, problem.max_length) for name in ("backward_q", "backward_kv")]
    dq, dposition, dtime = run_backward_q(problem, grad, tiles[0])
    dk, dv = run_backward_kv(problem, grad, tiles[1])
    return dq, dk, dv, dposition, dtime


def _pad(width: int) -> int:
    return max(16, int(next_power_of_2(width)))


def _copy(view: Tensor) -> Tensor:
    return view.clone(memory_format=torch.contiguous_format)  # what an op returns may not share memory


def _fold(sums: Tensor, entries: int, max_length: int) -> Tensor:
    """Sums by distance [H, distances] -> [H, entries]: every distance from the last entry on belongs to it."""
    if entries > sums.shape[1]:
        return pad(sums, (0, entries - sums.shape[1]))
    kept = _copy(sums[:, :entries])
    if 0 < entries < max_length:
        kept[:, -1] += sums[:, entries:].sum(1)
    return kept
