"""K-means: as good as scikit-learn's, reproducible, no empty cluster while there are points to fill it."""

import pytest
import torch
from sklearn.cluster import KMeans

from loka.semantic_ids import kmeans as module
from loka.semantic_ids.kmeans import _reseed_empty, assign_nearest, average_clusters, fit_kmeans, measure_distances


def draw_blobs(points: int, dimensions: int, blobs: int, *, seed: int = 0, spread: float = 0.1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(blobs, dimensions, generator=generator)
    member = torch.randint(blobs, (points,), generator=generator)
    return centers[member] + spread * torch.randn(points, dimensions, generator=generator)


def error(points: torch.Tensor, centroids: torch.Tensor) -> float:
    return float(torch.cdist(points.double(), centroids.double()).square().min(1).values.sum())


@pytest.mark.parametrize("batch_size", [None, 256])
@pytest.mark.parametrize("seed", range(3))
def test_about_as_good_as_sklearn(seed: int, batch_size: int | None) -> None:
    points = draw_blobs(2000, 8, 40, seed=seed, spread=0.6)
    ours = error(points, fit_kmeans(points, 32, seed=seed, batch_size=batch_size).centroids)
    theirs = KMeans(32, n_init=3, random_state=seed).fit(points.numpy()).inertia_
    assert ours < theirs * (1.03 if batch_size is None else 1.06)


def test_finds_separated_blobs() -> None:
    points = draw_blobs(600, 4, 12, spread=0.01)
    result = fit_kmeans(points, 12)
    assert error(points, result.centroids) < 600 * 4 * 0.01**2 * 1.1
    assert result.codes.unique().numel() == 12


def test_codes_are_the_nearest_centroids() -> None:
    points = draw_blobs(500, 6, 20)
    result = fit_kmeans(points, 16, iterations=3)
    assert torch.equal(result.codes, torch.cdist(points, result.centroids).argmin(1))


@pytest.mark.parametrize("batch_size", [None, 64])
def test_same_seed_same_result(batch_size: int | None) -> None:
    points = draw_blobs(700, 5, 30, spread=0.5)
    first, again = (fit_kmeans(points, 20, seed=3, batch_size=batch_size) for _ in range(2))
    other = fit_kmeans(points, 20, seed=4, batch_size=batch_size)
    assert torch.equal(first.centroids, again.centroids)
    assert torch.equal(first.codes, again.codes)
    assert not torch.equal(first.codes, other.codes)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    points = draw_blobs(500, 6, 20)
    whole = fit_kmeans(points.double(), 16)
    monkeypatch.setattr(module, "CHUNK", 16 * 7)
    pieces = fit_kmeans(points.double(), 16)
    assert torch.equal(whole.codes, pieces.codes)
    assert torch.allclose(whole.centroids, pieces.centroids, rtol=1e-12)


def test_average_is_the_mean_and_empty_keeps_its_place() -> None:
    points = torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 0.0]])
    old = torch.full((4, 2), 7.0)
    centroids, counts = average_clusters(points, torch.tensor([2, 2, 0]), old)
    assert centroids.tolist() == [[10.0, 0.0], [7.0, 7.0], [2.0, 3.0], [7.0, 7.0]]
    assert counts.tolist() == [1, 0, 2, 0]


def test_empty_clusters_move_to_the_farthest_points() -> None:
    points = torch.tensor([[0.0], [1.0], [10.0], [20.0]])
    centroids = torch.tensor([[0.0], [500.0], [600.0]])
    codes, distance = assign_nearest(points, centroids)
    moved, any_moved = _reseed_empty(points, centroids, torch.bincount(codes, minlength=3), distance)
    assert any_moved
    assert moved.tolist() == [[0.0], [20.0], [10.0]]


@pytest.mark.parametrize("batch_size", [None, 50])
def test_no_empty_cluster_in_skewed_data(batch_size: int | None) -> None:
    """Nearly all points in one spot, a few far apart: the classic way to lose clusters."""
    points = torch.cat([1e-3 * torch.randn(400, 3, generator=torch.Generator().manual_seed(0)), 100 * torch.eye(3)])
    for seed in range(5):
        codes = fit_kmeans(points, 40, seed=seed, iterations=2, batch_size=batch_size).codes
        assert codes.unique().numel() == 40


def test_fewer_distinct_points_than_clusters_leaves_some_unused() -> None:
    points = torch.eye(4)[torch.arange(40) % 4]
    result = fit_kmeans(points, 10)
    assert result.codes.unique().numel() == 4
    assert error(points, result.centroids) == 0


def test_as_many_clusters_as_points() -> None:
    points = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    result = fit_kmeans(points, 20)
    assert result.codes.unique().numel() == 20
    assert fit_kmeans(points, 1).centroids[0].tolist() == pytest.approx(points.mean(0).tolist(), abs=1e-6)


def test_distances_match_cdist_and_are_not_negative() -> None:
    points = 1000 + draw_blobs(50, 8, 5)
    distance = measure_distances(points.double(), points[:7].double())
    assert torch.allclose(distance, torch.cdist(points.double(), points[:7].double()).square(), atol=1e-6)
    assert float(measure_distances(points, points).min()) >= 0


def test_bad_requests() -> None:
    points = torch.randn(10, 2)
    with pytest.raises(ValueError, match="clusters=11 for 10 points"):
        fit_kmeans(points, 11)
    with pytest.raises(ValueError, match="float32 or float64"):
        fit_kmeans(points.half(), 2)
    with pytest.raises(ValueError, match="1 of 10 points hold NaN"):
        fit_kmeans(torch.where(torch.arange(10)[:, None] == 3, torch.nan, points), 2)
    with pytest.raises(ValueError, match="iterations"):
        fit_kmeans(points, 2, iterations=0)
