"""Whether a torch function may change a tensor that is there already: what a function mode must know that remembers tensors.

A second fence, not the only one: in compiled code a mode sees arguments as they were written (`F.elu(x, 1.0, True)`), and some functions (`torch._foreach_mul_`) not at all. Whoever remembers tensors there has
looked before, in eager mode on the example, whether the versions of tensors change.
"""

import inspect
from typing import Any

import torch

_AUGMENTED = {f"i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")}  # fmt: skip


def writes(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function may change a tensor that is there already.

    Args:
        func: as torch hands it to a function mode.
        args: of the call.
        kwargs: of the call.

    Returns:
        True for in-place functions by their name, for `inplace=True` by name or by place, for `out=`, and for custom ops whose schema says so.
    """
    if kwargs.get("inplace") or kwargs.get("out") is not None or _is_inplace(func):
        return True
    at = _place_of_inplace(func)
    return at >= 0 and len(args) > at and bool(args[at])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _place_of_inplace(func: Any) -> int:
    """Which positional argument says `inplace`; -1 where there is none."""
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):  # not written in Python
        return -1
    return names.index("inplace") if "inplace" in names else -1


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_inplace(func: Any) -> bool:
    """By its name: `mul_`, `*=`, `z[...] =`, `z.data =`; or by its schema."""
    schemas = [getattr(func, "_schema", None)]
    if isinstance(func, torch._ops.OpOverloadPacket):
        schemas = [getattr(func, name)._schema for name in func.overloads()]  # type: ignore[no-untyped-call]
    if any(schema is not None and schema.is_mutable for schema in schemas):
        return True
    name: str = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or name[2:] in _AUGMENTED
    return name.endswith("_")
