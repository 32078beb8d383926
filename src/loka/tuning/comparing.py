"""A plan compared on the model itself: the metric with it and without it, on the same held-out batches, paired.

    change = mean(with - without) / mean(without)           lower is better: a loss

The interval is over examples where the loss gives one number each, over batches otherwise or where these differ (`loka.probe.paired`); both runs have the same weights and random state, so what
differs is the arithmetic alone.
The upper end decides: a plan whose change may exceed the margin is not within it.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from loka.placing import convert, revert
from loka.probe.paired import Losses, gather
from loka.records import Interval, Plan
from loka.tuning.task import MakeOptimizer, Task
from loka.units.example import tensors_in
from loka.units.undisturbed import gradients_aside, undisturbed


def evaluate(task: Task, batches: Sequence[Any], metric: Any = None, *, as_trained: bool = False) -> Losses:
    """The loss of held-out batches, in eval mode, with the same random numbers in every call.

    Args:
        task: what the user gave.
        batches: which.
        metric: metric(model, batch) -> a number or a tensor of them, lower is better; None is the task's own loss.
        as_trained: run the differentiable form, whose scales are those of training; serving scales the input of a chain otherwise.

    Returns:
        The losses, on the CPU, in order.
    """
    model, parts = task.model, []
    with undisturbed(model), gradients_aside(model), torch.set_grad_enabled(as_trained):
        model.eval()
        torch.manual_seed(0)
        for batch in batches:
            value = task.losses(model, batch) if metric is None else _values(metric(model, batch))
            parts.append(value.detach())
    return gather(parts)


def compare(found: Losses, base: Losses, metric: Any = None) -> Interval:
    """The change of the metric.

    Args:
        found: with something converted.
        base: in high precision.
        metric: as for `evaluate`. One of the user's may count: that none of its values changed is then no proof that none would.

    Returns:
        The relative change, paired, with its interval.
    """
    if metric is None or base.step or not torch.equal(found.values, base.values):
        return found.change_from(base)
    return Interval(value=0.0, low=-base.unseen, high=base.unseen)


def evaluate_averaged(task: Task, metric: Any = None, *, as_trained: bool = False) -> Losses | None:
    """The loss of held-out batches when every example gets the batch's mean prediction: what a model that tells nobody apart has.

    Args:
        task: what the user gave.
        metric: as for `evaluate`.
        as_trained: as for `evaluate`.

    Returns:
        The losses; None where the model returned nothing that could be averaged.
    """
    changed = False

    def average(value: Any) -> Any:
        nonlocal changed
        if isinstance(value, Tensor):
            if not value.is_floating_point() or value.dim() == 0 or value.shape[0] < 2:
                return value
            changed = True
            return value.mean(0, keepdim=True).expand_as(value).clone()
        if isinstance(value, dict):
            return {key: average(part) for key, part in value.items()}
        return type(value)(map(average, value)) if type(value) in (tuple, list) else value

    hook = task.model.register_forward_hook(lambda module, args, out: average(out))
    try:
        found = evaluate(task, task.held_out, metric, as_trained=as_trained)
    finally:
        hook.remove()
    return found if changed else None


def copy_model(model: nn.Module) -> nn.Module:
    """A copy of a model that has run: what its forward left behind (the weight of weight_norm, an activation for an auxiliary loss) may be part of a graph, which a plain deepcopy refuses.

    Args:
        model: any module.

    Returns:
        The copy, with such tensors detached.
    """
    left = [t for module in model.modules() for t in tensors_in(dict(vars(module))) if not t.is_leaf]
    return copy.deepcopy(model, {id(t): t.detach().clone() for t in left})


def train_paired(task: Task, plan: Plan, steps: int, optimizer: MakeOptimizer | None, metric: Any, told: Callable[[int], None]) -> Interval:  # fmt: skip
    """Train two copies of the model on the batches that choose, with the same random numbers, one of them by the plan; the change on the held-out ones.

    Args:
        task: what the user gave; its model is not trained.
        plan: what the second copy runs.
        steps: of each copy.
        optimizer: optimizer(parameters); None is AdamW at 1e-3.
        metric: as for `evaluate`.
        told: how many steps are done.

    Returns:
        The relative change, paired, with its interval over examples; what two runs differ by anyway is in it.

    Raises:
        ValueError: the step does not train the model it is given.
    """
    make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, 1e-3))
    found = []
    for index, low in enumerate((False, True)):
        twin = copy.copy(task)
        twin.model = copy_model(task.model)
        before = [p.detach().clone() for p in twin.model.parameters()]
        if low:
            convert(twin.model, plan)
        cuda = sorted({p.device.index or 0 for p in twin.model.parameters() if p.device.type == "cuda"})
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(0)
            _train(twin, make([p for p in twin.model.parameters() if p.requires_grad]), steps, lambda done, index=index: told(index * steps + done))  # type: ignore[misc]  # fmt: skip
        if all(torch.equal(a, b) for a, b in zip(before, twin.model.parameters(), strict=True)):
            raise ValueError("train: the step does not train the model it is given; expected step(model, batch) that runs `model`")  # fmt: skip
        found.append(evaluate(twin, twin.held_out, metric, as_trained=True))
    return compare(found[1], found[0], metric)


def _train(task: Task, optimizer: torch.optim.Optimizer, steps: int, told: Callable[[int], None]) -> None:
    task.model.train()
    for step in range(steps):
        optimizer.zero_grad()
        with torch.enable_grad():
            task.mean_loss(task.model, task.looking[step % len(task.looking)]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        told(step + 1)


def _values(value: Any) -> Tensor:
    """What a metric returned: numbers of any kind, which a library may have computed."""
    if isinstance(value, Real):
        return torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(value, Tensor) or value.is_complex():
        kind = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the metric returned {kind}, expected a number or a tensor of them, lower is better")
    return value if value.is_floating_point() else value.double()


@contextmanager
def converted(model: nn.Module, plan: Plan) -> Iterator[Any]:
    """Run with a plan placed, and without it afterwards.

    Args:
        model: not converted.
        plan: what to place.

    Returns:
        The conversion, inside the block.
    """
    done = convert(model, plan)
    try:
        yield done
    finally:
        revert(model)
