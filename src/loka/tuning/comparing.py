"""Compare a plan with high precision on the model itself: the metric on the same held-out batches, paired.

    change = mean(with - without) / mean(without)           lower is better: a loss

Both runs have the same weights and random state, so only the arithmetic differs. The interval is over examples if the
loss has one value per example, and over batches if it does not or if batches differ (`loka.probe.paired`). The upper
end decides: a plan whose change may exceed the margin is not within it.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from loka.placing import convert
from loka.probe.paired import Losses, gather
from loka.records import Interval, Plan
from loka.tuning.task import MakeOptimizer, Task
from loka.units.example import tensors_in
from loka.units.undisturbed import gradients_aside, undisturbed


def evaluate(task: Task, batches: Sequence[Any], metric: Any = None, *, as_trained: bool = False) -> Losses:
    """Compute the losses of batches, in eval mode, with the same random numbers in every call.

    Args:
        task: the model and how to run it.
        batches: usually the held-out ones.
        metric: metric(model, batch) -> a number or a tensor of numbers, lower is better; None uses the task's loss.
        as_trained: run the differentiable form with the scales of training. In serving, the input of a chain is
            scaled differently.

    Returns:
        The losses, on the CPU, in order.
    """
    model, parts = task.model, []
    with undisturbed(model), gradients_aside(model), torch.set_grad_enabled(as_trained):
        model.eval()
        torch.manual_seed(0)
        for batch in batches:
            value = task.losses(model, batch) if metric is None else _as_tensor(metric(model, batch))
            parts.append(value.detach())
    return gather(parts)


def compare(found: Losses, base: Losses, metric: Any = None) -> Interval:
    """Compare two evaluations.

    Args:
        found: losses with something converted.
        base: losses in high precision.
        metric: see `evaluate`. A user's metric may be discrete, such as an error rate, and unchanged although outputs
            changed. Its interval then allows for a change too small for these values to show.

    Returns:
        The relative change of the metric, paired, with its interval.
    """
    if metric is None or base.step or not torch.equal(found.values, base.values):
        return found.change_from(base)
    return Interval(value=0.0, low=-base.unseen, high=base.unseen)


def evaluate_averaged(task: Task, metric: Any = None, *, as_trained: bool = False) -> Losses | None:
    """Compute the held-out losses if every example gets the batch's mean prediction, as from a constant model.

    Returns None if the model returned nothing that can be averaged. See `evaluate` for the arguments.
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
    """Copy a model that has run, with tensors detached that have a graph, which a plain deepcopy refuses.

    A forward may store them: the weight of weight_norm, or an activation for an auxiliary loss.
    """
    left = [t for module in model.modules() for t in tensors_in(dict(vars(module))) if not t.is_leaf]
    return copy.deepcopy(model, {id(t): t.detach().clone() for t in left})


def train_paired(
    task: Task, plan: Plan, steps: int, optimizer: MakeOptimizer | None, metric: Any, told: Callable[[int], None]
) -> Interval:
    """Train two copies of the model, one converted, with the same batches and random numbers, and compare them.

    They train on the first half of the batches and are compared on the held-out ones.

    Args:
        task: the model and how to run it; its own model is not trained.
        plan: applied to the second copy.
        steps: training steps of each copy.
        optimizer: makes an optimizer from parameters; None uses AdamW at 1e-3.
        metric: see `evaluate`.
        told: called with the number of steps done.

    Returns:
        The relative change of the metric, with its interval over examples. It includes what two training runs differ
        by anyway.

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
            trained = [p for p in twin.model.parameters() if p.requires_grad]
            _train(twin, make(trained), steps, lambda done, before=index * steps: told(before + done))  # type: ignore[misc]
        if all(torch.equal(a, b) for a, b in zip(before, twin.model.parameters(), strict=True)):
            raise ValueError(
                "train: the step does not train the model it is given; expected step(model, batch) that runs `model`"
            )
        found.append(evaluate(twin, twin.held_out, metric, as_trained=True))
    return compare(found[1], found[0], metric)


def _train(task: Task, optimizer: torch.optim.Optimizer, steps: int, told: Callable[[int], None]) -> None:
    if not (hasattr(optimizer, "zero_grad") and hasattr(optimizer, "step")):
        raise ValueError(
            f"optimizer= returned {type(optimizer).__name__}, expected an optimizer with step and zero_grad"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    evaluates = closure is not None and closure.default is closure.empty  # LBFGS runs the step itself, several times
    task.model.train()
    for step in range(steps):
        run = partial(_run_back, task, optimizer, task.looking[step % len(task.looking)])
        if evaluates:
            optimizer.step(run)  # type: ignore[arg-type]
        else:
            run()
            optimizer.step()
        told(step + 1)


def _run_back(task: Task, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    """Compute the loss of a batch and its gradients."""
    optimizer.zero_grad()
    with torch.enable_grad():
        loss = task.mean_loss(task.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
    return loss


def _as_tensor(value: Any) -> Tensor:
    """Return the value of a metric as a floating tensor; a number may also be one of NumPy's."""
    if isinstance(value, Real):
        return torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(value, Tensor) or value.is_complex():
        kind = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the metric returned {kind}, expected a number or a tensor of numbers, lower is better")
    return value if value.is_floating_point() else value.double()
