"""Balanced assignment: never above capacity, and close to the optimum that SciPy finds."""

import math

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from loka.semantic_ids.balance import assign_balanced, fit_balanced_kmeans
from loka.semantic_ids.kmeans import fit_kmeans


def draw(points: int, centroids: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(points, 4, generator=generator).exp(), torch.randn(centroids, 4, generator=generator).exp()


def total(points: torch.Tensor, centroids: torch.Tensor, codes: torch.Tensor) -> float:
    return float((points - centroids[codes]).square().sum())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("points", "clusters", "capacity"), [(120, 8, 15), (120, 8, 25), (97, 10, 10)])
def test_close_to_the_optimum(points: int, clusters: int, capacity: int, seed: int) -> None:
    x, c = draw(points, clusters, seed=seed)
    codes = assign_balanced(x, c, capacity, epsilon=0.01)
    assert int(torch.bincount(codes, minlength=clusters).max()) <= capacity
    cost = torch.cdist(x.double(), c.double()).square().repeat(1, capacity)
    rows, columns = linear_sum_assignment(cost.numpy())
    optimum = float(cost[rows, columns].sum())
    promised = points * 0.01 * float(torch.cdist(x.double(), c.double()).square().mean())
    assert optimum * 0.9999 <= total(x, c, codes) <= optimum + promised


def test_ample_capacity_is_the_nearest_assignment() -> None:
    x, c = draw(200, 10, seed=0)
    assert torch.equal(assign_balanced(x, c, 200), torch.cdist(x, c).argmin(1))


def test_identical_points_are_spread() -> None:
    codes = assign_balanced(torch.zeros(30, 2), torch.randn(10, 2, generator=torch.Generator().manual_seed(0)), 3)
    assert torch.bincount(codes, minlength=10).tolist() == [3] * 10
    everything_equal = assign_balanced(torch.zeros(30, 2), torch.zeros(10, 2), 3)
    assert torch.bincount(everything_equal, minlength=10).tolist() == [3] * 10


@pytest.mark.parametrize("slack", [1.0, 1.3])
def test_balanced_kmeans_respects_capacity_and_costs_little(slack: float) -> None:
    generator = torch.Generator().manual_seed(0)
    centers = 2 * torch.randn(20, 6, generator=generator)
    x = centers[
        (20 * torch.rand(1500, generator=generator) ** 3).long()
    ]  # skewed: some blobs hold far more than others
    x = x + torch.randn(1500, 6, generator=generator)
    free, balanced = fit_kmeans(x, 24), fit_balanced_kmeans(x, 24, slack=slack)
    capacity = math.ceil(slack * 1500 / 24)
    assert int(torch.bincount(free.codes).max()) > capacity
    assert int(torch.bincount(balanced.codes).max()) <= capacity
    assert total(x, balanced.centroids, balanced.codes) < 1.6 * total(x, free.centroids, free.codes)


def test_same_seed_same_result() -> None:
    x, _ = draw(300, 1, seed=5)
    first, again = fit_balanced_kmeans(x, 16, seed=1), fit_balanced_kmeans(x, 16, seed=1)
    assert torch.equal(first.codes, again.codes)
    assert torch.equal(first.centroids, again.centroids)


def test_one_cluster() -> None:
    assert assign_balanced(torch.randn(5, 2), torch.randn(1, 2), 5).tolist() == [0] * 5


def test_bad_requests() -> None:
    x, c = draw(10, 3, seed=0)
    with pytest.raises(ValueError, match="hold 9 points, not 10"):
        assign_balanced(x, c, 3)
    with pytest.raises(ValueError, match="epsilon"):
        assign_balanced(x, c, 4, epsilon=0)
    with pytest.raises(ValueError, match="slack"):
        fit_balanced_kmeans(x, 3, slack=0.5)
