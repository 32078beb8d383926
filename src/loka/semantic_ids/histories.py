"""Item vectors from who comes near whom in histories: positive pointwise mutual information, then a truncated SVD.

    c_ij   how often items i and j stand at most `window` apart in a history, either order
    A_ij   = max(0, ln(c_ij c / (c_i c_j)))          c_i the sum of row i, c the sum of all
    A ~ U S V^T with d columns;   x_i = (U S)_i / ||(U S)_i||

Text says what an item is; this says what it is chosen with, which is what a model that spells the next item has to predict. Give only training
histories: an item that is held out must not be looked at. An item without a neighbour has no vector and gets zeros, so all such items collide
unless text tells them apart: `torch.cat([embed_histories(...), embed_text(...)], 1)`.

torch alone does the work; the matrix stays sparse. The same seed gives the same vectors on one machine.
"""

import torch
from torch import Tensor


def embed_histories(
    items: Tensor, offsets: Tensor, n_items: int, *, dimensions: int = 64, window: int = 3, seed: int = 0
) -> Tensor:
    """Vectors of items from who comes near whom in histories.

    Args:
        items: int64 [total], the histories one after another; 0 is padding.
        offsets: where each begins, and the end.
        n_items: largest id.
        dimensions: of the vectors.
        window: how near.
        seed: of the SVD.

    Returns:
        Unit vectors [n_items, dimensions], float32, row i being item i + 1.

    Example:
        >>> embed_histories(data.train.items, data.train.offsets, data.n_items)
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
        # Somewhat more columns than wanted, and a few passes: the spectrum of such a matrix falls slowly.
        columns = min(dimensions + 16, n_items)
        u, s, _ = torch.svd_lowrank(matrix, q=columns, niter=4)
    vectors = (u * s)[:, :dimensions]
    lengths = vectors.norm(dim=1, keepdim=True)
    # Rounding gives an item without neighbours a tiny vector, which normalising would blow up to a direction made of noise.
    return torch.where(lengths > 1e-6 * lengths.max(), vectors / lengths, 0.0).float()


def _count_neighbours(items: Tensor, offsets: Tensor, n_items: int, window: int) -> Tensor:
    """Sparse [n, n] in float64, symmetric; pairs of an item with itself are left out."""
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
    """Positive pointwise mutual information of a coalesced matrix of counts."""
    places, values = counts.indices(), counts.values()
    degree = torch.zeros(counts.shape[0], dtype=values.dtype, device=values.device).index_add_(0, places[0], values)
    information = (values * values.sum() / (degree[places[0]] * degree[places[1]])).log().clamp(min=0)
    return torch.sparse_coo_tensor(places, information, counts.shape, check_invariants=False).coalesce()
