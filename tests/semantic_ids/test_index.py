"""The index as a value and as a file; damage is named, never loaded."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loka.semantic_ids import ResidualKMeans, SemanticIndex, fit_semantic_ids, load_index


@pytest.fixture(scope="module")
def index() -> SemanticIndex:
    points = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    return fit_semantic_ids(points, ResidualKMeans((8, 8)), collisions="level", items=torch.arange(200).flip(0) + 1)


def test_lookups_are_inverse(index: SemanticIndex) -> None:
    assert torch.equal(index.items_of(index.codes), index.items)
    assert torch.equal(index.codes_of(index.items), index.codes)
    grid = index.items[:12].reshape(3, 4)
    assert torch.equal(index.items_of(index.codes_of(grid)), grid)
    assert index.items_of(torch.tensor([[0, 0, 10**6], [-1, 0, 0]])).tolist() == [-1, -1]


def test_unknown_items_raise(index: SemanticIndex) -> None:
    with pytest.raises(ValueError, match="1 items are not in the index"):
        index.codes_of(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match=r"expected \[..., 3\]"):
        index.items_of(torch.tensor([[0, 0]]))


def test_collisions_block_the_way_back() -> None:
    colliding = SemanticIndex(torch.tensor([[0, 1], [0, 1], [1, 1]]), (2, 2), torch.arange(3))
    assert colliding.colliding == 2
    assert "2 items collide" in repr(colliding)
    with pytest.raises(ValueError, match="resolve_collisions"):
        colliding.items_of(torch.tensor([[0, 1]]))


def test_file_round_trip(index: SemanticIndex, tmp_path: Path) -> None:
    path = tmp_path / "items.safetensors"
    index.save(path)
    loaded = load_index(path)
    assert torch.equal(loaded.codes, index.codes)
    assert torch.equal(loaded.items, index.items)
    assert loaded.codebook_sizes == index.codebook_sizes
    assert len(loaded.centroids) == 2
    assert all(torch.equal(a, b) for a, b in zip(loaded.centroids, index.centroids, strict=True))
    assert [entry.name for entry in tmp_path.iterdir()] == ["items.safetensors"]


def rewrite(path: Path, header: object, **tensors: torch.Tensor) -> None:
    kept = load_file(path)
    kept.update(tensors)
    save_file(kept, path, metadata={"loka": header if isinstance(header, str) else json.dumps(header)})


GOOD = {"schema": 1, "kind": "semantic_index", "codebook_sizes": [8, 8, 20]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("{", "not a semantic index"),
        ({**GOOD, "kind": "plan"}, "expected kind 'semantic_index'"),
        ({**GOOD, "schema": 2}, "schema 2, this version reads 1"),
        ({**GOOD, "codebook_sizes": "8"}, "expected a list of integers"),
        ({**GOOD, "codebook_sizes": [8, 8, True]}, "expected a list of integers"),
        ({**GOOD, "codebook_sizes": [8, 8]}, "one per level"),
        ({**GOOD, "codebook_sizes": [8, 2, 20]}, "outside"),
        ([], "expected kind"),
    ],
)
def test_damaged_headers_are_named(index: SemanticIndex, tmp_path: Path, header: object, message: str) -> None:
    path = tmp_path / "items.safetensors"
    index.save(path)
    rewrite(path, header)
    with pytest.raises(ValueError, match=message) as caught:
        load_index(path)
    assert "items.safetensors" in str(caught.value)


def test_damaged_tensors_are_named(index: SemanticIndex, tmp_path: Path) -> None:
    path = tmp_path / "items.safetensors"
    index.save(path)
    rewrite(path, GOOD, extra=torch.zeros(1))
    with pytest.raises(ValueError, match="holds the tensors"):
        load_index(path)
    index.save(path)
    rewrite(path, GOOD, items=torch.zeros(200, dtype=torch.int64))
    with pytest.raises(ValueError, match="199 item numbers repeat"):
        load_index(path)


def test_every_truncation_raises(index: SemanticIndex, tmp_path: Path) -> None:
    path, cut = tmp_path / "items.safetensors", tmp_path / "cut.safetensors"
    index.save(path)
    content = path.read_bytes()
    for length in range(0, len(content), 97):
        cut.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cut\.safetensors"):
            load_index(cut)


def test_a_failed_save_leaves_the_old_file(
    index: SemanticIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "items.safetensors"
    index.save(path)
    before = path.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("loka.semantic_ids.index.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        SemanticIndex(index.codes, index.codebook_sizes, index.items + 1).save(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("codes", "sizes", "items", "message"),
    [
        (torch.zeros(2, 2), (1, 1), torch.arange(2), "expected int64"),
        (torch.zeros(0, 2, dtype=torch.int64), (1, 1), torch.arange(0), "not empty"),
        (torch.tensor([[0, 3]]), (1, 3), torch.arange(1), "code 3 in row 0, level 1"),
        (torch.tensor([[0, -1]]), (1, 3), torch.arange(1), "code -1"),
        (torch.tensor([[0, 0]]), (1, 1), torch.arange(2), "one per row"),
        (torch.tensor([[0, 0]]), (1, 1), torch.tensor([-1]), "negative"),
        (torch.tensor([[0, 0]]), (1,), torch.arange(1), "one per level"),
    ],
)
def test_construction_is_checked(
    codes: torch.Tensor, sizes: tuple[int, ...], items: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SemanticIndex(codes, sizes, items)


def test_centroids_are_checked() -> None:
    codes, items = torch.zeros(1, 2, dtype=torch.int64), torch.arange(1)
    with pytest.raises(ValueError, match="centroids of level 1"):
        SemanticIndex(codes, (2, 2), items, (torch.zeros(2, 3), torch.zeros(2, 4)))
    with pytest.raises(ValueError, match="3 centroid tables for 2 levels"):
        SemanticIndex(codes, (2, 2), items, (torch.zeros(2, 3),) * 3)
