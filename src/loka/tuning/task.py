"""The user's model and batches, and how to compute a loss from them.

    Task(model, batches, loss)              a batch is (inputs, target): calls the model with the inputs (a tuple as
                                            *args, a dict as **kwargs), then loss(output, target)
    Task(model, batches, step=step)         any other batch: step(model, batch) returns the loss

A loss with one value per example (reduction="none") is compared by example. A mean is compared by batch, which needs
more batches for the same certainty.
"""

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn

from loka.measure.device import device_of
from loka.tuning.batches import keep_batches, versions_of
from loka.units.example import Example, NotCalledError, Steps, call_model, capture_example, copy_containers, tensors_in
from loka.units.undisturbed import sparing_weights, undisturbed

Step = Callable[[nn.Module, Any], Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]  # makes one from the parameters of a model


@dataclass
class Task:
    """A model and how to run it.

    Args:
        model: any nn.Module.
        batches: an iterable of batches; the first 64 are kept.
        loss: loss(output, target), for batches of (inputs, target).
        step: step(model, batch) -> loss, for any other batches. It must not call backward or an optimizer.
        autocast: autocast dtype; None runs the model as it is.

    Example:
        >>> Task(model, batches, F.binary_cross_entropy_with_logits)
    """

    model: nn.Module
    batches: Iterable[Any]
    loss: Callable[..., Tensor] | None = None
    step: Step | None = None
    autocast: torch.dtype | None = None
    kept: list[Any] = field(init=False)
    notes: list[str] = field(init=False)  # about the batches
    _checked: set[int] = field(init=False, default_factory=set)
    _differentiates: bool = field(init=False, default=False)  # the step takes gradients, for a penalty
    _paired: bool = field(init=False, default=False)  # the note about a loss of all pairs is written

    def __post_init__(self) -> None:
        if (self.loss is None) == (self.step is None):
            raise ValueError(
                "give a loss for batches of (inputs, target), or a step(model, batch) that returns the loss; "
                "exactly one of them"
            )
        if self.step is None:
            check_arity("loss", self.loss, 2, "(output, target)")
        else:
            check_arity("step", self.step, 2, "(model, batch)")
        if not isinstance(self.batches, Iterable):
            raise ValueError(
                f"batches is {type(self.batches).__name__}, expected an iterable of batches: a list, a DataLoader, "
                "a generator"
            )
        self.kept, self.notes = keep_batches(self.batches)
        if not self.kept:
            raise ValueError("batches is empty, or an iterator that is already used up; expected at least 2 batches")
        if len(self.kept) < 2:
            raise ValueError("got one batch; expected at least 2: choices made on one half are verified on the other")
        for index, batch in enumerate(self.kept if self.step is None else ()):
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
                raise ValueError(
                    f"batch {index} is {type(batch).__name__}{size}, expected (inputs, target); hint: for batches of "
                    "another form give a step instead of a loss, step=lambda model, batch: my_loss(model(batch), batch)"
                )

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return device_of(self.model)

    @property
    def looking(self) -> list[Any]:
        """Batches to choose on: the first half."""
        return self.kept[: max(len(self.kept) // 2, 1)]

    @property
    def held_out(self) -> list[Any]:
        """Batches to verify choices on: the second half."""
        return self.kept[max(len(self.kept) // 2, 1) :]

    def context(self) -> AbstractContextManager[Any]:
        """Return the autocast context, if any."""
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)

    def losses(self, model: nn.Module, batch: Any, *, copied: bool = True) -> Tensor:
        """Compute the loss of a batch, in its own dtype: one value, or one per example.

        With `copied`, the model gets copies of its input tensors, so it may write to them. A step gets the batch's own
        tensors in new containers: it may modify lists and dicts, but must not write to tensors.
        """
        with self.context():
            if self.step is not None:
                value = self._run_step(model, batch)
            else:
                assert self.loss is not None
                inputs, target = batch
                value = self._call_loss(self._call(model, inputs, copied), target)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"the {'loss' if self.step is None else 'step'} returned {kind}, expected a floating tensor")  # fmt: skip
        return value

    def _call(self, model: nn.Module, inputs: Any, copied: bool) -> Any:
        try:
            return call_model(model, tuple(inputs) if isinstance(inputs, list) else inputs, copied=copied)
        except TypeError as error:
            several = "**kwargs" if isinstance(inputs, dict) else "*args"
            taken = several if isinstance(inputs, (dict, tuple, list)) else "one argument"
            raise ValueError(
                f"the inputs of a batch are a {type(inputs).__name__}, given as {taken}, and {type(model).__name__} "
                f"fails: {error}; hint: ((inputs,), target) passes a tuple or a dict as one argument; "
                "with step= you call the model yourself"
            ) from error

    def _call_loss(self, output: Any, target: Any) -> Any:
        """Call the loss. If it fails, its error says what it was called with; if it pairs all examples, a note does."""
        assert self.loss is not None
        try:
            value = self.loss(output, target)
        except Exception as error:
            said = f"loss(output, target) was called with output {_spell(output)} and target {_spell(target)}"
            if said not in getattr(error, "__notes__", ()):
                error.add_note(said)
            raise
        plain = all(isinstance(each, Tensor) and not each.is_nested for each in (value, output, target))
        if plain and not self._paired:
            rows = len(target) if target.dim() else 0
            shapes = sorted((tuple(output.shape), tuple(target.shape)), key=len)
            if rows > 1 and shapes == [(rows,), (rows, 1)] and value.shape == (rows, rows):
                self._paired = True
                self.notes.append(
                    f"the loss returned {_spell(value)} for output {_spell(output)} and target {_spell(target)}: torch "
                    "broadcasts these shapes, so every output met every target; if that is not meant, squeeze the output"
                )
        return value

    def _run_step(self, model: nn.Module, batch: Any) -> Tensor:
        """Run the step, and raise if it trains the model or writes to its batch. Every batch is checked once."""
        if id(batch) in self._checked:
            return self._call_step(model, batch)
        calls = "expected step(model, batch) that returns the loss and leaves backward, clipping and the optimizer to the caller"
        scaled = {id(p) for m in model.modules() if getattr(m, "max_norm", None) is not None for p in m.parameters()}
        weights = [p for p in model.parameters() if id(p) not in scaled]  # a table with max_norm rescales itself
        given = list(tensors_in(batch))
        before = versions_of(weights), versions_of(given)
        try:
            value = self._call_step(model, batch)
        except RuntimeError as error:
            if not torch.is_grad_enabled() and "does not require grad" in str(error):
                raise ValueError(f"the step calls backward: {calls}") from error
            raise
        if versions_of(weights) != before[0]:
            raise ValueError(
                f"the step changes the weights of the model: {calls}; hint: what a forward does to weights (to those of "
                "a target network) can stay with loss=, or move to the training loop"
            )
        if versions_of(given) != before[1]:
            raise ValueError(
                "the step changes its batch in place, so repeated runs would see different data; hint: "
                "clone what it writes to"
            )
        self._checked.add(id(batch))
        return value

    def _call_step(self, model: nn.Module, batch: Any) -> Tensor:
        """Call the step; with gradients if it takes some, even where none are needed otherwise."""
        assert self.step is not None
        with torch.enable_grad() if self._differentiates else nullcontext():
            try:
                return self.step(model, copy_containers(batch))
            except RuntimeError as error:
                if self._differentiates or not _is_from_grad(error):
                    raise
        self._differentiates = True
        return self._call_step(model, batch)

    def mean_loss(self, model: nn.Module, batch: Any, *, copied: bool = True) -> Tensor:
        """Compute the mean loss of a batch, and raise if it is not differentiable while gradients are enabled."""
        loss = self.losses(model, batch, copied=copied).float().mean()
        if torch.is_grad_enabled() and not loss.requires_grad:
            why = (
                "tune was called under torch.inference_mode"
                if torch.is_inference_mode_enabled()
                else "the loss, or a part of the model, is computed without gradients"
            )
            raise ValueError(
                f"no gradient flows from the loss to the model, so the effect of rounding errors cannot be predicted: {why}"
            )
        return loss

    def example(self) -> Example | None:
        """Return the arguments of one call of the model, or None if the step only calls parts of the model."""
        with undisturbed(self.model), sparing_weights(self.model), suppress(NotCalledError):
            return capture_example(self.model, lambda: self.losses(self.model.eval(), self.kept[0]))
        return None

    def steps(self) -> Steps:
        """Return functions that run the model on each batch."""
        return Steps(tuple(partial(self.losses, self.model, batch) for batch in self.kept))


def _spell(value: Any) -> str:
    """Describe what a loss gets or returns: the type and shape of a tensor, otherwise the type."""
    if isinstance(value, Tensor):
        if value.is_nested:  # of which torch does not tell the shape
            return f"nested {str(value.dtype).removeprefix('torch.')}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def _is_from_grad(error: BaseException) -> bool:
    """Check whether an error was raised in `torch.autograd.grad`."""
    return any(frame.f_code is torch.autograd.grad.__code__ for frame, _ in walk_tb(error.__traceback__))


def check_arity(name: str, function: Any, given: int, what: str) -> None:
    """Raise a ValueError if a function cannot be called with the arguments it will get.

    Args:
        name: the parameter of `loka.tune` that it was given as, for the message.
        function: what was given; anything that is no function raises, too.
        given: how many arguments it will get, all of them positional.
        what: the names of these arguments, for the message: "(model, batch)".
    """
    if not callable(function):
        # a word is shown as it is; a list of batches would print all of its numbers
        seen = f"{type(function).__name__} {function!r}" if isinstance(function, str | None) else _spell(function)
        raise ValueError(f"{name} is {seen}, expected a function of {what}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-in functions have none
        return
    try:
        signature.bind(*([None] * given))
    except TypeError as error:
        raise ValueError(f"{name}{signature} cannot be called with {what}: {error}") from error
