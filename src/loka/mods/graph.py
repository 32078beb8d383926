"""Find public methods of a module, besides forward, that use its children (such as a decoder's `step`).

A mod that changes what forward does would not reach them, and the two would disagree.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from torch import nn


def other_entries(module: nn.Module) -> list[str]:
    """Return the names of public methods, besides forward, that use a child of the module.

    Methods of torch's own modules are ignored. A method whose source cannot be read is included.
    """
    found: list[str] = []
    for base in type(module).__mro__:
        if base.__module__.startswith("torch.nn"):
            break
        for name, value in vars(base).items():
            if name.startswith("_") or name in ("forward", "extra_repr", "train", "eval"):
                continue
            if inspect.isfunction(value) and _uses_child(module, value, set()):
                found.append(name)
    return found


def _uses_child(module: nn.Module, method: Callable[..., Any], seen: set[Any]) -> bool:
    """Return True if a method refers to a child of the module, directly or through another method."""
    seen.add(method)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, SyntaxError):
        return True
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"):
            continue
        if node.attr in module._modules:
            return True
        other = inspect.getattr_static(type(module), node.attr, None)
        if inspect.isfunction(other) and other not in seen and _uses_child(module, other, seen):
            return True
    return False
