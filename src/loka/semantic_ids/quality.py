"""Quality of semantic ids: collisions, codebook use, and the variance that the codes do not explain.

Per level, with u_c the share of items that use code c:

    used        codes that at least one item uses
    perplexity  exp(- sum u_c ln u_c): the equivalent number of equally used codes; the codebook size if balanced
    imbalance   largest share over the mean share, max u_c * K; 1 if balanced
    residual    sum ||x - sum of centroids so far||^2 / sum ||x - mean x||^2: the share of variance not yet explained

`collision_rate` is the share of items that share their codes with another item.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LevelQuality:
    """The figures of one level. `residual` is None without centroids or embeddings."""

    codebook_size: int
    used: int
    perplexity: float
    imbalance: float
    residual: float | None


@dataclass(frozen=True)
class Quality:
    """The figures of an index. Prints as a small table."""

    items: int
    distinct: int
    colliding: int
    largest_collision: int
    levels: tuple[LevelQuality, ...]

    @property
    def collision_rate(self) -> float:
        """Share of items whose codes another item has too; 0 for an empty index."""
        return self.colliding / self.items if self.items else 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.items:,} items, {self.distinct:,} distinct ids, {100 * self.collision_rate:.2f} % collide "
            f"(largest group {self.largest_collision})"
        ]
        for number, level in enumerate(self.levels):
            left = "" if level.residual is None else f", {100 * level.residual:.1f} % of variance left"
            lines.append(
                f"level {number}: {level.used} of {level.codebook_size} codes used, perplexity {level.perplexity:.1f}, "
                f"imbalance {level.imbalance:.2f}{left}"
            )
        return "\n".join(lines)


def measure_quality(
    codes: Tensor,
    codebook_sizes: tuple[int, ...],
    *,
    centroids: tuple[Tensor, ...] = (),
    embeddings: Tensor | None = None,
) -> Quality:
    """Measure codes [n, levels]. Residuals need the centroids and the embeddings [n, d] that they were fitted to."""
    if embeddings is not None and not centroids:
        raise ValueError(
            "embeddings were given, but the index has no centroids: reconstruction error cannot be computed"
        )
    _, counts = torch.unique(codes, dim=0, return_counts=True)
    residuals = _measure_residuals(codes, centroids, embeddings)
    levels = tuple(_measure_level(codes[:, i], size, residuals[i]) for i, size in enumerate(codebook_sizes))
    return Quality(
        items=codes.shape[0],
        distinct=counts.numel(),
        colliding=int(counts[counts > 1].sum()),
        largest_collision=int(counts.max()) if counts.numel() else 0,
        levels=levels,
    )


def _measure_level(codes: Tensor, size: int, residual: float | None) -> LevelQuality:
    counts = torch.bincount(codes, minlength=size).double()
    share = counts / counts.sum().clamp(min=1)
    used = share[share > 0]
    return LevelQuality(
        codebook_size=size,
        used=used.numel(),
        perplexity=float(torch.exp(-(used * used.log()).sum())) if used.numel() else 0.0,
        imbalance=float(share.max()) * size,
        residual=residual,
    )


def _measure_residuals(codes: Tensor, centroids: tuple[Tensor, ...], embeddings: Tensor | None) -> list[float | None]:
    result: list[float | None] = [None] * codes.shape[1]
    if embeddings is None:
        return result
    if embeddings.shape != (codes.shape[0], centroids[0].shape[1]):
        expected = (codes.shape[0], centroids[0].shape[1])
        raise ValueError(
            f"embeddings have shape {tuple(embeddings.shape)}, expected {expected}, rows in the order of the codes"
        )
    left = embeddings.double()
    variance = float((left - left.mean(0)).square().sum())
    for level, table in enumerate(centroids):
        left = left - table.double()[codes[:, level]]
        result[level] = float(left.square().sum()) / variance if variance else 0.0
    return result
