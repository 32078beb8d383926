"""The activations our kernels know, in plain torch: their names, their values, their slopes. `triton_activation` is the same on a tile in registers.

    none z      relu max(z, 0)      leaky_relu max(z, 0.01 z)      tanh      sigmoid      silu z sigmoid(z)      hard_swish z clamp(z + 3, 0, 6) / 6
    gelu z Phi(z)                   gelu_tanh z sigmoid(2 u),  u = sqrt(2 / pi) (z + 0.044715 z^3)

A kernel is told an activation by its place in `ACTIVATIONS`; the first four places are older than this table and must stay.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ACTIVATIONS", "LEAK", "activate", "activation_slope", "check_activation"]

LEAK = 0.01  # torch's default; a LeakyReLU with another slope is not this activation
ACTIVATIONS = ("none", "relu", "silu", "hard_swish", "gelu", "gelu_tanh", "tanh", "sigmoid", "leaky_relu")

_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z.clone(),
    "relu": F.relu,
    "silu": F.silu,
    "hard_swish": F.hardswish,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": lambda z: F.leaky_relu(z, LEAK),
}


def check_activation(name: str) -> None:
    """Raise ValueError unless `name` is in ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {', '.join(ACTIVATIONS)}")


def activate(z: Tensor, name: str) -> Tensor:
    """The activation of z, in z's own type.

    Args:
        z: any floating tensor.
        name: one of ACTIVATIONS.

    Returns:
        A fresh tensor, also for "none".

    Example:
        >>> activate(torch.tensor([-1.0, 2.0]), "relu")
        tensor([0., 2.])
    """
    return _VALUES[name](z)


def activation_slope(z: Tensor, name: str) -> Tensor:
    """d activate(z) / dz in closed form (torch.compile cannot trace a call of autograd), with torch's convention at the kinks.

    Args:
        z: what the activation was applied to.
        name: one of ACTIVATIONS.

    Returns:
        A tensor like z.

    Example:
        >>> activation_slope(torch.tensor([-1.0, 2.0]), "relu")
        tensor([0., 1.])
    """
    if name == "relu":
        return (z > 0).to(z.dtype)
    if name == "leaky_relu":
        return torch.where(z > 0, torch.ones_like(z), LEAK)
    if name == "hard_swish":
        return torch.where(z <= -3, 0.0, torch.where(z < 3, z / 3 + 0.5, 1.0)).to(z.dtype)
    if name == "tanh":
        return 1 - torch.tanh(z).square()
    if name == "gelu":
        density = torch.exp(-0.5 * z.square()) * (1 / math.sqrt(2 * math.pi))
        return 0.5 * (1 + torch.erf(z * math.sqrt(0.5))) + z * density
    if name == "gelu_tanh":
        factor = 2 * math.sqrt(2 / math.pi)
        s = torch.sigmoid(factor * (z + 0.044715 * z**3))
        return s + z * s * (1 - s) * factor * (1 + 3 * 0.044715 * z.square())
    s = torch.sigmoid(z)
    if name == "sigmoid":
        return s * (1 - s)
    return s * (1 + z * (1 - s)) if name == "silu" else torch.ones_like(z)
