"""Examples: the arguments of one call of a model, captured, copied, given to it, and the tensors in them."""

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
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Steps:
    """What runs a model its own way, one function for every batch: each call of it, or of its parts, is an example."""

    runs: tuple[Callable[[], Any], ...]


class NotCalledError(ValueError):
    """The model was not called where an example of its call was to be taken."""


class _SeenError(BaseException):  # nobody's `except Exception` takes it for a failure
    """The model has run: nothing that would follow is needed, a loss that may not fit its output least of all."""


def capture_example(model: nn.Module, run: Callable[[], Any], *, stop: bool = False) -> Example:
    """The arguments that the model is called with first while `run` runs: an example for whatever calls it.

    Args:
        model: any module.
        run: calls it.
        stop: end when its forward has run.

    Returns:
        A copy of the arguments.

    Raises:
        NotCalledError: it was not called, though parts of it may have been.
    """
    seen: list[Example] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not seen:
            seen.append(copy_example(Example(args, kwargs)))

    def end(*_: Any) -> None:
        if stop:
            raise _SeenError

    handles = model.register_forward_pre_hook(note, with_kwargs=True), model.register_forward_hook(end)
    try:
        with torch.no_grad(), suppress(_SeenError):
            run()
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise NotCalledError(f"{type(model).__name__} itself was not called, so there is no example of its call")
    return seen[0]


def call_model(model: nn.Module, example: Any, *, copied: bool = True) -> Any:
    """Call a model on an example. A tuple is *args, a dict **kwargs, an Example both, anything else one argument.

    Args:
        model: any.
        example: its arguments.
        copied: give it a copy, since it may write into its input; where a call is timed, the copy would be timed with it, and only lists and dicts are made anew.

    Returns:
        What the model returns.
    """
    return call_as_given(model, copy_example(example) if copied else copy_containers(example))


def try_example(model: nn.Module, example: Any) -> Any:
    """`call_model` on an example that a user gave.

    Args:
        model: any.
        example: its arguments.

    Returns:
        What the model returns.

    Raises:
        ValueError: the model fails on it, with what is expected of an example.
    """
    try:
        return call_model(model, example)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"the model cannot run the example: {type(error).__name__}: {error}; hint: an example is the model's input without a target, a tuple for several arguments, a dict for keyword arguments"
        ) from error


def call_as_given(model: nn.Module, example: Any) -> Any:
    """`call_model` without any copy: a tracer cannot follow one."""
    if isinstance(example, Example):
        return model(*example.args, **example.kwargs)
    if isinstance(example, tuple):
        return model(*example)
    return model(**example) if isinstance(example, dict) else model(example)


def copy_example(example: Any) -> Any:
    """A copy, for a model that writes into its input; what cannot be copied is given as it is, in new lists and dicts."""
    try:
        return copy.deepcopy(example)
    except Exception:  # a tensor with a history, a handle of a file
        return copy_containers(example)


def copy_containers(value: Any) -> Any:
    """The same tensors in new lists, tuples and dicts: a forward may take out what it reads (`features.pop("dense")`)."""
    if isinstance(value, Example):
        return Example(copy_containers(value.args), copy_containers(value.kwargs))
    return pytree.tree_map(lambda leaf: leaf, value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses, and in the attributes of other objects (a jagged tensor, a cache of keys)."""
    yield from _tensors_in(value, {}, _DEPTH)


_DEPTH = 6  # an object's attributes may lead to anything: a data set, the whole program
_PLAIN = (str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device, torch.Size, nn.Module)


def _tensors_in(value: Any, seen: dict[int, int], depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    # what was met far down, where little of it could be seen, is looked at again where it is nearer
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
