"""Collision handling, down to which item moves where."""

import pytest
import torch

from loka.semantic_ids import SemanticIndex, resolve_collisions


def make(codes: list[list[int]], sizes: tuple[int, ...], centroids: tuple[torch.Tensor, ...] = ()) -> SemanticIndex:
    matrix = torch.tensor(codes)
    return SemanticIndex(matrix, sizes, torch.arange(matrix.shape[0]), centroids)


def test_level_numbers_the_members_in_row_order() -> None:
    index = resolve_collisions(make([[1, 1], [0, 0], [1, 1], [1, 0], [1, 1]], (2, 2)), "level")
    assert index.codes.tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 0, 0], [1, 1, 2]]
    assert index.codebook_sizes == (2, 2, 3)
    assert index.colliding == 0


def test_level_is_added_even_without_collisions() -> None:
    index = resolve_collisions(make([[0], [1]], (2,)), "level")
    assert index.codes.tolist() == [[0, 0], [1, 0]]
    assert index.codebook_sizes == (2, 1)


def test_nearest_keeps_the_closest_and_moves_the_rest_to_free_codes() -> None:
    first, last = torch.tensor([[0.0], [100.0]]), torch.tensor([[0.0], [1.0], [2.0], [5.0]])
    index = make([[0, 0], [0, 0], [0, 0], [0, 1], [1, 0]], (2, 4), (first, last))
    embeddings = torch.tensor([[0.4], [0.0], [0.3], [1.0], [100.0]])
    fixed = resolve_collisions(index, "nearest", embeddings=embeddings)
    # Row 1 sits on its centroid and stays. Rows 0 and 2 want code 2 (code 1 is taken by row 3); row 0 is closer to it.
    assert fixed.codes.tolist() == [[0, 2], [0, 0], [0, 3], [0, 1], [1, 0]]
    assert fixed.codebook_sizes == index.codebook_sizes


def test_nearest_leaves_items_that_did_not_collide() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(4, (60, 2), generator=generator)
    codes = torch.cat([codes, torch.randint(40, (60, 1), generator=generator)], dim=1)
    tables = tuple(torch.randn(size, 3, generator=generator) for size in (4, 4, 40))
    index = SemanticIndex(codes, (4, 4, 40), torch.arange(60), tables)
    fixed = resolve_collisions(index, "nearest", embeddings=torch.randn(60, 3, generator=generator))
    _, group, counts = torch.unique(codes, dim=0, return_inverse=True, return_counts=True)
    alone = counts[group] == 1
    assert 0 < int(alone.sum()) < 60
    assert torch.equal(fixed.codes[alone], codes[alone])
    assert torch.equal(fixed.codes[:, :-1], codes[:, :-1])
    assert fixed.colliding == 0
    moved = int((fixed.codes != codes).any(1).sum())
    assert moved == 60 - codes.unique(dim=0).shape[0]  # one of each group stays


def test_nearest_without_room_raises() -> None:
    table = torch.tensor([[0.0], [1.0]])
    index = make([[0], [0], [1]], (2,), (table,))
    with pytest.raises(ValueError, match="3 items share the prefix"):
        resolve_collisions(index, "nearest", embeddings=torch.zeros(3, 1))


def test_bad_requests() -> None:
    index = make([[0], [0]], (2,))
    with pytest.raises(ValueError, match="use method='level'"):
        resolve_collisions(index, "nearest", embeddings=torch.zeros(2, 1))
    with pytest.raises(ValueError, match="expected 'level' or 'nearest'"):
        resolve_collisions(index, "random")  # type: ignore[arg-type]
    with_centroids = make([[0], [0]], (2,), (torch.zeros(2, 1),))
    with pytest.raises(ValueError, match="got None"):
        resolve_collisions(with_centroids, "nearest")
