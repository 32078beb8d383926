"""Verify a plan on the model itself: the metric with it and without it, on the same held-out batches, paired.

    change = mean(with - without) / mean(without)           lower is better: a loss

The interval is over examples where the loss gives one number each, over batches otherwise; both runs have the same weights and random state, so what differs is the arithmetic alone.
The upper end decides: a plan whose change may exceed the margin is not within it.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loka.placing import convert, revert
from loka.records import Interval, Plan
from loka.tuning.task import Task
from loka.units.undisturbed import undisturbed

__all__ = ["Losses", "converted", "evaluate", "paired_change"]

# Two-sided 95 % quantiles of Student's t for few samples; 1.96 beyond.
_T = {
    1: 12.7,
    2: 4.30,
    3: 3.18,
    4: 2.78,
    5: 2.57,
    6: 2.45,
    7: 2.36,
    8: 2.31,
    9: 2.26,
    10: 2.23,
    15: 2.13,
    20: 2.09,
    30: 2.04,
}


@dataclass(frozen=True)
class Losses:
    """The loss of every example, or of every batch where only that is known."""

    values: Tensor
    per_example: bool

    @property
    def mean(self) -> float:
        """Over all of them."""
        return float(self.values.mean())

    @property
    def digest(self) -> str:
        """Of all of them: other weights, batches or another metric have other losses."""
        return hashlib.sha256(self.values.numpy().tobytes()).hexdigest()[:16]


def evaluate(task: Task, batches: Sequence[Any], metric: Any = None, *, as_trained: bool = False) -> Losses:
    """The loss of held-out batches, in eval mode, with the same random numbers in every call.

    Args:
        task: what the user gave.
        batches: which.
        metric: metric(model, batch) -> values, lower is better; None is the task's own loss.
        as_trained: run the differentiable form, whose scales are those of training; serving scales the input of a chain otherwise.

    Returns:
        The losses, on the CPU, in order.
    """
    model, parts = task.model, []
    grads = [(p, p.grad) for p in model.parameters()]
    try:
        with undisturbed(model), torch.set_grad_enabled(as_trained):
            model.eval()
            torch.manual_seed(0)
            for batch in batches:
                value = task.losses(model, batch) if metric is None else _values(metric(model, batch))
                parts.append(value.detach().double().reshape(-1).cpu())
    finally:
        for p, grad in grads:
            p.grad = grad
    return Losses(torch.cat(parts), per_example=any(part.numel() > 1 for part in parts))


def _values(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise ValueError(f"the metric returned {type(value).__name__}, expected a floating tensor, lower is better")
    return value


def paired_change(base: Losses, other: Losses) -> Interval:
    """Relative change of the mean, with a 95 % interval over what was paired.

    Args:
        base: in high precision.
        other: the same examples in low precision.

    Returns:
        The change; a loss that is not finite, in either, is a change of infinity, written as 1e9.
    """
    difference = other.values - base.values
    if not bool(difference.isfinite().all()):
        return Interval(value=1e9, low=1e9, high=1e9)
    count, mean = difference.numel(), float(base.values.mean().abs().clamp(min=1e-30))
    value = float(difference.mean()) / mean
    if count < 2:
        return Interval(value=value, low=min(value, -abs(value)), high=max(value, abs(value)))
    quantile = next((_T[n] for n in sorted(_T) if n >= count - 1), 1.96)
    spread = quantile * float(difference.std()) / math.sqrt(count) / mean
    return Interval(value=value, low=value - spread, high=value + spread)


@contextmanager
def converted(model: nn.Module, plan: Plan, *, backend: str | None = None) -> Iterator[Any]:
    """Run with a plan placed, and without it afterwards.

    Args:
        model: not converted.
        plan: what to place.
        backend: instead of the plan's backends.

    Returns:
        The conversion, inside the block.
    """
    done = convert(model, plan, backend=backend)
    try:
        yield done
    finally:
        revert(model)
