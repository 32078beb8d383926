"""Constrain the search to valid ids: choose the next codes with the trie, level by level, on the device.

    listed     few codes may follow a node: score only those, gathered from the logits; candidates are beams x fan-out
    masked     many codes may follow: a table with one mask per node of the level, looked up by the nodes of the beams
    computed   the table would be too large: the mask is computed by binary search in every step

All three choose the same codes. Probabilities are normalized over the whole codebook, or with `valid_only` over the
codes that may follow, for models whose training loss was normalized that way. Beams that are not a valid prefix (node
-1) have no continuation: their score is and stays -inf.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.kernels.topk import beam_topk, topk
from loka.semantic_ids import Trie

TABLE_BYTES = 2**27
# Not -inf: a dead beam has no valid code, so its log-sum-exp would be -inf, and subtracting that gives inf or NaN
LOWEST = torch.finfo(torch.float32).min
Lse = Callable[[Tensor], Tensor]
LISTED_SHARE = 4  # list the codes if the fan-out is at most the codebook's size divided by this


@dataclass(frozen=True)
class Continuations:
    """The k best continuations, [R, k] each: scores, parent beams, codes, and the trie nodes they lead to, if any."""

    scores: Tensor
    parents: Tensor
    codes: Tensor
    nodes: Tensor | None


class Unconstrained:
    """Any code may follow."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def choose(self, logits: Tensor, scores: Tensor, nodes: Tensor | None, k: int) -> Continuations:
        """Return the k best continuations of beams with scores [R, B], given logits [R, B, V]."""
        best, parents, codes = beam_topk(logits, scores, k, backend=self.backend)
        return Continuations(best, parents, codes, None)


class Masked:
    """Mask the codebook; `table` has one row per node of the level, and a last row that allows no code."""

    def __init__(
        self, trie: Trie, level: int, backend: str, lse: Lse, *, table: bool, valid_only: bool = False
    ) -> None:
        self.trie, self.level, self.backend, self.lse, self.valid_only = trie, level, backend, lse, valid_only
        self.table: Tensor | None = None
        self.first = trie.level_starts[level]
        if table:
            nodes = torch.arange(self.first, trie.level_starts[level + 1], device=trie.codes.device)
            rows = trie.mask(nodes, level)
            self.table = torch.cat([rows, torch.zeros_like(rows[:1])])

    def choose(self, logits: Tensor, scores: Tensor, nodes: Tensor | None, k: int) -> Continuations:
        """Return the k best valid continuations. See `Unconstrained.choose`."""
        assert nodes is not None  # a constrained search has nodes
        if self.table is None:
            mask = self.trie.mask(nodes, self.level)
        else:
            mask = self.table[torch.where(nodes < 0, self.table.shape[0] - 1, nodes - self.first)]
        total = self.lse(logits.float().masked_fill(~mask, LOWEST)) if self.valid_only else None
        best, parents, codes = beam_topk(logits, scores, k, mask=mask, lse=total, backend=self.backend)
        reached = self.trie.step(nodes.gather(1, parents), codes)
        return Continuations(best, parents, codes, torch.where(best > float("-inf"), reached, -1))


class Listed:
    """Score only the codes that may follow."""

    def __init__(self, trie: Trie, level: int, backend: str, lse: Lse, *, valid_only: bool = False) -> None:
        self.trie, self.level, self.backend, self.lse, self.valid_only = trie, level, backend, lse, valid_only

    def choose(self, logits: Tensor, scores: Tensor, nodes: Tensor | None, k: int) -> Continuations:
        """Return the k best valid continuations. See `Unconstrained.choose`."""
        assert nodes is not None  # a constrained search has nodes
        codes, children = self.trie.allowed(nodes, self.level)
        known = logits.gather(2, codes.clamp(min=0)).float()
        mass = self.lse(torch.where(codes >= 0, known, LOWEST)) if self.valid_only else self.lse(logits)
        total = scores[..., None] + (known - mass[..., None])
        total = torch.where(codes >= 0, total, float("-inf")).flatten(1)
        if total.shape[1] < k:  # fewer candidates than beams: pad with dead beams
            total = torch.nn.functional.pad(total, (0, k - total.shape[1]), value=float("-inf"))
        best, at = topk(total, k, backend=self.backend)
        at = torch.where(best > float("-inf"), at, 0)
        reached = torch.where(best > float("-inf"), children.flatten(1).gather(1, at), -1)
        return Continuations(best, at // codes.shape[2], codes.flatten(1).gather(1, at).clamp(min=0), reached)


Constraint = Unconstrained | Masked | Listed


def make_constraints(
    trie: Trie | None, levels: int, backend: str, lse: Lse, *, valid_only: bool = False
) -> list[Constraint]:
    """Make one constraint per level, of the kind that suits that level of the trie."""
    if trie is None:
        if valid_only:
            raise ValueError("normalize='valid' needs valid ids: give the engine a trie")
        return [Unconstrained(backend) for _ in range(levels)]
    made: list[Constraint] = []
    for level, size in enumerate(trie.codebook_sizes):
        nodes = trie.level_starts[level + 1] - trie.level_starts[level]
        if trie.fanouts[level] * LISTED_SHARE <= size:
            made.append(Listed(trie, level, backend, lse, valid_only=valid_only))
        else:
            table = (nodes + 1) * size <= TABLE_BYTES
            made.append(Masked(trie, level, backend, lse, table=table, valid_only=valid_only))
    return made
