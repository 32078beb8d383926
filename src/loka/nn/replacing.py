"""Whether a module may be replaced: it must compute what its class does, and nobody may be watching it."""

from torch import nn
from torch.nn.modules import module as every_module

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
