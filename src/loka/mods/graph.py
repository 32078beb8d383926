"""Graph: the forward of one module, symbolically traced with its children as black boxes (torch.fx), to read which child follows which.

Nothing is compiled from a graph: a compiled one would keep the way that was taken while it was traced. A forward that may take another way, or reads anything
of itself that may change later, is refused (`loka.mods.branching`), and so is one that the tracer cannot follow. So is a class with further methods that call its children (a
decoder's `step`): what replaces its forward would not reach them, and the two would disagree.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx, nn

from loka.mods.branching import find_branch

_COUNTED = {"split": 1, "chunk": 1, "unbind": None, "split_with_sizes": 1}


class Tracer(fx.Tracer):
    """Children are leaves; a split into a known number of parts may be unpacked, also with a star."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Never look inside a child."""
        return True

    def iter(self, obj: fx.Proxy) -> Iterator[fx.Proxy]:
        """The parts of a split whose number is written in the code."""
        count = _count_parts(obj.node)
        if count is None:
            return super().iter(obj)
        return iter([obj[index] for index in range(count)])  # type: ignore[index]


def _count_parts(node: fx.Node) -> int | None:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name not in _COUNTED or len(node.args) < 2:
        return None
    sizes = node.args[1]
    if isinstance(sizes, (list, tuple)):
        return len(sizes)
    return sizes if name == "chunk" and isinstance(sizes, int) else None


def trace(module: nn.Module) -> fx.Graph | str:
    """The graph of a module's forward, or why there is none."""
    others = other_entries(module)
    if others:
        return f"{type(module).__name__} has other entry points ({', '.join(others)}) that a rewritten forward would not agree with"
    if why := find_branch(module, strict=True):
        return f"{why}; hint: a chain of modules in an nn.Sequential always runs the same"
    try:
        return Tracer().trace(module)
    except Exception as error:  # whatever control flow a forward has; the reason is reported
        return f"its forward cannot be traced: {type(error).__name__}: {str(error).splitlines()[0]}"


def other_entries(module: nn.Module) -> list[str]:
    """Public methods, beside forward, that use a child of the module.

    Args:
        module: any module; methods that nn.Module and torch's own modules define are not counted.

    Returns:
        Their names; a method whose source cannot be read is assumed to be one.
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
    """Whether a method names a child of the module, itself or through another method."""
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
