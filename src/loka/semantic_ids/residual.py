"""Residual k-means: a coarse code, then a code for what the coarse one missed, and so on.

    r_0 = x;   code_l = cluster of r_l among K_l centroids;   r_{l+1} = r_l - centroid_l[code_l]

so that x ~ sum of the chosen centroids, and items that share a prefix are similar. OneRec's sizes are (8192, 8192,
8192); (256, 256, 256) is common for catalogues of some ten thousand items. With `balanced`, every code of a level is
used by at most ceil(slack n / K) items.

Codes are not necessarily unique: `collisions=` chooses how to resolve collisions (see `loka.semantic_ids.collisions`).
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from loka.semantic_ids.balance import fit_balanced_kmeans
from loka.semantic_ids.collisions import resolve_collisions
from loka.semantic_ids.index import SemanticIndex
from loka.semantic_ids.kmeans import assign_nearest, fit_kmeans


@dataclass(frozen=True)
class ResidualKMeans:
    """Settings of residual k-means, which assigns codes level by level.

    Args:
        codebook_sizes: number of codes per level.
        balanced: limit how many items may use a code.
        slack: with `balanced`, a code is used by at most ceil(slack n / codes) items.
        iterations: largest number of iterations per level.
        tolerance: stop when the error improves by less than this, relatively.
        batch_size: size of minibatches; None: all items at once.
        seed: seed of the initialization.

    Example:
        >>> fit_semantic_ids(torch.randn(100, 8), ResidualKMeans((4, 4)), collisions="keep").codes.shape
        torch.Size([100, 2])
    """

    codebook_sizes: tuple[int, ...] = (256, 256, 256)
    balanced: bool = False
    slack: float = 1.0
    iterations: int = 50
    tolerance: float = 1e-4
    batch_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.codebook_sizes or any(size < 1 for size in self.codebook_sizes):
            raise ValueError(f"codebook_sizes={self.codebook_sizes}, expected one positive size per level")
        if self.slack != 1.0 and not self.balanced:
            raise ValueError(f"slack={self.slack} has no effect without balanced=True: set it, or leave slack at 1")
        if self.slack < 1:
            raise ValueError(f"slack={self.slack}, expected at least 1: less cannot hold all items")
        if self.iterations < 1 or self.tolerance < 0 or (self.batch_size is not None and self.batch_size < 1):
            raise ValueError(
                f"iterations={self.iterations}, tolerance={self.tolerance}, batch_size={self.batch_size}: "
                "expected >= 1, >= 0 and >= 1 or None"
            )


def fit_semantic_ids(
    embeddings: Tensor,
    config: ResidualKMeans | None = None,
    *,
    collisions: Literal["level", "nearest", "keep"],
    items: Tensor | None = None,
) -> SemanticIndex:
    """Compute semantic ids of items from their vectors.

    Args:
        embeddings: [n, d], float32 or float64, on any device.
        config: sizes of the codebooks and how they are fitted.
        collisions: "level" adds a level, "nearest" moves items to free codes, "keep" keeps collisions (to study
            quality; there is no trie then).
        items: row r is item `items[r]`; by default r.

    Returns:
        The index of items and codes.

    Example:
        >>> index = fit_semantic_ids(torch.randn(100, 8), ResidualKMeans((8, 8)), collisions="level")
        >>> index.codes.shape  # two levels, and one that tells items apart whose codes are the same
        torch.Size([100, 3])
    """
    config = config or ResidualKMeans()
    if collisions not in ("level", "nearest", "keep"):
        raise ValueError(f"collisions={collisions!r}, expected 'level', 'nearest' or 'keep'")
    left, codes, centroids = embeddings.detach(), [], []
    for level, size in enumerate(config.codebook_sizes):
        fitted = _fit_level(left, size, config, seed=config.seed + level)
        codes.append(fitted[1])
        centroids.append(fitted[0])
        left = left - fitted[0][fitted[1]]
    numbers = torch.arange(embeddings.shape[0], device=embeddings.device) if items is None else items
    index = SemanticIndex(torch.stack(codes, dim=1), config.codebook_sizes, numbers, tuple(centroids))
    return index if collisions == "keep" else resolve_collisions(index, collisions, embeddings=embeddings.detach())


def encode(index: SemanticIndex, embeddings: Tensor) -> Tensor:
    """Return codes of new items, [m, levels with centroids]: the nearest centroids, without capacity or uniqueness."""
    if not index.centroids:
        raise ValueError("the index has no centroids (it was read from a table of codes): new items cannot be encoded")
    if embeddings.dim() != 2 or embeddings.shape[1] != index.centroids[0].shape[1]:
        raise ValueError(
            f"embeddings have shape {tuple(embeddings.shape)}, expected [m, {index.centroids[0].shape[1]}]"
        )
    left, codes = embeddings.detach().to(index.centroids[0].dtype), []
    for table in index.centroids:
        code, _ = assign_nearest(left, table)
        codes.append(code)
        left = left - table[code]
    return torch.stack(codes, dim=1)


def _fit_level(points: Tensor, size: int, config: ResidualKMeans, *, seed: int) -> tuple[Tensor, Tensor]:
    fit = partial(fit_balanced_kmeans, slack=config.slack) if config.balanced else fit_kmeans
    fitted = fit(
        points, size, seed=seed, iterations=config.iterations, tolerance=config.tolerance, batch_size=config.batch_size
    )
    return fitted.centroids, fitted.codes
