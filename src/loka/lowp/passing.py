"""Activations that a forward calls as functions, or that are one module in many places, while a chain runs them.

    h = F.relu(self.a(x))            self.a is the head of a chain: it has run the whole of it, and h stands for what it would be
    h = F.relu(self.b(h))
    return self.c(h)

Nothing stands there whose class could be changed. So the module whose forward makes the call (the caller) runs it under a mode of torch that sees every function: a call of an activation, or of
a dropout, on the very tensor that a chain is handing on returns that tensor; every other call goes on as it is. Which tensor that is and what may come next is the chain's
business (`Chain.begin`, `Chain.meet`): another activation or another p than the example showed, or one that is left out, is an error. torch.compile traces the mode and leaves nothing of it in the graph.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loka.kernels.activation import LEAK

CALLS = "loka_calls"  # on a caller: the mode its forward runs under
_RELU = (F.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_, F.relu_)
_SILU = (F.silu,)
_GELU = (F.gelu,)
_HARD = (F.hardswish,)
_TANH = (F.tanh, torch.tanh, Tensor.tanh, torch.tanh_, Tensor.tanh_)
_SIGMOID = (F.sigmoid, torch.sigmoid, Tensor.sigmoid, torch.sigmoid_, Tensor.sigmoid_)
_LEAKY = (F.leaky_relu, F.leaky_relu_)
DROPOUTS = (F.dropout, torch.dropout)


_OFF: list[bool] = []  # not empty: no chain draws


@contextmanager
def without_dropout() -> Iterator[None]:
    """In this block chains drop nothing, whatever mode their modules are in: for a comparison with a model that draws otherwise."""
    _OFF.append(True)
    try:
        yield
    finally:
        _OFF.pop()


def draws_dropout() -> bool:
    """Whether chains draw."""
    return not _OFF


class Handing(Protocol):
    """A chain, as the mode knows it."""

    pending: Tensor | None

    def meet_call(self, called: str, number: float) -> None:
        """A function was called on what is handed on; raises where the chain expects something else."""

    def forget(self) -> None:
        """Nothing is handed on any more."""

    def leave(self, caller: nn.Module) -> None:
        """A forward that calls functions of the chain is over; raises where it left one out."""


class HandOn(TorchFunctionMode):
    """What a caller's forward runs under. `chains` are those that pass through it."""

    loka_hands_on = True  # `loka.nn.padding.HANDS_ON`

    def __init__(self) -> None:
        super().__init__()
        self.chains: list[Handing] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for chain in self.chains:
            pending = chain.pending
            if pending is not None and (args[0] if args else kwargs.get("input")) is pending:
                called = spell_call(func, args, kwargs)
                if called is not None:
                    chain.meet_call(*called)
                    return pending
        return func(*args, **kwargs)


def spell_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, float] | None:
    """The kernels' name of an activation and its slope; "dropout" and its p, 0 for one without effect; None for any other call.

    Args:
        func: as torch hands it to a mode.
        args, kwargs: of the call.
    """
    if func in _RELU:
        return "relu", LEAK
    if func in _SILU:
        return "silu", LEAK
    if func in _GELU:
        return "gelu_tanh" if kwargs.get("approximate", "none") == "tanh" else "gelu", LEAK
    if func in _HARD:
        return "hard_swish", LEAK
    if func in _TANH:
        return "tanh", LEAK
    if func in _SIGMOID:
        return "sigmoid", LEAK
    if func in _LEAKY:
        return "leaky_relu", float(args[1] if len(args) > 1 else kwargs.get("negative_slope", LEAK))
    if func in DROPOUTS:
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
        return "dropout", float(p) if training and not _OFF else 0.0
    return None
