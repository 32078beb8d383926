"""Flatten a model's arguments to named tensors in a fixed order.

A package takes tensors only, no dataclasses or nested dictionaries. So the example is flattened, `Batch(dense,
sequences={"basket": Jagged})` to "dense", "sequences.basket.values", ..., and a module around the model rebuilds the
arguments from the tensors of a call. Values that are not tensors become constants.

Tensors are made contiguous: a package assumes the strides of its example for every call, without a check.

Tensors that the model never reads (labels) are not inputs. They are replaced by zeros with as many rows as some input,
because the object they belong to may check its sizes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from inspect import signature
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from loka.nn.mixing import unmixed
from loka.units import Example
from loka.units.example import call_as_given

Rebuild = Callable[[Mapping[str, Tensor]], Any]


@dataclass(frozen=True)
class Arguments:
    """A flattened example."""

    tensors: dict[str, Tensor]  # by name, in the order of a call
    rebuild: Rebuild  # makes the arguments of the model from such tensors


def take_apart(example: Any, parameters: Sequence[str] = ()) -> Arguments:
    """Flatten an example to tensors by name, and return them with a function that rebuilds the example.

    A tuple is *args, a dict **kwargs, an `Example` both, anything else one argument. Arguments beyond `parameters`, the
    names of forward's, are `input_0`, `input_1`, ... Raises ValueError if the example has no tensor.
    """
    found: dict[str, Tensor] = {}
    if isinstance(example, Example) and len(example.args) == 1 and not example.kwargs and not isinstance(example.args[0], (tuple, dict)):  # fmt: skip
        example = example.args[0]
    if isinstance(example, Example):
        positional = [_visit(value, _name(i, parameters), found) for i, value in enumerate(example.args)]
        keywords = {key: _visit(value, key, found) for key, value in example.kwargs.items()}
        made: Rebuild = lambda t: Example(tuple(p(t) for p in positional), {k: p(t) for k, p in keywords.items()})  # noqa: E731
    elif isinstance(example, tuple) and not hasattr(example, "_fields"):
        listed = [_visit(value, _name(i, parameters), found) for i, value in enumerate(example)]
        made = lambda t: tuple(part(t) for part in listed)  # noqa: E731
    elif isinstance(example, Tensor):
        made = _visit(example, parameters[0] if parameters else "input", found)
    else:
        made = _visit(example, "", found)
    if not found:
        raise ValueError(
            f"the example is a {type(example).__name__} without a tensor in it; expected the arguments of one call of "
            "the model"
        )
    return Arguments(found, made)


def _visit(value: Any, name: str, found: dict[str, Tensor]) -> Rebuild:
    """Add the tensors of a value to `found` by name; return a function that rebuilds the value."""
    if isinstance(value, Tensor):
        whole = _whole(value)
        # torch.export would treat one tensor in two places as one input, and the other would seem unread
        found[name] = whole.clone() if any(whole is other for other in found.values()) else whole
        return lambda tensors: tensors[name]
    inner = f"{name}." if name else ""
    if isinstance(value, Mapping):
        parts = {key: _visit(part, f"{inner}{key}", found) for key, part in value.items()}
        return lambda tensors: {key: part(tensors) for key, part in parts.items()}
    if isinstance(value, (tuple, list)):
        listed = [_visit(part, f"{inner}{_word(i, name)}", found) for i, part in enumerate(value)]
        kind = type(value)
        if hasattr(value, "_fields"):  # a NamedTuple
            return lambda tensors: kind(*(part(tensors) for part in listed))
        return lambda tensors: kind(part(tensors) for part in listed)
    if is_dataclass(value) and not isinstance(value, type):
        members = {f.name: _visit(getattr(value, f.name), f"{inner}{f.name}", found) for f in fields(value) if f.init}
        return lambda tensors: replace(value, **{key: part(tensors) for key, part in members.items()})
    return lambda tensors: value


def _whole(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor that is not a view: compiled code assumes the strides of its example in every call."""
    if tensor.layout != torch.strided:
        return tensor
    return tensor.detach().clone(memory_format=torch.contiguous_format) if tensor._is_view() or not tensor.is_contiguous() else tensor  # fmt: skip


def _word(index: int, name: str) -> str:
    return str(index) if name else f"input_{index}"


def _name(index: int, parameters: Sequence[str]) -> str:
    return parameters[index] if index < len(parameters) else f"input_{index}"


def name_parameters(model: nn.Module) -> list[str]:
    """Return the names of the positional arguments of a model's forward, up to *args."""
    try:
        own = vars(model).get("forward")  # assigned to the instance, hence without self
        forward = unmixed(type(model)).forward if own is None else own
        parameters = list(signature(forward).parameters.values())[own is None :]
    except (TypeError, ValueError):  # not written in Python
        return []
    return [p.name for p in takewhile(lambda p: p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD), parameters)]


class Flat(nn.Module):
    """A wrapper that calls a model with tensors in a fixed order.

    Tensors of the example that are not in `inputs` are zeros with as many rows as one of these.
    """

    def __init__(self, model: nn.Module, arguments: Arguments, inputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inputs = model, list(inputs)
        self._rebuild = arguments.rebuild
        self._unread = {
            name: (_alike(tensor, arguments.tensors, inputs), tensor.shape[1:], tensor.dtype)
            for name, tensor in arguments.tensors.items()
            if name not in self.inputs
        }

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the model's results as a flat tuple."""
        given = dict(zip(self.inputs, tensors, strict=True))
        for name, (like, rest, dtype) in self._unread.items():
            given[name] = torch.zeros((given[like].shape[0], *rest), dtype=dtype, device=given[like].device)
        return tuple(flatten_result(call_as_given(self.model, self._rebuild(given))))


def _alike(tensor: Tensor, tensors: Mapping[str, Tensor], inputs: Sequence[str]) -> str:
    """Return the name of an input with as many rows."""
    return next(n for n in inputs if tensors[n].dim() and tensor.dim() and tensors[n].shape[0] == tensor.shape[0])


def can_be_made(name: str, tensors: Mapping[str, Tensor], inputs: Sequence[str]) -> bool:
    """Return True if an unread tensor has as many rows as some input; otherwise it must stay an input itself."""
    tensor = tensors[name]
    return any(tensors[n].dim() and tensor.dim() and tensors[n].shape[0] == tensor.shape[0] for n in inputs)


def flatten_result(result: Any) -> list[Tensor]:
    """Return every tensor of a model's result in order, including those in tuples, lists, dicts and dataclasses."""
    return [part for _, part in _walk(result, "") if isinstance(part, Tensor)]


def name_results(result: Any) -> list[str]:
    """Return the names of the tensors of `flatten_result`: keys, fields, tuple indices; `output` for a lone tensor."""
    return [name or "output" for name, part in _walk(result, "") if isinstance(part, Tensor)]


def name_left_out(result: Any) -> dict[str, str]:
    """Return the names and types of those parts of a model's result that are neither tensors nor None."""
    found = [(name, part) for name, part in _walk(result, "") if part is not None and not isinstance(part, Tensor)]
    return {name or "output": type(part).__name__ for name, part in found}


def _walk(result: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every part of a result that is not a container, with its name."""
    parts: Iterable[tuple[Any, Any]]
    if isinstance(result, Mapping):
        parts = result.items()
    elif isinstance(result, (tuple, list)):
        words = getattr(result, "_fields", None) or [str(i) if name else f"output_{i}" for i in range(len(result))]
        parts = zip(words, result, strict=True)
    elif is_dataclass(result) and not isinstance(result, type):
        parts = ((f.name, getattr(result, f.name)) for f in fields(result))
    else:
        yield name, result
        return
    for word, part in parts:
        yield from _walk(part, f"{name}.{word}" if name else str(word))
