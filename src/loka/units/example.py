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


class _SeenError(Exception):
    """The model was called: nothing that would follow is needed, a loss that may not fit its output least of all."""


def capture_example(model: nn.Module, run: Callable[[], Any]) -> Example:
    """The arguments that the model is called with first while `run` runs, which ends there: an example for whatever calls it."""
    seen: list[Example] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not seen:
            seen.append(copy_example(Example(args, kwargs)))
        raise _SeenError

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad(), suppress(_SeenError):
            run()
    finally:
        handle.remove()
    if not seen:
        raise ValueError("the model was not called, so there is no example of how it is")
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
    yield from _tensors_in(value, set(), _DEPTH)


_DEPTH = 6  # an object's attributes may lead to anything: a data set, the whole program
_PLAIN = (str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device, torch.Size, nn.Module)


def _tensors_in(value: Any, seen: set[int], depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, _PLAIN) or callable(value) or id(value) in seen or not depth:
        return
    seen.add(id(value))
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
