"""Graph: rewrite the forward of one module, symbolically traced with its children as black boxes (torch.fx).

Swapping children changes what is computed; changing the order in which they run needs the forward itself. It is traced, edited, compiled back to Python, and
given to the module as a subclass of its own class: children, parameters and other attributes stay the same objects, so the state_dict does not change and
undoing is putting the class back.

A forward that cannot be traced (control flow that depends on data) is refused with the tracer's reason. So is a class with further methods that call its
children (a decoder's `step`): the rewrite would not reach them, and the two would disagree.
"""

import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

_COUNTED = {"split": 1, "chunk": 1, "unbind": None, "split_with_sizes": 1}
_ADDITIONS = (operator.add, torch.add, operator.iadd, "add", "add_")


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
    others = _other_entries(type(module))
    if others:
        return f"{type(module).__name__} has other entry points ({', '.join(others)}) that a rewritten forward would not agree with"
    if type(module).forward is nn.Module.forward:
        return f"{type(module).__name__} has no forward"
    try:
        return Tracer().trace(module)
    except Exception as error:  # whatever control flow a forward has; the reason is reported
        return f"its forward cannot be traced: {type(error).__name__}: {str(error).splitlines()[0]}"


def _other_entries(kind: type[nn.Module]) -> list[str]:
    """Public methods, beside forward, that are defined below nn.Module and call a child."""
    found = []
    for base in kind.__mro__:
        if base.__module__.startswith("torch.nn"):
            break
        for name, value in vars(base).items():
            if name.startswith("_") or name in ("forward", "extra_repr", "train", "eval"):
                continue
            if inspect.isfunction(value) and "self." in _source(value):
                found.append(name)
    return found


def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return "self."  # unknown: assume that it calls a child


def compile_forward(module: nn.Module, graph: fx.Graph, **attributes: Any) -> type[nn.Module]:
    """A subclass of the module's class whose forward is the graph's code."""
    graph.lint()
    code = graph.python_code("self")
    space: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, f"<rewritten {type(module).__name__}>", "exec"), space)
    body = {
        "forward": space["forward"],
        "__doc__": type(module).__doc__,
        "__module__": type(module).__module__,
        **attributes,
    }
    return type(type(module).__name__, (type(module),), body)


def module_at(module: nn.Module, node: Any) -> nn.Module | None:
    """The child that a node calls; None for anything else."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    return module.get_submodule(str(node.target))


def is_addition(node: Any) -> bool:
    """Whether a node adds two values of the graph."""
    if not isinstance(node, fx.Node) or node.target not in _ADDITIONS:
        return False
    return len([a for a in node.args[:2] if isinstance(a, fx.Node)]) == 2 and not node.kwargs


def depends_on(node: fx.Node, source: fx.Node) -> bool:
    """Whether a value is made from another."""
    seen, waiting = set(), [node]
    while waiting:
        at = waiting.pop()
        if at is source:
            return True
        waiting.extend(n for n in at.all_input_nodes if n not in seen)
        seen.update(at.all_input_nodes)
    return False


def split_residual(add: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(stream, branch) of x + f(x), or of shortcut(x) + f(x) where both come from the input; None where neither is a residual."""
    first, second = (a for a in add.args[:2] if isinstance(a, fx.Node))
    if depends_on(second, first):
        return first, second
    if depends_on(first, second):
        return second, first
    return None
