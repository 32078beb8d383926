"""Undisturbed: run a model to look at it, and leave no trace.

What running a model may change is put back afterwards: the random state of Python, numpy and torch on every device in use, the mode of every module, its
buffers (a batch norm's statistics, the vectors of spectral_norm) and its plain attributes (what a forward keeps for an auxiliary loss). Gradients are not touched, because
whoever looks uses `torch.autograd.grad`.

Out of reach: containers that a forward changes in place, and whatever it does outside of the model.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

_KEPT = ("_parameters", "_buffers", "_modules")


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Everything in the block may run the model; afterwards it is as it was.

    Args:
        model: any module.
    """
    modules = list(model.modules())
    modes = [m.training for m in modules]  # TorchScript keeps it elsewhere than in an attribute
    attributes = [{k: v for k, v in vars(m).items() if k not in _KEPT} for m in modules]
    buffers = [{k: (b, None if b is None else b.detach().clone()) for k, b in m._buffers.items()} for m in modules]
    with same_randomness(), run_eagerly(model):
        try:
            yield
        finally:
            for module, before, saved, mode in zip(modules, attributes, buffers, modes, strict=True):
                _put_back(module, before, saved)
                if module.training != mode:
                    module.training = mode


def _put_back(
    module: nn.Module, attributes: dict[str, Any], buffers: dict[str, tuple[Tensor | None, Tensor | None]]
) -> None:
    state = vars(module)
    for name in [name for name in state if name not in _KEPT and name not in attributes]:
        del state[name]
    state.update(attributes)
    for name in [name for name in module._buffers.keys() if name not in buffers]:  # noqa: SIM118 - TorchScript's cannot be iterated
        del module._buffers[name]
    for name, (buffer, value) in buffers.items():
        module._buffers[name] = buffer
        if buffer is not None and value is not None and not _same(buffer, value):
            with torch.no_grad():
                buffer.copy_(value)


def _same(buffer: Tensor, value: Tensor) -> bool:
    """Whether nothing was written: a buffer that others view, or that was made in inference mode, is left alone then."""
    return buffer.is_meta or (buffer.shape == value.shape and torch.equal(buffer, value))


@contextmanager
def same_randomness() -> Iterator[None]:
    """What follows the block draws the random numbers it would have drawn without it, on every device."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    numpy: Any = sys.modules.get("numpy")
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(arrays)


@contextmanager
def ordinary_encoders() -> Iterator[None]:
    """Every module of an encoder is called: torch's fused encoder calls none of its modules, and packs padded batches into nested tensors for it; a converted one takes the ordinary path (`loka.lowp.fast_path`)."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile wraps a part of the model.

    Args:
        model: any module.
    """
    return any("_orig_mod" in module._modules for module in model.modules())


def run_eagerly(model: nn.Module) -> AbstractContextManager[Any]:
    """Parts that torch.compile wraps run as they were written, so that what they call can be seen; nothing is compiled for it.

    Args:
        model: any module.
    """
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()


def set_mode(model: nn.Module, training: bool) -> None:
    """Training or eval mode, everywhere.

    Args:
        model: any module.
        training: the mode. A module that the user put in eval mode for good inside a model that trains (a frozen batch norm) cannot be told from one that was
            forgotten there, so both modes are tried on the whole model.
    """
    model.train(training)
