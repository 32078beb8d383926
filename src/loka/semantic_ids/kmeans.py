"""K-means in plain torch: greedy k-means++ seeding, Lloyd's iterations or minibatches, empty clusters re-seeded.

    minimise  sum_i || x_i - c_{a(i)} ||^2   over centroids c and assignments a

Distances are computed in chunks, so memory stays near `CHUNK` entries whatever the number of points and clusters. Means
are summed in float64.

Deterministic for a seed on a given device: random numbers come from a CPU generator, sampling uses an integer
cumulative sum and means a segmented sum, because floating-point `cumsum` and `index_add` on a GPU change from run to
run.

A cluster that loses all its points moves to the point that is farthest from its own centroid. Clusters stay empty only
when there are fewer distinct points than clusters.

What this does not do: restarts from several seeds (greedy seeding makes them rarely worth their cost) and cosine
distance (normalise the points first).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 24  # distances held at once: 64 MB in float32
_SEED_POINTS = 16_384  # k-means++ samples this many points, or 8 per cluster if that is more
_WEIGHT_LEVELS = 2**30  # resolution of the integer sampling weights


@dataclass(frozen=True)
class Clustering:
    """Centroids [k, d] in the dtype of the points, code of every point [n] (int64), and passes over the data."""

    centroids: Tensor
    codes: Tensor
    iterations: int


def fit_kmeans(
    points: Tensor,
    clusters: int,
    *,
    seed: int = 0,
    iterations: int = 50,
    tolerance: float = 1e-4,
    batch_size: int | None = None,
) -> Clustering:
    """Cluster the rows of `points`; stops early when the error improves by less than `tolerance`, relatively.

    With `batch_size`, each iteration is one pass of minibatch k-means (running means per cluster) in a seeded random
    order: cheaper per step on large data, slightly worse. The final codes are always the nearest centroids over all
    points.
    """
    check_points(points, clusters)
    if iterations < 1 or tolerance < 0 or (batch_size is not None and batch_size < 1):
        raise ValueError(
            f"iterations={iterations}, tolerance={tolerance}, batch_size={batch_size}: expected >= 1, >= 0, >= 1"
        )
    generator = torch.Generator().manual_seed(seed)
    centroids = _seed_centroids(points, clusters, generator)
    previous, done = math.inf, 0
    for done in range(1, iterations + 1):  # noqa: B007  the count is part of the result
        if batch_size is None:
            codes, distance = assign_nearest(points, centroids)
            centroids, counts = average_clusters(points, codes, centroids)
        else:
            centroids = _pass_minibatches(points, centroids, batch_size, generator)
            codes, distance = assign_nearest(points, centroids)
            counts = torch.bincount(codes, minlength=clusters)
        centroids, moved = _reseed_empty(points, centroids, counts, distance)
        error = float(distance.sum(dtype=torch.float64))
        if not moved and previous - error <= tolerance * error:
            break
        previous = error
    return _settle(points, centroids, done)


def assign_nearest(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the code of every point's nearest centroid (the lowest of equals), and the squared distance to it."""
    codes = torch.empty(points.shape[0], dtype=torch.int64, device=points.device)
    distance = torch.empty(points.shape[0], dtype=points.dtype, device=points.device)
    step = max(1, CHUNK // centroids.shape[0])
    for start in range(0, points.shape[0], step):
        nearest = measure_distances(points[start : start + step], centroids).min(1)
        codes[start : start + step] = nearest.indices
        distance[start : start + step] = nearest.values
    return codes, distance


def measure_distances(points: Tensor, centroids: Tensor) -> Tensor:
    """Return squared Euclidean distances [n, k], clamped at 0."""
    cross = points @ centroids.T
    lengths = points.square().sum(1, keepdim=True) + centroids.square().sum(1)
    return (lengths - 2 * cross).clamp_(min=0)


def average_clusters(points: Tensor, codes: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of each cluster's points (an empty cluster keeps its centroid), and their number."""
    counts = torch.bincount(codes, minlength=centroids.shape[0])
    ordered = points[torch.argsort(codes, stable=True)].double()
    sums = torch.segment_reduce(ordered, "sum", lengths=counts, axis=0, initial=0, unsafe=True)
    means = (sums / counts.clamp(min=1)[:, None]).to(points.dtype)
    return torch.where((counts > 0)[:, None], means, centroids), counts


def check_points(points: Tensor, clusters: int) -> None:
    """Raise unless `points` is a finite float matrix with at least `clusters` rows."""
    if points.dim() != 2 or points.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"points are {points.dtype} {tuple(points.shape)}, expected a float32 or float64 matrix [n, d]"
        )
    if not 1 <= clusters <= points.shape[0]:
        raise ValueError(
            f"clusters={clusters} for {points.shape[0]} points: expected between 1 and the number of points"
        )
    bad = int((~torch.isfinite(points)).any(1).sum())
    if bad:
        raise ValueError(f"{bad} of {points.shape[0]} points hold NaN or infinity: k-means needs finite ones")


def _seed_centroids(points: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Seed with greedy k-means++: draw a few candidates by squared distance, and keep the one that reduces it most."""
    limit = max(_SEED_POINTS, 8 * clusters)
    if points.shape[0] > limit:
        points = points[torch.randperm(points.shape[0], generator=generator)[:limit].to(points.device)]
    trials = 2 + int(math.log(clusters))
    draws = torch.rand(clusters, trials, generator=generator, dtype=torch.float64).to(points.device)
    first = (draws[0, :1] * points.shape[0]).long()
    chosen = [first]
    nearest = measure_distances(points[first], points)[0]
    for step in range(1, clusters):
        weights = (nearest / nearest.max().clamp(min=torch.finfo(nearest.dtype).tiny) * _WEIGHT_LEVELS).long()
        ladder = weights.cumsum(0)
        target = (draws[step] * ladder[-1]).long()
        candidates = torch.searchsorted(ladder, target, right=True).clamp_(max=points.shape[0] - 1)
        improved = torch.minimum(nearest, measure_distances(points[candidates], points))
        best = improved.sum(1).argmin()
        nearest = improved[best]
        chosen.append(candidates[best][None])
    return points[torch.cat(chosen)].clone()


def _pass_minibatches(points: Tensor, centroids: Tensor, batch_size: int, generator: torch.Generator) -> Tensor:
    """Run one pass of running means: a centroid is the mean of the points assigned to it so far in this pass."""
    order = torch.randperm(points.shape[0], generator=generator).to(points.device)
    seen = torch.zeros(centroids.shape[0], dtype=torch.int64, device=points.device)
    for start in range(0, points.shape[0], batch_size):
        batch = points[order[start : start + batch_size]]
        codes, _ = assign_nearest(batch, centroids)
        means, counts = average_clusters(batch, codes, centroids)
        seen += counts
        rate = (counts.double() / seen.clamp(min=1)).to(points.dtype)
        centroids = centroids + rate[:, None] * (means - centroids)
    return centroids


def _reseed_empty(points: Tensor, centroids: Tensor, counts: Tensor, distance: Tensor) -> tuple[Tensor, bool]:
    """Move empty clusters to the points farthest from their centroids, while there are any at a distance above 0."""
    empty = (counts == 0).nonzero()[:, 0]
    farthest = torch.sort(distance, descending=True, stable=True).indices[: empty.numel()]
    farthest = farthest[distance[farthest] > 0]
    if farthest.numel() == 0:
        return centroids, False
    centroids = centroids.clone()
    centroids[empty[: farthest.numel()]] = points[farthest]
    return centroids, True


def _settle(points: Tensor, centroids: Tensor, iterations: int) -> Clustering:
    """Return final centroids and nearest codes. Clusters emptied by the last update are re-seeded, at most k times."""
    codes, distance = assign_nearest(points, centroids)
    for _ in range(centroids.shape[0]):
        counts = torch.bincount(codes, minlength=centroids.shape[0])
        moved_centroids, moved = _reseed_empty(points, centroids, counts, distance)
        if not moved:
            break
        centroids = moved_centroids
        codes, distance = assign_nearest(points, centroids)
    return Clustering(centroids, codes, iterations)
