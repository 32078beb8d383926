"""Our fused update: sort, then one program a row sums its duplicates, moves it, rounds it and writes it back. See `triton_kernels`."""

import torch
from torch import Tensor

from loka.formats import Draw
from loka.kernels.backend import Verdict, no
from loka.kernels.embedding_bag.rows import Rows
from loka.kernels.embedding_update.call import TRAINABLE, Rule, UpdateCall
from loka.kernels.triton_device import triton_runs_on

WIDEST = 2048


def supports(call: UpdateCall, device: torch.device) -> Verdict:
    """Every trainable kind of rows, up to 2,048 wide."""
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
    """In place: rows, scales and state."""
    if first_column % 8:
        raise ValueError(
            f"a shard of columns starts at a multiple of 8, got {first_column}: one call of Philox serves eight"
        )
    from loka.kernels.embedding_update import triton_kernels

    bag, factor = _items(indices, offsets, weights, mode)
    ordered, order = indices.sort(stable=True)
    triton_kernels.update(
        rows, ordered, order, bag, factor, grad.contiguous(), rule, state, draw, first_row, first_column
    )


def _items(
    indices: Tensor, offsets: Tensor | None, weights: Tensor | None, mode: str
) -> tuple[Tensor | None, Tensor | None]:
    """Bag and factor of each item; None where the item is its own bag, and where the factor is one. No synchronisation."""
    factor = None if weights is None else weights.float()
    if offsets is None:
        return None, factor
    item = torch.arange(len(indices), device=indices.device)
    bag = torch.searchsorted(offsets[1:].to(item.dtype), item, right=True).to(torch.int32)
    if mode == "mean":
        factor = (1.0 / offsets.diff().clamp(min=1).float())[bag.long()]
    return bag, factor
