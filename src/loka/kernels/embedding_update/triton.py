"""Triton fused update: sort the items, then sum duplicates, step, round and write back in one kernel."""

import torch
from torch import Tensor

from loka.formats import Draw
from loka.kernels.backend import Verdict, no
from loka.kernels.embedding_bag.rows import Rows
from loka.kernels.embedding_update.call import TRAINABLE, Rule, UpdateCall
from loka.kernels.triton_device import triton_runs_on

WIDEST = 2048
_LARGEST_INT = 2**31 - 1


def supports(call: UpdateCall, device: torch.device) -> Verdict:
    """Accept every trainable kind of rows, up to 2,048 wide."""
    if call.kind not in TRAINABLE:
        return no(f"trains {', '.join(TRAINABLE)}, not {call.kind}")
    if not 1 <= call.width <= WIDEST:
        return no(f"holds a row in registers: up to {WIDEST} wide, not {call.width}")
    return triton_runs_on(device)


def run(
    rows: Rows,
    indices: Tensor,
    offsets: Tensor | None,
    grad: Tensor,
    rule: Rule,
    state: tuple[Tensor, ...],
    draw: Draw,
    *,
    weights: Tensor | None = None,
    mode: str = "sum",
    first_row: int = 0,
    first_column: int = 0,
) -> None:
    """See `loka.kernels.embedding_update.embedding_update`. Updates rows, scales and state in place."""
    if first_column % 8:
        raise ValueError(
            f"first_column must be a multiple of 8, got {first_column}: one call of Philox serves eight columns"
        )
    from loka.kernels.embedding_update import triton_kernels

    ordered, source, factor = sort_items(indices, offsets, weights, mode, rows.count)
    triton_kernels.update(rows, ordered, source, factor, grad.contiguous(), rule, state, draw, first_row, first_column)


def sort_items(
    indices: Tensor, offsets: Tensor | None, weights: Tensor | None, mode: str, count: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sort items by row; return their rows, the row of the gradient of each, and its factor (None if all are 1).

    Does not synchronize. Keys are converted to 32 bits if possible, as they sort in half the time.
    """
    narrow = indices.dtype == torch.int64 and count < _LARGEST_INT
    keys = indices.clamp(-1, _LARGEST_INT).to(torch.int32) if narrow else indices
    ordered, order = keys.sort(stable=True)
    factor = None if weights is None else weights.float()
    if offsets is None:
        return ordered, order, None if factor is None else factor[order]
    lengths = offsets.diff()
    bags = torch.arange(len(lengths), dtype=torch.int32, device=indices.device)
    source = torch.repeat_interleave(bags, lengths, output_size=len(indices))[order]
    if mode == "mean":
        return ordered, source, (1.0 / lengths.clamp(min=1).float())[source]
    return ordered, source, None if factor is None else factor[order]
