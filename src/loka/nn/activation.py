"""Activations and gates, and functions that create them by name.

    hard_swish(x)   = x * relu6(x + 3) / 6           in place of  silu(x) = x * sigmoid(x)
    hard_sigmoid(x) = relu6(x + 3) / 6               in place of  sigmoid(x)

The hard forms need no exponential, so they fit into the epilogue of a GEMM, and they saturate exactly: beyond |x| = 3 a
value is passed through or cut off.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ActivationKind = Literal["relu", "silu", "hard_swish", "gelu"]
GateKind = Literal["sigmoid", "hard"]


class HardSwish(nn.Module):
    """x * relu6(x + 3) / 6.

    Example:
        >>> HardSwish()(torch.tensor([-4.0, 4.0]))
        tensor([-0., 4.])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation element by element."""
        return F.hardswish(x)


class Sigmoid(nn.Module):
    """The smooth gate, 1 / (1 + exp(-x)).

    Example:
        >>> Sigmoid()(torch.zeros(1))
        tensor([0.5000])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply the gate element by element."""
        return torch.sigmoid(x)


class HardSigmoid(nn.Module):
    """The hard gate, relu6(x + 3) / 6: exactly 0 below -3 and exactly 1 above 3.

    Example:
        >>> HardSigmoid()(torch.tensor([-4.0, 0.0, 4.0]))
        tensor([0.0000, 0.5000, 1.0000])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply the gate element by element."""
        return F.hardsigmoid(x)


_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU, "hard_swish": HardSwish, "gelu": nn.GELU}
_GATES: dict[str, type[nn.Module]] = {"sigmoid": Sigmoid, "hard": HardSigmoid}


def make_activation(kind: ActivationKind) -> nn.Module:
    """Return a new activation module."""
    if kind not in _ACTIVATIONS:
        raise ValueError(f"unknown activation {kind!r}; expected one of {', '.join(get_args(ActivationKind))}")
    return _ACTIVATIONS[kind]()


def make_gate(kind: GateKind) -> nn.Module:
    """Return a new gate module."""
    if kind not in _GATES:
        raise ValueError(f"unknown gate {kind!r}; expected one of {', '.join(get_args(GateKind))}")
    return _GATES[kind]()


def gate_for(activation: ActivationKind) -> nn.Module:
    """Return the gate that goes with an activation: hard gates in models with hard activations."""
    return make_gate("hard" if activation == "hard_swish" else "sigmoid")
