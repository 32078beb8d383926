"""Load and call a user's own code, named `pkg.module:name` on the command line.

Modules are searched in the working folder first, as with `python -m`. stdout is for results, so whatever the user's
code prints while it is imported, called or iterated goes to stderr. An exception raised in the user's code is reported
as such, with file and line (`blame`), not as an internal error of loka.
"""

import difflib
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

_PACKAGES: set[str] = set()  # top-level packages of the modules that the user named


def find_object(path: str) -> Any:
    """Import the object named by `pkg.module:name`, searching the working folder first."""
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
    except SyntaxError as error:  # no line of the file ran, so the traceback does not name it
        raise ValueError(f"{path}: {error.filename}, line {error.lineno}: {error.msg}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            similar = difflib.get_close_matches(part, vars(found), n=1)
            raise ValueError(
                f"{path}: {module_name} has no {name!r}{f'; did you mean {similar[0]}?' if similar else ''}"
            )
        found = getattr(found, part)
    return found


def _name_families(module_name: str) -> str:
    """Return a hint with the built-in families, which a word without a dot may have been meant to be."""
    from loka.models import names

    return "" if "." in module_name else f", and no built-in family has that name: {', '.join(names())}"


def forget() -> None:
    """Forget the modules that were named, for a process that runs several commands."""
    _PACKAGES.clear()


def blame(error: BaseException) -> str | None:
    """Return where in the user's own code an exception was raised (file and line), or None if it was raised in loka.

    The innermost frame of either decides; frames of torch and other libraries are skipped, and those of modes, which
    pass on every operation of a forward. So a wrong shape in the user's forward is the user's error, and an error in a
    converted linear that it calls is loka's.
    """
    found = None
    for frame, line in walk_tb(error.__traceback__):
        if frame.f_code.co_name == "__torch_dispatch__":
            continue
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _PACKAGES and package != "torch":
            found = f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"
        elif package == "loka":
            found = None
    return found


def call_with(function: Callable[..., Any], path: str, **offers: Any) -> Any:
    """Call a user's function with those of `offers` that it has parameters for."""
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
    """Import fn(output, targets); without a name, return binary cross-entropy of logits."""
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
        raise ValueError(
            "without --loss the model returns logits and targets are labels, both tensors; got "
            f"{type(output).__name__} and {type(targets).__name__}; hint: --loss pkg.module:fn"
        )
    return F.binary_cross_entropy_with_logits(
        output.float(), targets.to(output).float().reshape(output.shape), reduction="none"
    )


def build_own(model: str, options: dict[str, Any], **offers: Any) -> nn.Module:
    """Build a user's model with its factory."""
    if options:
        raise ValueError(
            f"{model} is your own model, which takes no options {sorted(options)}; set them in the factory"
        )
    network = call_with(find_object(model), model, **offers)
    if not isinstance(network, nn.Module):
        raise ValueError(f"{model}: expected an nn.Module, got {type(network).__name__}")
    return network


def quietly(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the same batches, with anything printed while one is made redirected to stderr."""
    iterator = iter(batches)
    while True:
        with redirect_stdout(sys.stderr):
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch
