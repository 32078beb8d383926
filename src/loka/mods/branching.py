"""Branching: whether a module's forward can take a way that one run of it does not show.

A mod that moves a computation from one place to another must know that both places are always passed together. One run on an example shows one way; an `if` on
`self.training`, on an optional argument or on a flag hides the others. So the source of the forward is read, and of the methods it calls on itself, and whatever could go
another way next time is named: conditions, loops with a condition, try, match, functions that are given the module or its children and may do anything with them, a
forward that is decorated or replaced. Conditions that only raise, and assertions, end a call and change no way.

This errs on the side of naming too much. Where the source cannot be read, that is the reason.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from loka.mods.interception import Reordered

_STRAIGHT = (nn.Sequential.forward, Reordered.forward)
_LOOPS = ("enumerate", "reversed", "zip", "range", "len", "list", "tuple")


def find_branch(module: nn.Module, *, strict: bool = False) -> str | None:
    """Why a module's forward may do something else on another call; None where it always runs the same lines.

    Args:
        module: any module; its children are not looked into.
        strict: also name everything it reads of itself that is no module: a number of layers, a list, a flag handed on.

    Returns:
        The reason, with the line, or None.

    Example:
        >>> find_branch(nn.Sequential(nn.Linear(2, 2))) is None
        True
    """
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    kind = type(module)
    if kind.forward in _STRAIGHT:
        return None
    if kind.forward is nn.Module.forward:
        return f"{kind.__name__} has no forward"
    return next(_walk(module, "forward", kind.forward, set(), strict), None)


def _walk(module: nn.Module, name: str, function: Callable[..., Any], seen: set[Any], strict: bool) -> Iterator[str]:
    if function in seen:
        return
    seen.add(function)
    tree = _parse(function)
    if tree is None:
        yield f"the source of its {name} cannot be read"
        return
    if tree.decorator_list:
        yield f"its {name} is decorated ({ast.unparse(tree.decorator_list[0])})"
        return
    own = tree.args.args[0].arg if tree.args.args else "self"
    for node in _nodes(tree.body):
        if condition := _condition(node):
            yield f"its {name} branches ({condition}), and one run shows one way only"
        elif isinstance(node, ast.Call):
            yield from _walk_call(module, node, own, seen, strict)
        elif (
            isinstance(node, ast.Subscript)
            and _is_own(module, node.value, own)
            and f"{own}." in ast.unparse(node.slice)
        ):
            yield f"its {name} chooses {ast.unparse(node)}, which may change later"
        elif strict and _reads_other(module, node, own):
            yield f"its {name} reads {ast.unparse(node)}, which may change later"


def _parse(function: Callable[..., Any]) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _nodes(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Every node that can decide anything: not assertions, not conditions that only raise, not annotations."""
    waiting: list[ast.AST] = list(reversed(body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and _only_raises(node)):
            continue
        yield node
        skipped = node.annotation if isinstance(node, ast.AnnAssign) else None
        waiting.extend(reversed([child for child in ast.iter_child_nodes(node) if child is not skipped]))


def _only_raises(node: ast.If) -> bool:
    return not node.orelse and all(isinstance(part, ast.Raise) for part in node.body)


def _condition(node: ast.AST) -> str | None:
    if isinstance(node, (ast.If, ast.IfExp)):
        return f"if {ast.unparse(node.test)}"
    if isinstance(node, ast.While):
        return f"while {ast.unparse(node.test)}"
    if isinstance(node, ast.BoolOp):
        return ast.unparse(node)
    if isinstance(node, ast.comprehension) and node.ifs:
        return f"if {ast.unparse(node.ifs[0])}"
    if isinstance(node, (ast.Try, ast.Match, ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef)):
        return type(node).__name__.lower()
    return None


def _walk_call(module: nn.Module, node: ast.Call, own: str, seen: set[Any], strict: bool) -> Iterator[str]:
    """Methods of the module itself are read too; a function that gets the module or a child of it may do anything."""
    called = node.func
    handed = [*node.args, *(keyword.value for keyword in node.keywords)]
    given = [value for value in handed if _is_own(module, value, own)]
    if given and not (isinstance(called, ast.Name) and called.id in _LOOPS):
        yield f"it hands {ast.unparse(given[0])} to {ast.unparse(called)}"
    elif isinstance(called, ast.Name) and called.id in ("getattr", "eval", "exec"):
        yield f"it calls {called.id}"
    elif isinstance(called, ast.Attribute) and ast.unparse(called.value) == "super()":
        for base in type(module).__mro__[1:]:
            if callable(function := vars(base).get(called.attr)) and base is not nn.Module:
                yield from _walk(module, called.attr, function, seen, strict)
    elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == own:
        function = inspect.getattr_static(type(module), called.attr, None)
        if inspect.isfunction(function):
            yield from _walk(module, called.attr, function, seen, strict)


def _is_own(module: nn.Module, value: ast.expr, own: str) -> bool:
    """Whether an expression is the module or one of its children, not called."""
    if isinstance(value, ast.Name):
        return value.id == own
    if isinstance(value, ast.Subscript):
        return _is_own(module, value.value, own)
    if not isinstance(value, ast.Attribute):
        return False
    if isinstance(value.value, ast.Name) and value.value.id == own:
        found = getattr(module, value.attr, None)
        return isinstance(found, nn.Module) or callable(found)
    return _is_own(module, value.value, own)


def _reads_other(module: nn.Module, node: ast.AST, own: str) -> bool:
    if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own):
        return False
    method = inspect.isfunction(inspect.getattr_static(type(module), node.attr, None))
    return node.attr not in module._modules and not method
