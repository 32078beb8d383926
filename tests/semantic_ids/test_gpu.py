"""On the GPU: reproducible codes, and a trie that steps without touching the host."""

import pytest
import torch

from loka.semantic_ids import ResidualKMeans, fit_semantic_ids
from loka.semantic_ids.kmeans import fit_kmeans

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("batch_size", [None, 512])
def test_kmeans_is_deterministic_on_the_gpu(batch_size: int | None) -> None:
    points = torch.randn(5000, 16, generator=torch.Generator().manual_seed(0)).cuda()
    first, again = (fit_kmeans(points, 64, seed=1, batch_size=batch_size) for _ in range(2))
    assert torch.equal(first.codes, again.codes)
    assert torch.equal(first.centroids, again.centroids)


@pytest.mark.parametrize("balanced", [False, True])
def test_index_from_gpu_embeddings(balanced: bool) -> None:
    points = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0)).cuda()
    index = fit_semantic_ids(points, ResidualKMeans((32, 32), balanced=balanced), collisions="level")
    assert index.codes.is_cuda
    assert torch.equal(index.items_of(index.codes), index.items)


def test_trie_steps_can_be_captured() -> None:
    points = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0)).cuda()
    index = fit_semantic_ids(points, ResidualKMeans((32, 32)), collisions="level")
    trie = index.trie
    rows = torch.arange(512, device="cuda")
    codes = index.codes[rows].clone()

    def decode() -> tuple[torch.Tensor, torch.Tensor]:
        nodes = torch.zeros(512, dtype=torch.int64, device="cuda")
        for level in range(index.levels):
            allowed, _ = trie.allowed(nodes, level)
            inside = (allowed == codes[:, level, None]).any(1) & trie.mask(nodes, level).any(1)
            nodes = torch.where(inside, trie.step(nodes, codes[:, level]), -1)
        return nodes, trie.items(nodes)

    decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # raises if anything synchronises
        _, items = decode()
    graph.replay()
    assert torch.equal(items, index.items[rows])
