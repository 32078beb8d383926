"""embedding_bag: rows of a table in any precision, looked up one by one or pooled in bags."""

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
    """Look rows up.

    Args:
        rows: the table.
        indices: int64 or int32 [L].
        offsets: [B + 1]: bag b is items offsets[b] to offsets[b + 1]; may be empty, and is then zero. None: every item on its own.
        weights: of the items, [L]; with `mode="sum"` only.
        mode: `sum` or `mean` of a bag; `item` where there are no offsets.
        out_dtype: of the result; sums are kept in float32.
        backend: by name, or `auto`.

    Returns:
        [B, D], or [L, D] without offsets.

    Raises:
        ValueError: an index is out of range (checked on the CPU; a GPU kernel answers NaN), or shapes do not fit.

    Example:
        >>> rows = Rows.of(torch.randn(100, 16), "int8:row")
        >>> embedding_bag(rows, torch.tensor([3, 5, 7]), torch.tensor([0, 2, 3])).shape
        torch.Size([2, 16])
    """
    mode = "item" if offsets is None else mode
    check_items(rows, indices, offsets, weights)
    bags = len(indices) if offsets is None else len(offsets) - 1
    call = BagCall(
        rows.count,
        rows.width,
        bags,
        len(indices),
        rows.kind,
        mode,
        weights is not None,
        rows.hot is not None,
        out_dtype,
    )
    chosen = pick("embedding_bag", backend, call, rows.data.device)
    result: Tensor = chosen.backend.run(rows, indices, offsets, weights=weights, mode=mode, out_dtype=out_dtype)
    return result


def check_items(rows: Rows, indices: Tensor, offsets: Tensor | None, weights: Tensor | None) -> None:
    """Shapes always; values where looking at them costs no synchronisation."""
    if indices.dim() != 1 or indices.dtype not in (int64, int32):
        raise ValueError(
            f"indices are int64 or int32 [L], got {indices.dtype} {tuple(indices.shape)}; hint: indices.reshape(-1)"
        )
    if weights is not None and weights.shape != indices.shape:
        raise ValueError(f"one weight per item: expected {tuple(indices.shape)}, got {tuple(weights.shape)}")
    if offsets is not None and (offsets.dim() != 1 or len(offsets) < 1):
        raise ValueError(f"offsets are [bags + 1], the last one the number of items; got {tuple(offsets.shape)}")
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


load("embedding_bag")  # not in a call, which may be compiled: torch.compile cannot trace an import
