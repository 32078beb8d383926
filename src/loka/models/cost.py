"""What a model costs: parameters, active parameters and forward FLOPs per example, computed without allocating it.

The model is built on the meta device (shapes, no storage) and run there on one example under torch's FLOP counter, so the number comes from the
products the model really issues: 2 x multiply-adds of every matrix product; element-wise work, norms and table lookups count as zero.

Active parameters are those one example multiplies with: embedding tables are excluded, and a family that leaves more of itself idle (a mixture
of experts) says so by its own `active_parameters()`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from loka.models.ranker import Ranker


@dataclass(frozen=True)
class Cost:
    """Size and work of a model; flops_forward is for one example (a sequence model: one sequence of its greatest length)."""

    parameters: int
    active_parameters: int
    flops_forward: int


def count(model: Any) -> Cost:
    """The cost of a model, or of the model a config describes, computed without allocating it.

    Args:
        model: either.

    Returns:
        Parameters, active parameters and forward FLOPs per example.

    Example:
        >>> count(configure("wukong", "tiny")).parameters
    """
    if isinstance(model, Ranker):
        return _count_ranker(model)
    config = getattr(model, "config", model)
    from loka.models.registry import build

    with torch.device("meta"):
        ghost = build(config)
    return Cost(_size(ghost), _active(ghost), _flops(ghost))


def _count_ranker(model: Ranker) -> Cost:
    outside = 0
    if model.dense is not None:
        outside = sum(2 * m.weight.numel() for m in model.dense.modules() if isinstance(m, nn.Linear))
    return Cost(_size(model), _active(model), count(model.core).flops_forward + outside)


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _active(model: nn.Module) -> int:
    counted = getattr(model, "active_parameters", None)
    if counted is not None:
        return int(counted())
    tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
    return _size(model) - sum(tables.values())


def _flops(ghost: nn.Module) -> int:
    inputs = ghost.example_inputs()  # type: ignore[operator]
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        ghost.requires_grad_(False).eval()(*inputs)
    return int(counter.get_total_flops())
