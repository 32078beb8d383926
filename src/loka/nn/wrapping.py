"""See through wrappers around a model; used by Probe, mods, convert and Guard.

    unwrap(model)         the module inside DistributedDataParallel, torch.compile, TorchRec's DistributedModelParallel
    plain_name(name)      a module's or parameter's name without the segments that wrappers add
    named_sites(model)    every module under its plain name, so that plans fit wrapped and unwrapped models alike
    in_eval(model)        a block in eval mode, after which every module is in its own mode again

FSDP2 (`fully_shard`) changes classes in place and adds no names, so there is nothing to unwrap. FSDP1 flattens
parameters, which hides the weights, and is not supported.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# The names under which wrappers register the wrapped module. DDP's `module` is a common name in users' models, so it
# only counts if the parent is DDP (see `_without_ddp`).
WRAPPER_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_dmp_wrapped_module")
LENT = "loka_lent"  # attribute of a module: names of its parameters that a child registers and computes with instead


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module inside any stack of DistributedDataParallel, torch.compile and TorchRec's wrappers.

    Raises ValueError if it is no module, or if FSDP1 wraps a part of it.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {type(model).__name__}, expected an nn.Module")
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                "FSDP1 flattens parameters, which hides the weights; hint: torch.distributed.fsdp.fully_shard"
            )
    while (inner := _wrapped_by(model)) is not None:
        model = inner
    return model


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Run a block in eval mode, and restore the mode of every module: a frozen batch norm stays in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # a converted linear drops its cached weight when its mode changes
            if module.training != training and type(module).train is not nn.Module.train:
                module.train(training)
        for module, training in modes:  # what an own `train` of a module did to others is undone
            module.training = training


def _wrapped_by(model: nn.Module) -> nn.Module | None:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        wrapped: nn.Module = model.module
        return wrapped
    for segment in WRAPPER_SEGMENTS:
        if segment in model._modules and isinstance(inner := model._modules[segment], nn.Module):
            return inner
    return None


def is_scripted(module: nn.Module) -> bool:
    """Check whether TorchScript runs a module: then its calls can be neither hooked nor converted."""
    return isinstance(module, torch.jit.ScriptModule)


def plain_name(name: str) -> str:
    """Remove the segments of wrappers from a name, for blocks that are compiled or checkpointed individually.

    Example:
        >>> plain_name("blocks.0._orig_mod.linear")
        'blocks.0.linear'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPER_SEGMENTS)


def named_sites(model: nn.Module, *, once: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield (plain name, module) of a model without its wrappers, shared modules under each of their names.

    `once`: shared ones only under their first name.
    """
    for name, module in unwrap(model).named_modules(remove_duplicate=once):
        if _wrapped_by(module) is None:
            yield _without_ddp(model, name), module


def _without_ddp(model: nn.Module, name: str) -> str:
    """Return the plain name, also without `module` where the parent is DDP; users may use that name too."""
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
    """Yield the parameters that a module itself computes with, without those of its children or lent to one (`LENT`).

    A parameter that two modules yield is therefore shared.
    """
    lent = getattr(module, LENT, ())
    for name, parameter in module._parameters.items():
        if parameter is not None and name not in lent:
            yield parameter


def find_holder(names: Sequence[str], model: nn.Module) -> str:
    """Return the name of the innermost module that contains all the named ones and has a forward; "" for the model."""
    common = names[0].split(".")[:-1]
    for name in names[1:]:
        parts = name.split(".")
        while parts[: len(common)] != common:
            common.pop()
    while common and isinstance(model.get_submodule(".".join(common)), nn.ModuleList | nn.ModuleDict):
        common.pop()
    return ".".join(common)
