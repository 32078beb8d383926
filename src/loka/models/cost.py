"""Count a model's parameters, active parameters and forward FLOPs per example, without allocating it.

The model is built on the meta device and run there on one example under torch's FLOP counter: 2 x multiply-adds of
every matrix product it runs; element-wise operations, norms and table lookups count as zero.

Active parameters are those that one example is multiplied with. Embedding tables are excluded, and a family with more
idle parameters (a mixture of experts) defines its own `active_parameters()`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from loka.models.ranker import Ranker


@dataclass(frozen=True)
class Cost:
    """The cost of a model; `flops_forward` is for one example, for a sequence model one sequence of maximum length."""

    parameters: int
    active_parameters: int
    flops_forward: int


def count(model: Any) -> Cost:
    """Return the cost of a model without allocating it.

    Args:
        model: a model, or the config of one.

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
        on_meta = build(config)
    return Cost(_size(on_meta), _active(on_meta), _flops(on_meta))


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


def _flops(model: nn.Module) -> int:
    inputs = model.example_inputs()  # type: ignore[operator]
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model.requires_grad_(False).eval()(*inputs)
    return int(counter.get_total_flops())
