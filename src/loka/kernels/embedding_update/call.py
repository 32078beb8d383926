"""The optimizer rules, and a call of `embedding_update` described without tensors."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from loka.kernels.embedding_bag.rows import FLOATS, Rows, parse_rows

RuleKind = Literal["sgd", "rowwise_adagrad", "adam"]
TRAINABLE = ("float32", "bfloat16", "int8:row", "e4m3:row:pow2")


@dataclass(frozen=True)
class Rule:
    """An optimizer for embedding rows. For a row w of width D, its gradient g and step t, counted from 1:

        sgd              w <- w - lr g
        rowwise_adagrad  h <- h + |g|^2 / D             w <- w - lr g / (sqrt(h) + eps)
        adam             m <- b1 m + (1 - b1) g         v <- b2 v + (1 - b2) g^2
                         w <- w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Rows that do not occur in a batch are not changed, and neither is their state.

    Args:
        kind: which of the rules.
        lr, eps, beta1, beta2: their constants; betas are for `adam` only.

    Example:
        >>> rule = Rule("rowwise_adagrad", lr=0.02)
    """

    kind: RuleKind = "rowwise_adagrad"
    lr: float = 0.02
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self) -> None:
        if self.kind not in get_args(RuleKind):
            raise ValueError(f"rules are {', '.join(get_args(RuleKind))}, not {self.kind!r}")
        if not (self.lr >= 0 and self.eps > 0 and 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"expected lr >= 0, eps > 0 and betas in [0, 1), got {self}")

    def state(self, rows: Rows) -> tuple[Tensor, ...]:
        """Return the initial state of a table, zeros in float32: no tensor, one [N], or two [N, D]."""
        device = rows.data.device
        if self.kind == "rowwise_adagrad":
            return (torch.zeros(rows.count, dtype=torch.float32, device=device),)
        if self.kind == "adam":
            return tuple(torch.zeros(rows.count, rows.width, dtype=torch.float32, device=device) for _ in range(2))
        return ()

    def corrections(self, step: int) -> tuple[float, float]:
        """Return Adam's bias corrections 1 / (1 - b^t), given the step counted from 0."""
        if self.kind != "adam":
            return 1.0, 1.0
        return 1 / (1 - self.beta1 ** (step + 1)), 1 / (1 - self.beta2 ** (step + 1))


@dataclass(frozen=True)
class UpdateCall:
    """A call of `embedding_update`.

    Args:
        rows, width, kind, hot: size and row format of the table; whether some rows are kept in float32 (`Rows.hot`).
        bags, items: of the lookup.
        rule: kind of optimizer.

    Example:
        >>> call = UpdateCall(rows=1_000_000, width=64, bags=4096, items=81920, kind="int8:row")
    """

    rows: int
    width: int
    bags: int
    items: int
    kind: str = "float32"
    rule: RuleKind = "rowwise_adagrad"
    hot: bool = False

    def __str__(self) -> str:
        return f"{self.rule} of {self.rows}x{self.width} {self.kind} by {self.items} items in {self.bags} bags{' (hot rows)' * self.hot}"


def trainable(kind: str) -> None:
    """Raise ValueError if rows of this kind, as `parse_rows` reads it, are not in `TRAINABLE`."""
    if kind in TRAINABLE:
        return
    if kind not in FLOATS:
        parse_rows(kind)
    raise ValueError(
        f"rows of {kind} cannot be trained, only looked up; rows for training are {', '.join(TRAINABLE)} "
        "(4-bit rows lose too much in training, and FP8 rows need power-of-two scales)"
    )
