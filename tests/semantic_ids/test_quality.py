"""Quality figures by hand."""

import math

import pytest
import torch

from loka.semantic_ids import SemanticIndex


def test_figures_by_hand() -> None:
    codes = torch.tensor([[0, 0], [0, 0], [0, 1], [1, 0]])
    centroids = (torch.tensor([[1.0], [5.0], [9.0]]), torch.tensor([[0.0], [1.0]]))
    embeddings = torch.tensor([[1.0], [1.0], [3.0], [5.0]])
    quality = SemanticIndex(codes, (3, 2), torch.arange(4), centroids).quality(embeddings)
    assert (quality.items, quality.distinct, quality.colliding, quality.largest_collision) == (4, 3, 2, 2)
    assert quality.collision_rate == 0.5
    first, second = quality.levels
    assert (first.codebook_size, first.used) == (3, 2)
    assert first.perplexity == pytest.approx(math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25))))
    assert first.imbalance == pytest.approx(0.75 * 3)
    variance = 2 * 1.5**2 + 0.5**2 + 2.5**2
    assert first.residual == pytest.approx(4.0 / variance)
    assert second.residual == pytest.approx(1.0 / variance)
    assert "50.00 % collide" in str(quality)
    assert "level 1: 2 of 2 codes used" in str(quality)


def test_levels_without_centroids_have_no_residual() -> None:
    index = SemanticIndex(torch.tensor([[0, 0], [1, 0]]), (2, 1), torch.arange(2), (torch.tensor([[0.0], [1.0]]),))
    quality = index.quality(torch.tensor([[0.0], [1.0]]))
    assert [level.residual for level in quality.levels] == [0.0, None]
    assert all(level.residual is None for level in index.quality().levels)


def test_bad_requests() -> None:
    bare = SemanticIndex(torch.tensor([[0], [1]]), (2,), torch.arange(2))
    with pytest.raises(ValueError, match="no centroids"):
        bare.quality(torch.zeros(2, 1))
    full = SemanticIndex(torch.tensor([[0], [1]]), (2,), torch.arange(2), (torch.zeros(2, 3),))
    with pytest.raises(ValueError, match=r"expected \(2, 3\)"):
        full.quality(torch.zeros(2, 1))
