"""Example inputs of a model: capture and copy them, call the model on them, and find the tensors in them."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Example:
    """The arguments of one call of a model.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.

    Example:
        >>> found = loka.units.discover(model, Example((batch,), {}))  # model(batch)
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Steps:
    """Functions that run a model, one per batch. Each call they make of the model or its parts serves as an example.

    Args:
        runs: functions without arguments.

    Example:
        >>> steps = Steps(tuple(lambda batch=batch: model(batch) for batch in batches))
        >>> print(loka.units.discover(model, steps))
    """

    runs: tuple[Callable[[], Any], ...]


class NotCalledError(ValueError):
    """The model was not called, so no example could be captured."""


class _StopRunError(BaseException):  # a BaseException, so that the caller's `except Exception` does not catch it
    """Ends the run after the model's forward; what follows, such as a loss, is not needed and may fail."""


def capture_example(model: nn.Module, run: Callable[[], Any], *, stop: bool = False) -> Example:
    """Return the arguments of the first call that `run` makes of the model.

    Args:
        model: any module.
        run: a function that calls it.
        stop: stop `run` as soon as the model's forward has run.

    Returns:
        A copy of the arguments.

    Raises:
        NotCalledError: the model itself was not called, though parts of it may have been.

    Example:
        >>> example = loka.units.capture_example(model, lambda: train_step(model, batch), stop=True)
    """
    seen: list[Example] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not seen:
            seen.append(copy_example(Example(args, kwargs)))

    def end(*_: Any) -> None:
        if stop:
            raise _StopRunError

    handles = model.register_forward_pre_hook(note, with_kwargs=True), model.register_forward_hook(end)
    try:
        with torch.no_grad(), suppress(_StopRunError):
            run()
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise NotCalledError(f"{type(model).__name__} itself was not called, so there is no example of its call")
    return seen[0]


def call_model(model: nn.Module, example: Any, *, copied: bool = True) -> Any:
    """Call a model on an example. A tuple is *args, a dict **kwargs, an Example both, anything else one argument.

    The model may write into its input, so it gets a copy. `copied=False` copies only containers, not tensors: a copy
    would count in a call that is timed.
    """
    return call_as_given(model, copy_example(example) if copied else copy_containers(example))


def try_example(model: nn.Module, example: Any) -> Any:
    """Call `call_model`, and turn a failure into a ValueError that says what an example should be."""
    try:
        return call_model(model, example)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"the model cannot run the example: {type(error).__name__}: {error}; hint: an example is the model's input "
            "without a target, a tuple for several arguments, a dict for keyword arguments"
        ) from error


def call_as_given(model: nn.Module, example: Any) -> Any:
    """Call a model like `call_model`, but without any copy, which a tracer could not follow."""
    if isinstance(example, Example):
        return model(*example.args, **example.kwargs)
    if isinstance(example, tuple):
        return model(*example)
    return model(**example) if isinstance(example, dict) else model(example)


def copy_example(example: Any) -> Any:
    """Return a deep copy; if there is something that cannot be copied, copy only the containers."""
    try:
        return copy.deepcopy(example)
    except Exception:  # a non-leaf tensor, a file handle
        return copy_containers(example)


def copy_containers(value: Any) -> Any:
    """Return the same tensors in new containers, since a forward may change these (`features.pop("dense")`)."""
    if isinstance(value, Example):
        return Example(copy_containers(value.args), copy_containers(value.kwargs))
    return pytree.tree_map(lambda leaf: leaf, value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested containers, dataclasses and attributes of objects (a jagged tensor, a KV cache)."""
    yield from _tensors_in(value, {}, _DEPTH)


_DEPTH = 6  # attributes may lead anywhere: to a data set, to the whole program
_PLAIN = (str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device, torch.Size, nn.Module)


def _tensors_in(value: Any, seen: dict[int, int], depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    # `seen` holds the depth left at the last visit: an object met again with more depth left is searched again
    if isinstance(value, _PLAIN) or callable(value) or seen.get(id(value), 0) >= depth:
        return
    seen[id(value)] = depth
    if isinstance(value, (tuple, list)):
        parts: Iterable[Any] = value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif is_dataclass(value):
        parts = [getattr(value, part.name) for part in fields(value)]
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    for part in parts:
        yield from _tensors_in(part, seen, depth - 1)
