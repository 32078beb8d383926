"""Residual codes: each level explains more, similar items share prefixes, every request about collisions is kept."""

import pytest
import torch

from loka.semantic_ids import ResidualKMeans, fit_semantic_ids
from loka.semantic_ids.residual import encode


def draw_items(items: int = 600, *, seed: int = 0) -> torch.Tensor:
    """A hierarchy: 10 families, 5 members each, noise."""
    generator = torch.Generator().manual_seed(seed)
    family = 10 * torch.randn(10, 8, generator=generator)
    member = torch.randn(10, 5, 8, generator=generator)
    f, m = torch.randint(10, (items,), generator=generator), torch.randint(5, (items,), generator=generator)
    return family[f] + member[f, m] + 0.05 * torch.randn(items, 8, generator=generator)


@pytest.mark.parametrize("balanced", [False, True])
def test_each_level_leaves_less(balanced: bool) -> None:
    items = draw_items()
    index = fit_semantic_ids(items, ResidualKMeans((16, 16, 16), balanced=balanced), collisions="keep")
    left = [level.residual for level in index.quality(items).levels]
    assert all(value is not None for value in left)
    assert 1 > left[0] > left[1] > left[2] > 0
    assert left[2] < 0.04


def test_codes_and_centroids_reconstruct() -> None:
    items = draw_items()
    index = fit_semantic_ids(items, ResidualKMeans((16, 16)), collisions="keep")
    rebuilt = sum(table[index.codes[:, level]] for level, table in enumerate(index.centroids))
    quality = index.quality(items)
    variance = float((items - items.mean(0)).square().sum())
    assert float((items - rebuilt).square().sum()) / variance == pytest.approx(quality.levels[1].residual, rel=1e-4)
    assert torch.equal(encode(index, items), index.codes)


def test_balanced_codes_are_balanced() -> None:
    quality = fit_semantic_ids(draw_items(), ResidualKMeans((8, 8), balanced=True), collisions="keep").quality()
    for level in quality.levels:
        assert level.imbalance == pytest.approx(1.0)
        assert level.perplexity == pytest.approx(8.0)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("collisions", ["level", "nearest"])
def test_every_item_ends_with_its_own_id(collisions: str, balanced: bool) -> None:
    items = draw_items(300)
    config = ResidualKMeans((8, 8, 64), balanced=balanced)
    kept = fit_semantic_ids(items, config, collisions="keep")
    assert kept.colliding > 0
    index = fit_semantic_ids(items, config, collisions=collisions)  # type: ignore[arg-type]
    assert index.colliding == 0
    assert index.codes.unique(dim=0).shape[0] == 300


def test_deterministic_for_a_seed() -> None:
    items = draw_items()
    config = ResidualKMeans((16, 16), seed=1)
    first, again = (fit_semantic_ids(items, config, collisions="level") for _ in range(2))
    other = fit_semantic_ids(items, ResidualKMeans((16, 16), seed=2), collisions="level")
    assert torch.equal(first.codes, again.codes)
    assert not torch.equal(first.codes, other.codes)


def test_minibatches_work_end_to_end() -> None:
    items = draw_items()
    index = fit_semantic_ids(items, ResidualKMeans((16, 16), batch_size=100), collisions="level")
    assert index.quality(items).levels[1].residual < 0.1


def test_items_keep_their_numbers() -> None:
    numbers = torch.arange(600) * 3 + 1
    index = fit_semantic_ids(draw_items(), ResidualKMeans((16, 16)), collisions="level", items=numbers)
    assert torch.equal(index.items_of(index.codes), numbers)


def test_bad_requests() -> None:
    items = draw_items(50)
    with pytest.raises(ValueError, match="collisions='merge'"):
        fit_semantic_ids(items, ResidualKMeans((4,)), collisions="merge")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clusters=64 for 50 points"):
        fit_semantic_ids(items, ResidualKMeans((64,)), collisions="keep")
    with pytest.raises(ValueError, match="no effect without balanced"):
        ResidualKMeans((4,), slack=1.5)
    with pytest.raises(ValueError, match="codebook_sizes"):
        ResidualKMeans(())
    with pytest.raises(ValueError, match="at least 1"):
        ResidualKMeans((4,), balanced=True, slack=0.5)
    with pytest.raises(ValueError, match="batch_size=0"):
        ResidualKMeans((4,), batch_size=0)
    index = fit_semantic_ids(items, ResidualKMeans((4,)), collisions="keep")
    with pytest.raises(ValueError, match=r"expected \[m, 8\]"):
        encode(index, torch.zeros(3, 5))
