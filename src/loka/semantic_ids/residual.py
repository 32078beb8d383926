"""Residual k-means: a coarse code, then a code for what the coarse one missed, and so on.

    r_0 = x;   code_l = cluster of r_l among K_l centroids;   r_{l+1} = r_l - centroid_l[code_l]

so that x ~ sum of the chosen centroids, and items that share a prefix are similar. OneRec's sizes are (8192, 8192,
8192); (256, 256, 256) is common for catalogues of some ten thousand items.

Codes are not unique by themselves, so a last level tells apart the items that share all others (`resolve_collisions`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.semantic_ids.index import SemanticIndex, resolve_collisions
from loka.semantic_ids.kmeans import assign_nearest, fit_kmeans


@dataclass(frozen=True)
class ResidualKMeans:
    """Settings of residual k-means, which gives every item its codes, level by level.

    Args:
        codebook_sizes: one per level.
        seed: of the first centroids.

    Example:
        >>> fit_semantic_ids(vectors, ResidualKMeans((64, 64)))
    """

    codebook_sizes: tuple[int, ...] = (256, 256, 256)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.codebook_sizes or any(size < 1 for size in self.codebook_sizes):
            raise ValueError(f"codebook_sizes={self.codebook_sizes}, expected one positive size per level")


def fit_semantic_ids(
    embeddings: Tensor, config: ResidualKMeans | None = None, *, items: Tensor | None = None
) -> SemanticIndex:
    """Codes for items from their vectors.

    Args:
        embeddings: [n, d], float32 or float64, on any device.
        config: sizes of the codebooks.
        items: row r is item `items[r]`; by default r.

    Returns:
        The index of items and codes, with one level more than there are codebooks.

    Example:
        >>> index = fit_semantic_ids(embed_text(titles))
    """
    config = config or ResidualKMeans()
    left, codes, centroids = embeddings.detach(), [], []
    for level, size in enumerate(config.codebook_sizes):
        fitted = fit_kmeans(left, size, seed=config.seed + level)
        codes.append(fitted.codes)
        centroids.append(fitted.centroids)
        left = left - fitted.centroids[fitted.codes]
    numbers = torch.arange(embeddings.shape[0], device=embeddings.device) if items is None else items
    return resolve_collisions(
        SemanticIndex(torch.stack(codes, dim=1), config.codebook_sizes, numbers, tuple(centroids))
    )


def encode(index: SemanticIndex, embeddings: Tensor) -> Tensor:
    """Codes of new items, [m, levels with centroids]: the nearest centroid at each level; not unique."""
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
