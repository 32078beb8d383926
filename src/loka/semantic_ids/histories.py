"""Item vectors from co-occurrence in histories: positive pointwise mutual information, then a truncated SVD.

    c_ij   how often items i and j are at most `window` apart in a history, in either order
    A_ij   = max(0, ln(c_ij c / (c_i c_j)))          c_i the sum of row i, c the sum of all
    A ~ U S V^T with d columns;   x_i = (U S)_i / ||(U S)_i||

Text says what an item is; this says what it is chosen with, which is what a model that generates the next item has to
predict. Pass only training histories: held-out items must not be used. An item without neighbors gets a zero vector, so
all such items collide unless text tells them apart: `torch.cat([embed_histories(...), embed_text(...)], 1)`.

Only torch is needed, and the matrix stays sparse. The same seed gives the same vectors on one machine.
"""

import torch
from torch import Tensor


def embed_histories(
    items: Tensor, offsets: Tensor, n_items: int, *, dimensions: int = 64, window: int = 3, seed: int = 0
) -> Tensor:
    """Compute item vectors from co-occurrence in histories.

    Args:
        items: int64 [total], the concatenated histories; ids are 1..n_items, without padding.
        offsets: int64 [histories + 1], where each history begins, and the end.
        n_items: largest id.
        dimensions: size of the vectors.
        window: largest distance at which two items of a history count as neighbors.
        seed: seed of the SVD.

    Returns:
        Unit vectors [n_items, dimensions], float32; row i is item i + 1.

    Example:
        >>> histories = loka.data.Jagged.from_rows([[1, 2, 3], [2, 3, 4]])
        >>> embed_histories(histories.values, histories.offsets, 4, dimensions=2).shape
        torch.Size([4, 2])
    """
    if window < 1 or not 1 <= dimensions < n_items:
        raise ValueError(
            f"window={window} and dimensions={dimensions} for {n_items} items: expected at least 1, and below the items"
        )
    if items.numel() and (int(items.min()) < 1 or int(items.max()) > n_items):
        raise ValueError(
            f"items lie in [{int(items.min())}, {int(items.max())}], expected [1, {n_items}]: 0 is padding and has no vector"
        )
    matrix = _measure_information(_count_neighbours(items - 1, offsets, n_items, window))
    with torch.random.fork_rng(devices=[items.device] if items.is_cuda else []):
        torch.manual_seed(seed)
        # More columns than needed and a few iterations, because the spectrum of such a matrix decays slowly.
        columns = min(dimensions + 16, n_items)
        u, s, _ = torch.svd_lowrank(matrix, q=columns, niter=4)
    vectors = (u * s)[:, :dimensions]
    lengths = vectors.norm(dim=1, keepdim=True)
    # By rounding, items without neighbors have tiny vectors; normalizing them would give directions of pure noise.
    return torch.where(lengths > 1e-6 * lengths.max(), vectors / lengths, 0.0).float()


def _count_neighbours(items: Tensor, offsets: Tensor, n_items: int, window: int) -> Tensor:
    """Return the counts as a symmetric sparse float64 matrix [n, n], without pairs of an item with itself."""
    row = torch.bucketize(torch.arange(items.numel(), device=items.device), offsets[1:], right=True)
    pairs = []
    for gap in range(1, window + 1):
        a, b, same = items[gap:], items[:-gap], row[gap:] == row[:-gap]
        keep = same & (a != b)
        pairs += [torch.stack([a[keep], b[keep]]), torch.stack([b[keep], a[keep]])]
    places = torch.cat(pairs, 1)
    if not places.shape[1]:
        raise ValueError(f"no two different items stand within {window} of each other in any history: nothing to learn")
    ones = torch.ones(places.shape[1], dtype=torch.float64, device=items.device)
    return torch.sparse_coo_tensor(places, ones, (n_items, n_items), check_invariants=False).coalesce()


def _measure_information(counts: Tensor) -> Tensor:
    """Return the positive pointwise mutual information of a coalesced matrix of counts."""
    places, values = counts.indices(), counts.values()
    degree = torch.zeros(counts.shape[0], dtype=values.dtype, device=values.device).index_add_(0, places[0], values)
    information = (values * values.sum() / (degree[places[0]] * degree[places[1]])).log().clamp(min=0)
    return torch.sparse_coo_tensor(places, information, counts.shape, check_invariants=False).coalesce()
