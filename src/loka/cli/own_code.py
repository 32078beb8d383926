"""A user's own code on the command line: found by `pkg.module:name`, given what it asks for by name, its prints on stderr.

Modules are found from the working folder first, as `python -m` would. stdout is data: what a user's code prints while it is imported, called or iterated goes to stderr.
Where an exception comes out of a user's code, the command line says so, with file and line (`blame`): it is no internal error of loka.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from importlib import import_module
from inspect import Parameter, signature
from traceback import walk_tb
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

_PACKAGES: set[str] = set()  # top-level names of the modules that a user named


def find_object(path: str) -> Any:
    """What `pkg.module:name` names; the working folder is searched first."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"expected pkg.module:name, got {path!r}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    _PACKAGES.add(module_name.partition(".")[0])
    try:
        with redirect_stdout(sys.stderr):
            module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path}: cannot import {error.name!r} (the working folder is searched too){_name_families(module_name)}"
        ) from error
    except SyntaxError as error:  # no line of it ran, so no traceback names the file
        raise ValueError(f"{path}: {error.filename}, line {error.lineno}: {error.msg}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{path}: {module_name} has no {name!r}")
        found = getattr(found, part)
    return found


def _name_families(module_name: str) -> str:
    """What else a plain word may have meant: a size of a built-in family."""
    from loka.models import names

    return "" if "." in module_name else f", and no built-in family has that name: {', '.join(names())}"


def forget() -> None:
    """Begin anew: no module was named yet. For a process that runs several commands."""
    _PACKAGES.clear()


def blame(error: BaseException) -> str | None:
    """Where in a user's own code an exception came up: file and line; None where it came up in loka.

    Args:
        error: what was raised.

    Returns:
        The innermost frame decides, torch's and other libraries' left out: a model whose forward gets a shape wrong is to blame, and a
        converted linear that it calls is not its fault.
    """
    found = None
    for frame, line in walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _PACKAGES and package != "torch":
            found = f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"
        elif package == "loka":
            found = None
    return found


def call_with(function: Callable[..., Any], path: str, **offers: Any) -> Any:
    """Call a user's function with those of the offers that it has parameters for."""
    if not callable(function):
        raise ValueError(f"{path}: expected a callable, got {type(function).__name__}")
    parameters = signature(function).parameters.values()
    named = {p.name for p in parameters if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)}
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
        named |= offers.keys()
    missing = [p.name for p in parameters if p.name in named and p.default is Parameter.empty and p.name not in offers]
    if missing:
        raise ValueError(f"{path}: needs {', '.join(missing)}; loka can give {', '.join(offers) or 'nothing'}")
    with redirect_stdout(sys.stderr):
        return function(**{name: value for name, value in offers.items() if name in named})


def find_loss(path: str | None) -> Callable[[Any, Any], Tensor]:
    """fn(output, targets) by its name; without one, binary cross-entropy of logits."""
    if path is None:
        return _cross_entropy
    found = find_object(path)
    if not callable(found):
        raise ValueError(f"{path}: expected fn(output, targets), got {type(found).__name__}")
    try:
        signature(found).bind(None, None)
    except TypeError as error:
        raise ValueError(f"{path}{signature(found)} cannot be called with (output, targets): {error}") from error
    except ValueError:  # a built-in function has no signature
        pass
    return found  # type: ignore[no-any-return]


def _cross_entropy(output: Any, targets: Any) -> Tensor:
    if not isinstance(output, Tensor) or not isinstance(targets, Tensor):
        raise ValueError(f"without --loss the model returns logits and targets are labels, both tensors; got {type(output).__name__} and {type(targets).__name__}; hint: --loss pkg.module:fn")  # fmt: skip
    return F.binary_cross_entropy_with_logits(
        output.float(), targets.to(output).float().reshape(output.shape), reduction="none"
    )


def build_own(model: str, options: dict[str, Any], **offers: Any) -> nn.Module:
    """A user's model from its factory."""
    if options:
        raise ValueError(f"{model} is your own: model options {sorted(options)} belong in the factory")
    network = call_with(find_object(model), model, **offers)
    if not isinstance(network, nn.Module):
        raise ValueError(f"{model}: expected an nn.Module, got {type(network).__name__}")
    return network


def quietly(batches: Iterable[Any]) -> Iterator[Any]:
    """The same batches; what is printed while one is made goes to stderr."""
    making = iter(batches)
    while True:
        with redirect_stdout(sys.stderr):
            try:
                batch = next(making)
            except StopIteration:
                return
        yield batch
