"""embedding_bag: look up rows of a table in any precision, one by one or pooled in bags."""

# not `import torch`: a backend of that name is a submodule
from torch import Tensor, compiler, dtype, float32, int32, int64

from loka.kernels.embedding_bag.call import BagCall
from loka.kernels.embedding_bag.rows import Rows, parse_rows
from loka.kernels.registry import load, pick

__all__ = ["BagCall", "Rows", "check_items", "embedding_bag", "parse_rows"]


def embedding_bag(
    rows: Rows,
    indices: Tensor,
    offsets: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    mode: str = "sum",
    out_dtype: dtype = float32,
    backend: str = "auto",
) -> Tensor:
    """Look up rows of an embedding table, pooled by bag or one by one.

    Args:
        rows: the table.
        indices: int64 or int32 [L].
        offsets: [B + 1]; bag b is items offsets[b] to offsets[b + 1]. An empty bag gives zeros. None: no pooling.
        weights: of the items, [L]; only with offsets and `mode="sum"`.
        mode: `sum` or `mean`; ignored without offsets.
        out_dtype: of the result. Sums are accumulated in float32.
        backend: a name of the registry, or "auto".

    Returns:
        [B, D], or [L, D] without offsets.

    Raises:
        ValueError: an index is out of range (checked on the CPU; a GPU kernel returns NaN), or shapes do not fit.

    Example:
        >>> rows = Rows.of(torch.randn(100, 16), "int8:row")
        >>> embedding_bag(rows, torch.tensor([3, 5, 7]), torch.tensor([0, 2, 3])).shape
        torch.Size([2, 16])
    """
    if weights is not None and offsets is None:
        raise ValueError(
            "weights without offsets: expected offsets [bags + 1], since weights are for sums; hint: "
            "embedding_bag(rows, indices) * weights[:, None]"
        )
    mode = "item" if offsets is None else mode
    check_items(rows, indices, offsets, weights)
    bags = len(indices) if offsets is None else len(offsets) - 1
    weighted, hot = weights is not None, rows.hot is not None
    call = BagCall(rows.count, rows.width, bags, len(indices), rows.kind, mode, weighted, hot, out_dtype)
    chosen = pick("embedding_bag", backend, call, rows.data.device)
    result: Tensor = chosen.backend.run(rows, indices, offsets, weights=weights, mode=mode, out_dtype=out_dtype)
    return result


def check_items(rows: Rows, indices: Tensor, offsets: Tensor | None, weights: Tensor | None) -> None:
    """Check the arguments of `embedding_bag`: shapes, and on the CPU values too (on a GPU that would synchronize)."""
    if indices.dim() != 1 or indices.dtype not in (int64, int32):
        raise ValueError(
            f"indices must be int64 or int32 [L], got {indices.dtype} {tuple(indices.shape)}; hint: indices.reshape(-1)"
        )
    if weights is not None and weights.shape != indices.shape:
        raise ValueError(f"one weight per item: expected {tuple(indices.shape)}, got {tuple(weights.shape)}")
    if offsets is not None and (offsets.dim() != 1 or len(offsets) < 1):
        raise ValueError(f"offsets must be [bags + 1], ending with the number of items; got {tuple(offsets.shape)}")
    if indices.device.type != "cpu" or compiler.is_compiling():
        return
    bad = (indices < 0) | (indices >= rows.count)
    if bool(bad.any()):
        seen = int(indices[bad][0])
        raise ValueError(f"index {seen} is not a row of this table: it has rows 0 to {rows.count - 1}")
    if offsets is not None and (
        int(offsets[0]) != 0 or int(offsets[-1]) != len(indices) or bool((offsets.diff() < 0).any())
    ):
        raise ValueError(
            f"offsets must rise from 0 to the number of items, {len(indices)}; got {offsets[:4].tolist()} ... {int(offsets[-1])}"
        )


load("embedding_bag")  # at import: torch.compile cannot trace an import inside a call
