"""The trie of valid ids as flat tensors, for constrained beam search on the GPU.

Nodes are numbered breadth first: 0 is the root, then all first codes, then all pairs, and so on; inside a level in the
order of their codes. Every node but the root hangs on one edge, so edge e leads to node e + 1 and the whole tree is one
CSR structure:

    codes of the children of node v:   codes[offsets[v] : offsets[v + 1]]   (ascending)
    the children themselves:           offsets[v] + 1 ... offsets[v + 1]

A step looks up the key (node, code) by binary search in the sorted keys node * width + code. `step`, `allowed`, `mask`
and `items` have static shapes and never copy to the host, so they can be part of a captured or compiled decoding step.
Node -1 means "not a valid prefix": it has no children, and stepping from it gives -1.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Trie:
    """The trie of valid ids as flat int64 tensors, made by `build_trie`.

    Args:
        offsets: [nodes + 1], where a node's children begin.
        codes: [nodes - 1], the code of every child.
        keys: [nodes - 1], sorted search keys of the children.
        leaf_items: [n_items], the item of every leaf.
        codebook_sizes: one per level.
        level_starts: first node of every level.
        fanouts: largest number of children of a node, per level.

    Example:
        >>> trie = index.trie.to("cpu")
    """

    offsets: Tensor
    codes: Tensor
    keys: Tensor
    leaf_items: Tensor
    codebook_sizes: tuple[int, ...]
    level_starts: tuple[int, ...]
    fanouts: tuple[int, ...]

    def __repr__(self) -> str:
        counts = [stop - start for start, stop in zip(self.level_starts, self.level_starts[1:], strict=False)]
        return f"Trie({self.leaf_items.numel():,} ids, nodes per level {counts}, largest fan-out per level {list(self.fanouts)})"

    @property
    def levels(self) -> int:
        """Number of codes per id."""
        return len(self.codebook_sizes)

    def to(self, device: torch.device | str) -> "Trie":
        """Return the trie on another device."""
        return replace(
            self,
            offsets=self.offsets.to(device),
            codes=self.codes.to(device),
            keys=self.keys.to(device),
            leaf_items=self.leaf_items.to(device),
        )

    def step(self, nodes: Tensor, codes: Tensor) -> Tensor:
        """Return the child reached from each node by each code (shapes broadcast); -1 if there is none."""
        width = max(self.codebook_sizes)
        keys = nodes * width + codes
        edge = torch.searchsorted(self.keys, keys.contiguous()).clamp_(max=self.keys.numel() - 1)
        valid = (self.keys[edge] == keys) & (nodes >= 0) & (codes >= 0) & (codes < width)
        return torch.where(valid, edge + 1, -1)

    def allowed(self, nodes: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Return the codes that may follow and their nodes, [..., fanouts[level]] each, padded with -1.

        `level` is how many codes the nodes already have (0 for the root); it determines the shape.
        The cost of scoring only these codes grows with the fan-out, not with the codebook.
        """
        self._check_level(level)
        first, stop = self.offsets[nodes.clamp(min=0)], self.offsets[nodes.clamp(min=0) + 1]
        edges = first[..., None] + torch.arange(self.fanouts[level], device=self.offsets.device)
        valid = (edges < stop[..., None]) & (nodes >= 0)[..., None]
        codes = self.codes[edges.clamp(max=self.codes.numel() - 1)]
        return torch.where(valid, codes, -1), torch.where(valid, edges + 1, -1)

    def mask(self, nodes: Tensor, level: int) -> Tensor:
        """Return bool [..., codebook size of the level]: which codes may follow."""
        self._check_level(level)
        every = torch.arange(self.codebook_sizes[level], device=self.keys.device)
        return self.step(nodes[..., None], every) >= 0

    def follow(self, codes: Tensor) -> tuple[Tensor, ...]:
        """Return which codes may follow each prefix of ids [B, levels]: bool [B, codebook size] per level."""
        if codes.dim() != 2 or codes.shape[1] != self.levels:
            raise ValueError(f"codes have shape {tuple(codes.shape)}, expected [B, {self.levels}]")
        nodes, masks = torch.zeros_like(codes[:, 0]), []
        for level in range(self.levels):
            masks.append(self.mask(nodes, level))
            nodes = self.step(nodes, codes[:, level])
        return tuple(masks)

    def items(self, nodes: Tensor) -> Tensor:
        """Return the item of each leaf; -1 for inner nodes and for node -1."""
        leaf = nodes - self.level_starts[-2]
        return torch.where(leaf >= 0, self.leaf_items[leaf.clamp(0, self.leaf_items.numel() - 1)], -1)

    def _check_level(self, level: int) -> None:
        if not 0 <= level < self.levels:
            raise ValueError(f"level={level}, expected the number of codes already chosen, in [0, {self.levels})")


def build_trie(codes: Tensor, codebook_sizes: tuple[int, ...], items: Tensor) -> Trie:
    """Build the trie of the rows of `codes` [n, levels], which must be distinct; row i leads to items[i]."""
    if codes.shape[0] == 0:
        raise ValueError("no ids: a trie needs at least one")
    device = codes.device
    ordered, leaf_items = _sort_rows(codes, items)
    width = max(codebook_sizes)
    parents = torch.zeros(codes.shape[0], dtype=torch.int64, device=device)  # the node of each row's current prefix
    fresh = torch.zeros(codes.shape[0], dtype=torch.bool, device=device)
    fresh[:1] = True
    starts, edge_codes, edge_parents, fanouts = [0, 1], [], [], []
    for level in range(codes.shape[1]):
        code = ordered[:, level]
        fresh[1:] |= code[1:] != code[:-1]  # a new node wherever the prefix differs from the row above
        edge_codes.append(code[fresh])
        edge_parents.append(parents[fresh])
        parents = starts[-1] + fresh.cumsum(0) - 1
        fanouts.append(int(torch.bincount(edge_parents[-1] - starts[-2]).max()))
        starts.append(starts[-1] + int(fresh.sum()))
    children = torch.bincount(torch.cat(edge_parents), minlength=starts[-1])
    return Trie(
        offsets=torch.cat([children.new_zeros(1), children.cumsum(0)]),
        codes=torch.cat(edge_codes),
        keys=torch.cat(edge_parents) * width + torch.cat(edge_codes),
        leaf_items=leaf_items,
        codebook_sizes=tuple(codebook_sizes),
        level_starts=tuple(starts),
        fanouts=tuple(fanouts),
    )


def _sort_rows(codes: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
    """Sort rows lexicographically, with their items. Raises for equal rows."""
    order = torch.arange(codes.shape[0], device=codes.device)
    for level in reversed(range(codes.shape[1])):
        order = order[torch.argsort(codes[order, level], stable=True)]
    ordered = codes[order]
    same = (ordered[1:] == ordered[:-1]).all(1)
    if bool(same.any()):
        place = int(same.nonzero()[0, 0])
        pair = items[order[place : place + 2]].tolist()
        raise ValueError(
            f"{int(same.sum())} items have the codes of another, e.g. items {pair[0]} and {pair[1]} have "
            f"{tuple(ordered[place].tolist())}: call resolve_collisions first"
        )
    return ordered, items[order]
