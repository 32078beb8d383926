"""Whether a module may be replaced: it must compute what its class does, and nobody may watch it or hold it elsewhere."""

import functools
from collections.abc import Collection, Iterable, Mapping
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as every_module

_OWN = frozenset(vars(nn.Module()))  # attributes that every module has
_LEAVES = frozenset((int, float, bool, str, type(None)))  # most attributes, which hold nothing
_DEPTH = 6  # containers may be nested, or hold themselves
SEES_CHAINS = "loka_sees_chains"  # attribute of a forward hook that knows that modules of a chain return placeholders


def runs_as(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Check whether a module computes what one of these classes does: no forward of a subclass, none on the instance.

    Args:
        module: any module.
        kinds: classes of torch or of this package.

    Returns:
        False also for a subclass or an instance with a forward of its own, which may compute anything.

    Example:
        >>> runs_as(nn.GELU(), nn.GELU)
        True
    """
    return any(
        isinstance(module, kind) and type(module).forward is kind.forward and "forward" not in vars(module)
        for kind in kinds
    )


def find_plain_holder(held: Collection[object], model: nn.Module) -> str | None:
    """Find an attribute that holds a module or a tensor where replacing a submodule does not reach it.

    Args:
        held: the module, and the tensors that its replacement does not have.
        model: its attributes are searched, and those of its modules: containers, bound methods, partial functions and
            modules that are not registered. Other objects are not, since they may lead anywhere.

    Returns:
        The name of the attribute; None if there is none.

    Example:
        >>> model.tables = [model.items]  # a list, not an nn.ModuleList
        >>> find_plain_holder([model.items], model)
        'tables'
    """
    wanted, inside = {id(one) for one in held}, {id(module) for module in model.modules()}
    for module in model.modules():
        for key in vars(module).keys() - _OWN:
            own = key.lstrip("_").startswith("loka")  # what this package keeps to restore a model
            if not own and _leads_to(vars(module)[key], wanted, inside, _DEPTH):
                return f"{next(name for name, found in model.named_modules() if found is module)}.{key}".lstrip(".")
    return None


def _leads_to(value: Any, wanted: Collection[int], inside: Collection[int], depth: int) -> bool:
    if id(value) in wanted or depth == 0 or type(value) in _LEAVES:
        return id(value) in wanted
    parts: Iterable[Any] = ()
    if isinstance(value, list | tuple | set | frozenset):
        parts = value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, MethodType):
        parts = (value.__self__,)
    elif isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, nn.Module) and id(value) not in inside:
        parts = vars(value).values()
    return any(_leads_to(part, wanted, inside, depth - 1) for part in parts)


def is_watched(module: nn.Module) -> bool:
    """Check whether a module has a forward or backward hook that its replacement would mislead or not run.

    Hooks marked with `SEES_CHAINS`, such as Probe's, do not count.
    """
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    own = any(not getattr(hook, SEES_CHAINS, False) for hooks in kinds for hook in hooks.values())
    return own or every_module_is_watched()


def every_module_is_watched() -> bool:
    """Check whether hooks are registered for all modules at once, as by torch's FlopCounterMode."""
    kinds = (
        every_module._global_forward_hooks,
        every_module._global_forward_pre_hooks,
        every_module._global_backward_hooks,
        every_module._global_backward_pre_hooks,
    )
    return any(kinds)
