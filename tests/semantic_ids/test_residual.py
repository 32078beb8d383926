"""Residual codes: each level explains more, similar items share prefixes, every item has an id of its own."""

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


def test_each_level_leaves_less() -> None:
    items = draw_items()
    index = fit_semantic_ids(items, ResidualKMeans((16, 16, 16)))
    variance, left, shares = float((items - items.mean(0)).square().sum()), items, []
    for level, table in enumerate(index.centroids):
        left = left - table[index.codes[:, level]]
        shares.append(float(left.square().sum()) / variance)
    assert 1 > shares[0] > shares[1] > shares[2] > 0
    assert shares[2] < 0.04


def test_the_same_vectors_are_given_the_same_codes() -> None:
    items = draw_items()
    index = fit_semantic_ids(items, ResidualKMeans((16, 16)))
    assert torch.equal(encode(index, items), index.codes[:, :2])


def test_every_item_ends_with_its_own_id() -> None:
    index = fit_semantic_ids(draw_items(300), ResidualKMeans((8, 8, 64)))
    assert index.codes[:, :3].unique(dim=0).shape[0] < 300
    assert index.colliding == 0
    assert index.codes.unique(dim=0).shape[0] == 300


def test_deterministic_for_a_seed() -> None:
    items = draw_items()
    config = ResidualKMeans((16, 16), seed=1)
    first, again = (fit_semantic_ids(items, config) for _ in range(2))
    other = fit_semantic_ids(items, ResidualKMeans((16, 16), seed=2))
    assert torch.equal(first.codes, again.codes)
    assert not torch.equal(first.codes, other.codes)


def test_items_keep_their_numbers() -> None:
    numbers = torch.arange(600) * 3 + 1
    index = fit_semantic_ids(draw_items(), ResidualKMeans((16, 16)), items=numbers)
    assert torch.equal(index.items_of(index.codes), numbers)


def test_bad_requests() -> None:
    items = draw_items(50)
    with pytest.raises(ValueError, match="clusters=64 for 50 points"):
        fit_semantic_ids(items, ResidualKMeans((64,)))
    with pytest.raises(ValueError, match="codebook_sizes"):
        ResidualKMeans(())
    index = fit_semantic_ids(items, ResidualKMeans((4,)))
    with pytest.raises(ValueError, match=r"expected \[m, 8\]"):
        encode(index, torch.zeros(3, 5))
