"""What the user gave: a model, batches, and how a loss comes out of them.

    Task(model, batches, loss)              a batch is (inputs, target); the model is called with the inputs (a tuple is *args, a dict **kwargs), loss(output, target)
    Task(model, batches, step=step)         anything else: step(model, batch) returns the loss

A loss that returns one number per example (reduction="none") is compared example by example; one that returns a mean, batch by batch, which needs more batches for the same certainty.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from loka.measure.device import device_of
from loka.units.example import Example, NotCalledError, Steps, call_model, capture_example, copy_containers, tensors_in
from loka.units.undisturbed import undisturbed

Step = Callable[[nn.Module, Any], Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]  # from a model's parameters
MOST = 64  # batches that are kept at most


@dataclass
class Task:
    """A model and how to run it.

    Args:
        model: any nn.Module.
        batches: an iterable; at most 64 batches of it are kept.
        loss: loss(output, target), for batches of (inputs, target).
        step: step(model, batch) -> loss, for batches of any other kind; it neither calls backward nor trains.
        autocast: compute in this type; None runs the model as it is.

    Example:
        >>> Task(model, batches, F.binary_cross_entropy_with_logits)
    """

    model: nn.Module
    batches: Iterable[Any]
    loss: Callable[..., Tensor] | None = None
    step: Step | None = None
    autocast: torch.dtype | None = None
    kept: list[Any] = field(init=False)
    _checked: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        if (self.loss is None) == (self.step is None):
            raise ValueError("give a loss for batches of (inputs, target), or a step(model, batch) that returns the loss; exactly one of them")  # fmt: skip
        name, function, given = ("loss", self.loss, 2) if self.step is None else ("step", self.step, 2)
        check_arity(name, function, given, "(output, target)" if name == "loss" else "(model, batch)")
        if not isinstance(self.batches, Iterable):
            raise ValueError(f"batches is {type(self.batches).__name__}, expected an iterable of batches: a list, a DataLoader, a generator")  # fmt: skip
        self.kept = list(islice(iter(self.batches), MOST))
        if not self.kept:
            raise ValueError("batches is empty, or an iterator that was used up before; expected at least 2 batches")
        if len(self.kept) < 2:
            raise ValueError("got one batch; expected at least 2, since what is chosen on one is verified on others")
        for index, batch in enumerate(self.kept if self.step is None else ()):
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                kind = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__  # fmt: skip
                raise ValueError(f"batch {index} is {kind}, expected (inputs, target); hint: step=lambda model, batch: loss")  # fmt: skip

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return device_of(self.model)

    @property
    def looking(self) -> list[Any]:
        """Batches that choices are made on."""
        return self.kept[: max(len(self.kept) // 2, 1)]

    @property
    def held_out(self) -> list[Any]:
        """Batches that choices are verified on."""
        return self.kept[max(len(self.kept) // 2, 1) :]

    def context(self) -> AbstractContextManager[Any]:
        """Autocast, where asked."""
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)

    def losses(self, model: nn.Module, batch: Any, *, copied: bool = True) -> Tensor:
        """The loss of a batch in the type it comes in: one number, or one for each example. `copied`: the model gets a copy of its inputs, which it may write to; a step may take lists and dicts apart, and writes to nothing."""
        with self.context():
            if self.step is not None:
                value = self._run_step(self.step, model, batch)
            else:
                assert self.loss is not None
                inputs, target = batch
                value = self.loss(self._call(model, inputs, copied), target)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"the {'loss' if self.step is None else 'step'} returned {kind}, expected a floating tensor")  # fmt: skip
        return value

    def _call(self, model: nn.Module, inputs: Any, copied: bool) -> Any:
        try:
            return call_model(model, tuple(inputs) if isinstance(inputs, list) else inputs, copied=copied)
        except TypeError as error:
            taken = "**kwargs" if isinstance(inputs, dict) else "*args" if isinstance(inputs, (tuple, list)) else "one argument"  # fmt: skip
            raise ValueError(f"the inputs of a batch are a {type(inputs).__name__}, given as {taken}, and {type(model).__name__} fails: {error}; hint: ((inputs,), target) gives a tuple or a dict as one argument, step= calls the model in any way") from error  # fmt: skip

    def _run_step(self, step: Step, model: nn.Module, batch: Any) -> Tensor:
        """The loss, from a step that leaves training to others: one that calls backward or an optimizer would train here, at every look. Checked once for every batch."""
        if id(batch) in self._checked:
            return step(model, copy_containers(batch))
        calls = "expected step(model, batch) that returns the loss and leaves backward, clipping and the optimizer to the caller"
        scaled = {id(p) for m in model.modules() if getattr(m, "max_norm", None) is not None for p in m.parameters()}
        weights = [p for p in model.parameters() if id(p) not in scaled]  # a table with max_norm writes to itself
        given = list(tensors_in(batch))
        before = _versions(weights), _versions(given)
        try:
            value = step(model, copy_containers(batch))
        except RuntimeError as error:
            if not torch.is_grad_enabled() and "does not require grad" in str(error):
                raise ValueError(f"the step calls backward: {calls}") from error
            raise
        if _versions(weights) != before[0]:
            raise ValueError(f"the step changes the weights of the model: {calls}")
        if _versions(given) != before[1]:
            raise ValueError("the step changes its batch in place, so that no two runs see the same one; hint: clone what it writes to")  # fmt: skip
        self._checked.add(id(batch))
        return value

    def mean_loss(self, model: nn.Module, batch: Any, *, copied: bool = True) -> Tensor:
        """The loss of a batch as one number to differentiate."""
        loss = self.losses(model, batch, copied=copied).float().mean()
        if torch.is_grad_enabled() and not loss.requires_grad:
            why = "tune was called under torch.inference_mode" if torch.is_inference_mode_enabled() else "the loss, or a part of the model, is computed without gradients"  # fmt: skip
            raise ValueError(f"no gradient leads from the loss to the model, so nothing predicts what an error does: {why}")  # fmt: skip
        return loss

    def example(self) -> Example | None:
        """The arguments of one call of the model, as the step makes it; None where the step calls parts of the model alone."""
        with undisturbed(self.model), suppress(NotCalledError):
            return capture_example(self.model, lambda: self.losses(self.model.eval(), self.kept[0]))
        return None

    def steps(self) -> Steps:
        """What runs the model on each of the batches."""
        return Steps(tuple(partial(self.losses, self.model, batch) for batch in self.kept))


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was written to; tensors of inference mode do not count."""
    return [0 if t.is_inference() else t._version for t in tensors]


def check_arity(name: str, function: Any, given: int, what: str) -> None:
    """A function that cannot take what it will be given is named before anything runs.

    Args:
        name: as the caller of tune knows it.
        function: what was given.
        given: how many arguments it will get.
        what: these.
    """
    if not callable(function):
        raise ValueError(f"{name} is {type(function).__name__} {function!r}, expected a function of {what}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-in functions have none
        return
    try:
        signature.bind(*([None] * given))
    except TypeError as error:
        raise ValueError(f"{name}{signature} cannot be called with {what}: {error}") from error
