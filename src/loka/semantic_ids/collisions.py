"""Make every item's codes unique, by one of two methods:

- `level`: append one level that numbers the items sharing a tuple 0, 1, 2, ... in the order of their rows; its codebook
  is as large as the largest such group. Always possible, changes no existing code, but the added code carries no
  meaning and every id is one step longer.
- `nearest`: keep the length. Of the items sharing a tuple, the one nearest to its last centroid stays; the others move
  to the nearest last code that no item with the same prefix uses, closest pairs first. Items that did not collide keep
  their codes. Needs the centroids and the embeddings. Raises if a prefix has more items than there are last codes.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from loka.semantic_ids.index import SemanticIndex
from loka.semantic_ids.kmeans import measure_distances

Resolution = Literal["level", "nearest"]


def resolve_collisions(index: SemanticIndex, method: Resolution, *, embeddings: Tensor | None = None) -> SemanticIndex:
    """Return an index in which every item has its own codes.

    Args:
        index: an index in which items may share codes.
        method: `level` appends a level, even if nothing collides, so that the shape of the ids does not depend on the
            data; `nearest` moves items to free codes.
        embeddings: for `nearest`, rows in the order of `index.codes`.

    Returns:
        A new index without collisions.

    Example:
        >>> resolve_collisions(index, "level").codes.shape[1] == index.codes.shape[1] + 1
        True
    """
    if method == "level":
        return _append_level(index)
    if method != "nearest":
        raise ValueError(f"method={method!r}, expected 'level' or 'nearest'")
    if len(index.centroids) != index.levels:
        raise ValueError(
            f"'nearest' needs centroids for all {index.levels} levels, the index has {len(index.centroids)}: use method='level'"
        )
    if embeddings is None or embeddings.shape != (len(index), index.centroids[0].shape[1]):
        seen = None if embeddings is None else tuple(embeddings.shape)
        raise ValueError(f"'nearest' needs embeddings [{len(index)}, {index.centroids[0].shape[1]}], got {seen}")
    return replace(index, codes=_move_to_free(index, embeddings).to(index.codes.device))


def _append_level(index: SemanticIndex) -> SemanticIndex:
    _, group, counts = torch.unique(index.codes, dim=0, return_inverse=True, return_counts=True)
    order = torch.argsort(group, stable=True)
    starts = counts.cumsum(0) - counts
    number = torch.empty_like(group)
    number[order] = torch.arange(len(index), device=group.device) - starts[group[order]]
    return replace(
        index,
        codes=torch.cat([index.codes, number[:, None]], dim=1),
        codebook_sizes=(*index.codebook_sizes, int(counts.max())),
    )


def _move_to_free(index: SemanticIndex, embeddings: Tensor) -> Tensor:
    index = index.to("cpu")  # a loop of small steps over the few prefixes with collisions is faster on the CPU
    codes, table = index.codes.clone(), index.centroids[-1]
    left = embeddings.cpu().to(table.dtype)
    for level in range(index.levels - 1):
        left = left - index.centroids[level][codes[:, level]]
    movers = _find_movers(codes, (left - table[codes[:, -1]]).square().sum(1))
    leading = torch.cat([torch.zeros_like(codes[:, :1]), codes[:, :-1]], dim=1)  # a single level has the empty prefix
    _, prefix, counts = torch.unique(leading, dim=0, return_inverse=True, return_counts=True)
    groups = torch.split(torch.argsort(prefix, stable=True), counts.tolist())
    for one in torch.unique(prefix[movers]).tolist():
        members = groups[one]
        moving = members[movers[members]]
        free = torch.ones(table.shape[0], dtype=torch.bool)
        free[codes[members, -1]] = False
        choices = free.nonzero()[:, 0]
        if moving.numel() > choices.numel():
            row = codes[moving[0], :-1].tolist()
            raise ValueError(
                f"{members.numel()} items share the prefix {tuple(row)}, but the last level has {table.shape[0]} codes: "
                "use method='level', a larger last codebook, or balanced codes"
            )
        codes[moving, -1] = choices[_match_closest(measure_distances(left[moving], table[choices]))]
    return codes


def _find_movers(codes: Tensor, distance: Tensor) -> Tensor:
    """Return bool [n]: every item of a colliding group except the one nearest to its centroid (the first of equals)."""
    _, group = torch.unique(codes, dim=0, return_inverse=True)
    order = torch.argsort(distance, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    movers = torch.zeros(codes.shape[0], dtype=torch.bool, device=codes.device)
    movers[order[1:]] = group[order[1:]] == group[order[:-1]]
    return movers


def _match_closest(distance: Tensor) -> Tensor:
    """Match each row to a column of its own, closest pairs first: [m, f] -> [m], f >= m."""
    cost = distance.clone()
    result = torch.empty(cost.shape[0], dtype=torch.int64, device=cost.device)
    for _ in range(cost.shape[0]):
        row, column = divmod(int(cost.argmin()), cost.shape[1])
        result[row] = column
        cost[row, :] = torch.inf
        cost[:, column] = torch.inf
    return result
