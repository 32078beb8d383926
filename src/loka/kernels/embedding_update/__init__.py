"""embedding_update: one optimizer step on the rows of a table that occur in a batch, in place, in their precision."""

from torch import Tensor

from loka.formats import Draw
from loka.kernels.embedding_bag import Rows, check_items
from loka.kernels.embedding_update.call import TRAINABLE, Rule, RuleKind, UpdateCall, trainable
from loka.kernels.registry import pick

__all__ = ["TRAINABLE", "Rule", "RuleKind", "UpdateCall", "embedding_update", "trainable"]


def embedding_update(
    rows: Rows,
    indices: Tensor,
    grad: Tensor,
    rule: Rule,
    state: tuple[Tensor, ...],
    draw: Draw,
    *,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    mode: str = "sum",
    first_row: int = 0,
    first_column: int = 0,
    backend: str = "auto",
) -> None:
    """Apply the gradient of a lookup to the table in place.

    Args:
        rows: the table; its kind must be trainable.
        indices: of the lookup, [L].
        grad: gradient of the lookup's result, [B, D], or [L, D] without offsets.
        rule: the optimizer.
        state: made by `rule.state(rows)`; updated in place.
        draw: step, table and seed that determine the random numbers of stochastic rounding.
        offsets: of the lookup, [B + 1].
        weights: of the lookup, [L].
        mode: of the lookup.
        first_row: if the table is a shard, the index of its first row in the whole table.
        first_column: likewise of its first column; a multiple of eight.
        backend: a name of the registry, or "auto".

    Example:
        >>> rows, rule = Rows.of(torch.randn(100, 16), "int8:row"), Rule("rowwise_adagrad", lr=0.02)
        >>> embedding_update(rows, torch.tensor([3, 3, 7]), torch.randn(3, 16), rule, rule.state(rows), Draw(step=0))
    """
    trainable(rows.kind)
    check_items(rows, indices, offsets, weights)
    bags = len(indices) if offsets is None else len(offsets) - 1
    if grad.shape != (bags, rows.width):
        raise ValueError(f"the gradient of this lookup must be [{bags}, {rows.width}], got {tuple(grad.shape)}")
    if len(state) != len(
        rule.state(Rows(rows.data[:0], None if rows.scale_code is None else rows.scale_code[:0], rows.spec))
    ):
        raise ValueError(f"{rule.kind} needs another state than the {len(state)} tensors given; hint: rule.state(rows)")
    call = UpdateCall(rows.count, rows.width, bags, len(indices), rows.kind, rule.kind, rows.hot is not None)
    chosen = pick("embedding_update", backend, call, rows.data.device)
    options = {"weights": weights, "mode": mode, "first_row": first_row, "first_column": first_column}
    chosen.backend.run(rows, indices, offsets, grad, rule, state, draw, **options)
