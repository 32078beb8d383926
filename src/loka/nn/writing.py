"""Detect torch functions that write to an existing tensor, for function modes that cache tensors.

This is a second line of defense: in compiled code a mode does not see all functions (`torch._foreach_mul_`). Callers
also check in eager mode, on an example, that the versions of the tensors do not change. What an example does not run
is found by `stamp_versions`, from the tensors that the compiler traces with.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

_AUGMENTED = {
    f"i{name}__"
    for name in (
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "matmul",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    )
}

UNKNOWN = "unknown"  # a stamp of a graph that could not be looked at
_STAMPS = "loka_stamps"  # attribute of a graph that is being made: what `stamp_versions` saw
_Stamp = tuple[list[tuple[Tensor, int]], int]  # tensors with their versions, and the number of writes to lists


def writes(func: Any, args: Any, kwargs: Any) -> bool:
    """Check whether a call, as a function mode sees it, may write to an existing tensor.

    True for in-place functions by their name, for `inplace=True` as a keyword or positional argument, for `out=`, and
    for custom ops whose schema says so.
    """
    if kwargs.get("inplace") or kwargs.get("out") is not None or _is_inplace(func):
        return True
    at = _inplace_position(func)
    return at >= 0 and len(args) > at and bool(args[at])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _inplace_position(func: Any) -> int:
    """Return the position of the argument `inplace`, or -1."""
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):  # not written in Python
        return -1
    return names.index("inplace") if "inplace" in names else -1


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_inplace(func: Any) -> bool:
    """Check by the name (`mul_`, `*=`, `z[...] =`, `z.data =`) or the schema whether a function writes in place."""
    schemas = [getattr(func, "_schema", None)]
    if isinstance(func, torch._ops.OpOverloadPacket):
        schemas = [getattr(func, name)._schema for name in func.overloads()]  # type: ignore[no-untyped-call]
    if any(schema is not None and schema.is_mutable for schema in schemas):
        return True
    name: str = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or name[2:] in _AUGMENTED
    return name.endswith("_")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def stamp_versions() -> str:
    """Return what `is_unwritten` needs to tell, later in the same graph of torch.compile, whether a tensor was written to."""
    output = _graph_in_tracing()
    if output is None:
        return UNKNOWN
    stamps: list[_Stamp] = output.__dict__.setdefault(_STAMPS, [])
    tensors = [value for node in output.graph.nodes if isinstance(value := node.meta.get("example_value"), Tensor)]
    stamps.append(([(tensor, version_of(tensor)) for tensor in tensors], _count_lists(output)))
    return f"{id(output)} {len(stamps) - 1}"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_unwritten(stamp: str) -> bool:
    """Check that no tensor that was in the graph at a stamp was written to since. False in any other graph."""
    output = _graph_in_tracing()
    if output is None or stamp == UNKNOWN:
        return False
    graph, at = map(int, stamp.split())
    stamps: list[_Stamp] = output.__dict__.get(_STAMPS, [])
    if id(output) != graph or at >= len(stamps):
        return False
    versions, lists = stamps[at]
    return _count_lists(output) == lists and all(version_of(tensor) == version for tensor, version in versions)


def _graph_in_tracing() -> Any:
    """Return the graph that torch.compile makes right now: the functions above run while it traces.

    None if another version of torch keeps it elsewhere, since this is private. Then nothing is shared: slower, and right.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        return InstructionTranslator.current_tx().output
    except (ImportError, AttributeError):
        return None


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to; 0 for an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _count_lists(output: Any) -> int:
    """Count the writes to lists of tensors (`torch._foreach_mul_`), which do not raise versions in tracing."""
    names = [getattr(node.target, "__name__", "") for node in output.graph.nodes if node.op == "call_function"]
    return sum(name.startswith("_foreach_") and name.endswith("_") for name in names)
