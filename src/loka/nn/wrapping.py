"""Wrappers around a model, seen through: one answer for Probe, mods, convert and Guard.

    unwrap(model)         the user's module inside DistributedDataParallel, torch.compile and TorchRec's DistributedModelParallel
    plain_name(name)      a module's or parameter's name without the segments that wrappers put into it
    named_sites(model)    every module under its plain name, so that a plan made on a wrapped model fits the plain one and the other way round

FSDP2 (`fully_shard`) changes classes in place and adds no name, so there is nothing to unwrap. FSDP1 flattens parameters, which hides the weights: it is refused.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

# What wrappers register the wrapped module as. `module` alone is a common name in users' models: it counts only where DDP is the parent (see `unwrap`).
WRAPPER_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_dmp_wrapped_module")
LENT = "loka_lent"  # on a module: names of parameters that a child computes with in its place, and has registered too


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside any stack of wrappers.

    Args:
        model: a module, wrapped by DistributedDataParallel, torch.compile or TorchRec's DistributedModelParallel, in any order, or not wrapped.

    Returns:
        The innermost module; `model` itself where nothing wraps it.

    Raises:
        ValueError: FSDP1 wraps a part of it.

    Example:
        >>> unwrap(torch.compile(model)) is model
        True
    """
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                "FSDP1 flattens parameters, which hides the weights; hint: torch.distributed.fsdp.fully_shard"
            )
    while (inner := _wrapped_by(model)) is not None:
        model = inner
    return model


def _wrapped_by(model: nn.Module) -> nn.Module | None:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        wrapped: nn.Module = model.module
        return wrapped
    for segment in WRAPPER_SEGMENTS:
        if segment in model._modules and isinstance(inner := model._modules[segment], nn.Module):
            return inner
    return None


def is_scripted(module: nn.Module) -> bool:
    """Whether TorchScript runs a module: it takes no hooks, and what it calls can be neither watched nor converted."""
    return isinstance(module, torch.jit.ScriptModule)


def plain_name(name: str) -> str:
    """A dotted name without the segments of wrappers inside the model (a block compiled or checkpointed on its own).

    Args:
        name: as `named_modules` or `named_parameters` spell it.

    Returns:
        The name in the unwrapped model.

    Example:
        >>> plain_name("blocks.0._orig_mod.linear")
        'blocks.0.linear'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPER_SEGMENTS)


def named_sites(model: nn.Module, *, once: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Every module of a model under its plain name, shared ones under each of their names.

    Args:
        model: wrapped or not.
        once: shared ones under their first name alone.

    Returns:
        Pairs of name and module, in the order of `named_modules`; wrappers themselves are left out.

    Example:
        >>> [name for name, module in named_sites(DistributedDataParallel(model)) if isinstance(module, nn.Linear)]
        ['bottom.0', 'top.0']
    """
    for name, module in unwrap(model).named_modules(remove_duplicate=once):
        if _wrapped_by(module) is None:
            yield _without_ddp(model, name), module


def _without_ddp(model: nn.Module, name: str) -> str:
    """DDP around a part of a model registers it as `module`, a name that users give too: ask the parent."""
    if ".module" not in f".{name}":
        return plain_name(name)
    kept: list[str] = []
    at = unwrap(model)
    for part in name.split("."):
        parent, at = at, at._modules[part]  # type: ignore[assignment]
        if not isinstance(parent, nn.parallel.DistributedDataParallel):
            kept.append(part)
    return plain_name(".".join(kept))


def own_parameters(module: nn.Module) -> Iterator[Tensor]:
    """The parameters that a module itself computes with, less what it has lent to a child (`LENT`), so that one met in two modules is shared. Children are not looked at."""
    lent = getattr(module, LENT, ())
    for name, parameter in module._parameters.items():
        if parameter is not None and name not in lent:
            yield parameter
