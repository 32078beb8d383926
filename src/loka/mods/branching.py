"""Find out whether a module's forward has branches that one run of it does not show, and what else runs its children.

A mod that moves a computation from one place to another must know that both places are always executed together. One
run on an example shows one path; an `if` on `self.training`, on an optional argument or on a flag hides the others. So
the source of the forward, and of the methods it calls on itself, is searched for anything that may go another way next
time: conditions, while loops, try, match, functions that receive the module or its children and may do anything with
them, a forward that is decorated or replaced. Assertions and conditions that only raise end the call and do not count,
nor does `self.shortcut is None`, if only the constructor decides that.

The search errs on the side of caution. If the source cannot be read, that is reported as the reason.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any

from torch import nn

from loka.mods.interception import Reordered

_BRANCHLESS = (nn.Sequential.forward, Reordered.forward)
_HARMLESS = ("enumerate", "reversed", "zip", "range", "len", "list", "tuple")  # functions that may receive children


def find_branch(module: nn.Module) -> str | None:
    """Return why a module's forward may run differently on another call, or None if it always runs the same lines.

    Args:
        module: any module; its children's forwards are not searched.

    Returns:
        The reason, with the expression, or None.

    Example:
        >>> find_branch(nn.Sequential(nn.Linear(2, 2))) is None
        True
    """
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    kind = type(module)
    if kind.forward in _BRANCHLESS:
        return None
    if kind.forward is nn.Module.forward:
        return f"{kind.__name__} has no forward"
    return next(_find_branches(module, "forward", kind.forward, set()), None)


def other_entries(module: nn.Module) -> list[str]:
    """Return the names of public methods, besides forward, that use a child of the module, such as a decoder's `step`.

    A mod that changes what forward does would not reach them, and the two would disagree. Methods of torch's own
    modules are ignored. A method whose source cannot be read is included.
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


def _find_branches(module: nn.Module, name: str, function: Callable[..., Any], seen: set[Any]) -> Iterator[str]:
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
        if (condition := _condition(node)) and not _is_settled(module, node, own):
            yield f"its {name} branches ({condition}), and one run shows one way only"
        elif isinstance(node, ast.Call):
            yield from _find_in_call(module, node, own, seen)
        elif (
            isinstance(node, ast.Subscript)
            and _is_own(module, node.value, own)
            and f"{own}." in ast.unparse(node.slice)
        ):
            yield f"its {name} chooses {ast.unparse(node)}, which may change later"


def _parse(function: Callable[..., Any]) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _nodes(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield every node that can affect control flow: no assertions, no conditions that only raise, no annotations."""
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


def _is_settled(module: nn.Module, node: ast.AST, own: str) -> bool:
    """Return True for a condition on whether the module has a child or parameter, which only its constructor decides."""
    test = node.test if isinstance(node, (ast.If, ast.IfExp)) else None
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], (ast.Is, ast.IsNot)):
        return False
    left, right = test.left, test.comparators[0]
    if not (isinstance(left, ast.Attribute) and isinstance(left.value, ast.Name) and left.value.id == own):
        return False
    if not (isinstance(right, ast.Constant) and right.value is None):
        return False
    found = getattr(module, left.attr, None)
    return isinstance(found, (nn.Module, nn.Parameter, NoneType)) and not _is_assigned(type(module), left.attr)


def _is_assigned(kind: type, name: str) -> bool:
    """Return True if a method other than the constructor may assign an attribute of the module."""
    for base in kind.__mro__:
        for method, value in vars(base).items():
            if base.__module__.startswith("torch.nn") or method == "__init__" or not inspect.isfunction(value):
                continue
            tree = _parse(value)
            if tree is None or any(
                (isinstance(node, ast.Attribute) and node.attr == name and not isinstance(node.ctx, ast.Load))
                or (isinstance(node, ast.Name) and node.id in ("setattr", "delattr"))
                for node in ast.walk(tree)
            ):
                return True
    return False


def _find_in_call(module: nn.Module, node: ast.Call, own: str, seen: set[Any]) -> Iterator[str]:
    """Search methods of the module itself. A function that receives the module or a child of it may do anything."""
    called = node.func
    handed = [*node.args, *(keyword.value for keyword in node.keywords)]
    given = [value for value in handed if _is_own(module, value, own)]
    if given and not (isinstance(called, ast.Name) and called.id in _HARMLESS):
        yield f"it hands {ast.unparse(given[0])} to {ast.unparse(called)}"
    elif isinstance(called, ast.Name) and called.id in ("getattr", "eval", "exec"):
        yield f"it calls {called.id}"
    elif isinstance(called, ast.Attribute) and ast.unparse(called.value) == "super()":
        for base in type(module).__mro__[1:]:
            if callable(function := vars(base).get(called.attr)) and base is not nn.Module:
                yield from _find_branches(module, called.attr, function, seen)
    elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == own:
        function = inspect.getattr_static(type(module), called.attr, None)
        if inspect.isfunction(function):
            yield from _find_branches(module, called.attr, function, seen)


def _is_own(module: nn.Module, value: ast.expr, own: str) -> bool:
    """Return True if an expression refers to the module, a child or a method of it, without calling it."""
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
