"""The supported activations in plain torch: names, values and derivatives. `tile.activate` is the Triton version.

    none z      relu max(z, 0)      leaky_relu max(z, 0.01 z)      tanh      sigmoid      silu z sigmoid(z)
    hard_swish z clamp(z + 3, 0, 6) / 6      gelu z Phi(z)
    gelu_tanh z sigmoid(2 u),  u = sqrt(2 / pi) (z + 0.044715 z^3)

Kernels identify an activation by its index in `ACTIVATIONS`.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("none", "relu", "silu", "hard_swish", "gelu", "gelu_tanh", "tanh", "sigmoid", "leaky_relu")
LEAK = 0.01  # leaky_relu's slope below zero, torch's default

_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.clone,
    "relu": F.relu,
    "silu": F.silu,
    "hard_swish": F.hardswish,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def check_activation(name: str) -> None:
    """Raise ValueError unless `name` is in ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {', '.join(ACTIVATIONS)}")


def activate(z: Tensor, name: str, slope: float = LEAK) -> Tensor:
    """Apply an activation by name, in z's dtype. The result is a new tensor, also for "none"."""
    return F.leaky_relu(z, slope) if name == "leaky_relu" else _VALUES[name](z)


def activation_slope(z: Tensor, name: str, slope: float = LEAK, *, from_output: bool = False) -> Tensor:
    """Return d activate(z) / dz in closed form, since torch.compile cannot trace autograd. Kinks follow torch.

    Args:
        z: the activation's input.
        name: one of ACTIVATIONS.
        slope: leaky_relu's slope below zero.
        from_output: z is the activation's output instead (tanh and sigmoid).

    Returns:
        A tensor like z.

    Example:
        >>> activation_slope(torch.tensor([-1.0, 2.0]), "relu")
        tensor([0., 1.])
    """
    if name in ("relu", "leaky_relu"):
        return torch.where(z > 0, torch.ones_like(z), 0.0 if name == "relu" else slope)
    if name == "hard_swish":
        return torch.where(z <= -3, 0.0, torch.where(z < 3, z / 3 + 0.5, 1.0)).to(z.dtype)
    if name == "gelu":
        # literals: to torch.compile(dynamic=True), math.pi is a variable (see `loka.formats.Format.max`)
        density = torch.exp(-0.5 * z.square()) * 0.3989422804014327  # 1 / sqrt(2 pi)
        return 0.5 * (1 + torch.erf(z * math.sqrt(0.5))) + z * density
    if name == "gelu_tanh":
        factor = 1.5957691216057308  # 2 sqrt(2 / pi), from tanh(u) = 2 sigmoid(2u) - 1
        s = torch.sigmoid(factor * (z + 0.044715 * z**3))
        return s + z * s * (1 - s) * factor * (1 + 3 * 0.044715 * z.square())
    if name in ("tanh", "sigmoid"):
        y = z if from_output else activate(z, name)
        return 1 - y.square() if name == "tanh" else y * (1 - y)
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s)) if name == "silu" else torch.ones_like(z)
