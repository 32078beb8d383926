"""Reading weights without side effects.

plain          the Parameter itself
parametrized   never read: computing `module.weight` changes the state of some parametrizations (spectral_norm)
sharded        FSDP2 holds the whole weight only while the module runs, so it is copied in the forward of sampled steps
lazy           has no shape before the first call, and becomes a site then
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from loka.lowp.chain import chain_of
from loka.lowp.linear import Linear, refuse
from loka.mods.protect_intermediates import is_protected


def is_parametrized(module: nn.Module) -> bool:
    """Return whether `module.weight` is computed on access."""
    return parametrize.is_parametrized(module, "weight")


def is_sharded(weight: Any) -> bool:
    """Return whether a tensor is a DTensor."""
    return isinstance(weight, Tensor) and hasattr(weight, "to_local") and hasattr(weight, "placements")


def read_weight(module: nn.Module, read: Any) -> Tensor | None:
    """Return the weight that an adapter reads, or None if it is parametrized, sharded or uninitialized."""
    if read is None or is_parametrized(module):
        return None
    weight = read(module)
    if weight is None or is_sharded(weight) or isinstance(weight, UninitializedParameter):
        return None
    return weight.detach() if not isinstance(weight, nn.Parameter) else weight


def shape_of_weight(module: nn.Module, read: Any) -> torch.Size | None:
    """Return the shape [N, K] of a weight, even if it cannot be read; None if unknown before the first call."""
    if read is None:
        return None
    if is_parametrized(module):
        original = next(iter(module.parametrizations["weight"].parameters()), None)  # type: ignore[index,union-attr]
        sizes = (getattr(module, "out_features", None), getattr(module, "in_features", None))
        if all(isinstance(size, int) for size in sizes):
            return torch.Size(sizes)  # type: ignore[arg-type]
        return None if original is None or original.dim() != 2 else original.shape
    weight = read(module)
    if weight is None or isinstance(weight, UninitializedParameter):
        return None
    return torch.Size(weight.shape)


def why_kept(module: nn.Module) -> str | None:
    """Return why a site must stay in high precision whatever its error, or None."""
    if is_parametrized(module):
        kinds = ", ".join(type(p).__name__ for p in module.parametrizations["weight"])  # type: ignore[index]
        return f"its weight is parametrised ({kinds.strip('_')}): it is not read outside the forward, and not planned"
    if is_protected(module):
        return "protected by a mod: it stays in high precision"
    if isinstance(module, nn.Linear) and not isinstance(module, Linear) and chain_of(module) is None:
        lazy = isinstance(module._parameters.get("weight"), UninitializedParameter)
        return None if lazy else refuse(module)  # the reason why conversion would refuse it
    if not isinstance(module, nn.Linear) and type(module).__name__ == "Conv1D":
        return "a Conv1D holds its weight transposed, which conversion does not take; hint: replace it by an nn.Linear"
    return None
