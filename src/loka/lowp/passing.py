"""Skip functional activations and dropouts, or modules with several uses, that a chain has already computed.

    h = F.relu(self.a(x))            self.a is the head of a chain: it has run all of it, and h is a placeholder
    h = F.relu(self.b(h))
    return self.c(h)

A function has no class to change. So the forward that calls it (the caller) runs under a TorchFunctionMode: an
activation or dropout of exactly the tensor that a chain is passing on returns that tensor, every other call is
unchanged. The chain keeps track of that tensor and of what must come next (`Chain.begin`, `Chain.meet`): an activation
or p that differs from the example, or a missing call, is an error. torch.compile traces the mode and leaves nothing of
it in the graph.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from loka.kernels.activation import LEAK

if TYPE_CHECKING:
    from loka.lowp.chain_handing import HandsOn

CALLS = "loka_calls"  # attribute of a caller: the mode its forward runs under
_RELU = (F.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_, F.relu_)
_SILU = (F.silu,)
_GELU = (F.gelu,)
_HARD = (F.hardswish,)
_TANH = (F.tanh, torch.tanh, Tensor.tanh, torch.tanh_, Tensor.tanh_)
_SIGMOID = (F.sigmoid, torch.sigmoid, Tensor.sigmoid, torch.sigmoid_, Tensor.sigmoid_)
_LEAKY = (F.leaky_relu, F.leaky_relu_)
DROPOUTS = (F.dropout, torch.dropout)
_IN_PLACE = (
    torch.relu_,
    Tensor.relu_,
    F.relu_,
    torch.tanh_,
    Tensor.tanh_,
    torch.sigmoid_,
    Tensor.sigmoid_,
    F.leaky_relu_,
)
# torch.compile calls no function mode for these, so no chain contains them
_HIDDEN = (torch.relu_, torch.tanh_, torch.sigmoid_, F.leaky_relu_, F.hardswish)
_HIDDEN_AROUND = (F.tanh.__code__, F.sigmoid.__code__)  # they call a method, which an eager mode sees instead of them
_INPLACE_AT = {F.relu: 1, F.silu: 1, F.hardswish: 1, F.leaky_relu: 2, F.dropout: 3}  # the position of `inplace`


_OFF: list[bool] = []  # not empty inside `without_dropout`


@contextmanager
def without_dropout() -> Iterator[None]:
    """Disable dropout in chains, whatever mode their modules are in, to compare with a model that draws differently."""
    _OFF.append(True)
    try:
        yield
    finally:
        _OFF.pop()


def draws_dropout() -> bool:
    """Return False inside `without_dropout`."""
    return not _OFF


class HandOn(TorchFunctionMode):
    """The mode that a caller's forward runs under. `chains` are those whose functions it calls."""

    loka_hands_on = True  # `loka.nn.padding.HANDS_ON`

    def __init__(self) -> None:
        super().__init__()
        self.chains: list[HandsOn] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for chain in self.chains:
            pending = chain.pending
            if pending is not None and (args[0] if args else kwargs.get("input")) is pending:
                called = spell_call(func, args, kwargs)
                if called is not None:
                    return chain.meet_call(*called, in_place=is_in_place(func, args, kwargs))
        return func(*args, **kwargs)


def spell_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, float] | None:
    """Return an activation's name in the kernels and its slope, or "dropout" and its effective p; None for others."""
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


def is_hidden(func: Any, code: CodeType) -> bool:
    """Return True if compiled code calls no function mode for a function, so that no chain may contain it.

    Args:
        func: the function, as torch passes it to a mode in eager code.
        code: of the Python function that calls it.
    """
    return func in _HIDDEN or code in _HIDDEN_AROUND


def is_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a call of an activation or a dropout writes to its input.

    Args:
        func: the function, as torch passes it to a mode.
        args, kwargs: its arguments.
    """
    if func in _IN_PLACE or kwargs.get("inplace", False):
        return True
    at = _INPLACE_AT.get(func)
    return at is not None and len(args) > at and bool(args[at])
