"""Chains: norm -> linear -> activation -> linear ..., chosen as a whole, because what travels between two ops decides what both cost.

A chain is a small graph. A node is a place between two ops and the representation the values have there:

    bf16                     what every op can read and write
    e4m3:tensor:static       FP8 with a scale known beforehand: free to write after a block norm, whose values are bounded
    e4m3:tensor, e4m3:row, e4m3:1x128      FP8 with scales computed from the values

An edge is a kernel that was measured: it covers one op or several, reads one representation and writes one.

    bf16                linear; norm (+ activation); linear + norm + activation, compiled together
    quantize            no op: bf16 -> FP8, the price of a conversion
    norm_quantize       norm (+ activation): bf16 -> FP8 in the pass the norm makes anyway
    scaled_mm           linear: FP8 -> bf16
    linear              linear: bf16 -> bf16 with the quantisation inside (rows of `loka.measure.site`)
    fused_linear        linear (+ block norm) (+ activation): FP8 -> FP8 or bf16, in one kernel

The plan of a chain is the shortest path over measured microseconds (`loka.dispatch.chain_plan` makes the edges from database rows). This file knows ops,
edges and the path, and no database.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from loka.formats import E4M3, ROW, TENSOR, Block, Spec

__all__ = ["BF16", "REPRESENTATIONS", "SPECS", "STATIC", "WEIGHTS", "ChainOp", "Edge", "check_chain", "shortest_path"]

BF16 = "bf16"
STATIC = Spec(E4M3, TENSOR, mode="static")
WEIGHTS = {TENSOR: Spec(E4M3, TENSOR), ROW: Spec(E4M3, ROW), Block(1, 128): Spec(E4M3, Block(128, 128))}
SPECS = (STATIC, *(Spec(E4M3, block) for block in WEIGHTS))
REPRESENTATIONS = (BF16, *(str(spec) for spec in SPECS))


@dataclass(frozen=True)
class ChainOp:
    """One op of a chain. `detail`: layer, rms or block for a norm; the activation's name; empty for a linear."""

    name: str
    kind: Literal["norm", "linear", "activation"]
    k: int  # width it reads
    n: int  # width it writes
    detail: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("norm", "linear", "activation") or min(self.k, self.n) < 1:
            raise ValueError(f"{self.name}: {self.kind} {self.k} -> {self.n} is no op of a chain")
        if self.kind != "linear" and (self.k != self.n or not self.detail):
            raise ValueError(
                f"{self.name}: a {self.kind} keeps its width and says what it is, got {self.k} -> {self.n} {self.detail!r}"
            )


@dataclass(frozen=True)
class Edge:
    """A measured kernel: ops[start:stop], from one representation to another. start == stop: a conversion."""

    start: int
    stop: int
    reads: str
    writes: str
    kernel: str
    microseconds: float

    def __post_init__(self) -> None:
        if not (0 <= self.start <= self.stop and self.microseconds > 0):
            raise ValueError(f"{self.kernel}: an edge goes forward and takes time, got {self}")


def shortest_path(count: int, edges: Iterable[Edge], *, first: str = BF16, last: str = BF16) -> list[Edge] | None:
    """The cheapest edges that lead over `count` ops, or None where there is no way. Dijkstra on (place, representation)."""
    leaving: dict[tuple[int, str], list[Edge]] = {}
    for edge in edges:
        leaving.setdefault((edge.start, edge.reads), []).append(edge)
    queue: list[tuple[float, int, tuple[int, str]]] = [(0.0, 0, (0, first))]
    came: dict[tuple[int, str], Edge | None] = {}
    best: dict[tuple[int, str], tuple[float, Edge | None]] = {(0, first): (0.0, None)}
    pushed = 0
    while queue:
        cost, _, node = heapq.heappop(queue)
        if node in came:
            continue
        came[node] = best[node][1]
        if node == (count, last):
            return _walk_back(came, node)
        for edge in leaving.get(node, ()):
            reached, total = (edge.stop, edge.writes), cost + edge.microseconds
            if reached not in came and total < best.get(reached, (float("inf"), None))[0]:
                best[reached] = (total, edge)
                pushed += 1
                heapq.heappush(queue, (total, pushed, reached))
    return None


def _walk_back(came: dict[tuple[int, str], Edge | None], node: tuple[int, str]) -> list[Edge]:
    path: list[Edge] = []
    while (edge := came[node]) is not None:
        path.append(edge)
        node = (edge.start, edge.reads)
    return path[::-1]


def check_chain(ops: Sequence[ChainOp], first: str, last: str) -> None:
    """Raise where ops do not follow each other, or a representation is unknown."""
    if not ops:
        raise ValueError("a chain needs at least one op")
    for before, after in pairwise(ops):
        if before.n != after.k:
            raise ValueError(f"{before.name} writes {before.n} columns, {after.name} reads {after.k}: that is no chain")
    for name in (first, last):
        if name not in REPRESENTATIONS:
            raise ValueError(f"no representation {name!r}; there are {', '.join(REPRESENTATIONS)}")
