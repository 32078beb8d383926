"""Undisturbed: run a model to look at it, and leave no trace.

What running a model may change is put back afterwards: the random state of Python, numpy and torch on every device in use, the mode of every module, its
buffers (a batch norm's statistics, the vectors of spectral_norm) and its plain attributes: what a forward keeps for an auxiliary loss, a tensor it counts in that is no buffer, a list, dict, set or
deque that it adds to. Whoever calls backward puts gradients aside too, and with them hooks that run when one is accumulated: an optimizer that steps inside of backward would train.

Out of reach: containers within containers and those of more than 10,000 entries (a vocabulary), other objects that a forward changes in place, and whatever it does outside of the model.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

_KEPT = ("_parameters", "_buffers", "_modules")
_OWN = frozenset(vars(nn.Module()))  # what every module has
_LARGE = 10_000  # entries: a container that is a table of its own, and takes long to copy


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Everything in the block may run the model; afterwards it is as it was. What torch.compile wraps runs as it was written.

    Args:
        model: any module.
    """
    with put_back(model), run_eagerly(model):
        yield


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Afterwards the model is as it was, and so are random numbers; for a block that compiles, which `undisturbed` would not let it.

    Args:
        model: any module.
    """
    modules = list(model.modules())
    modes = [m.training for m in modules]  # TorchScript keeps it elsewhere than in an attribute
    attributes = [{k: v for k, v in vars(m).items() if k not in _KEPT} for m in modules]
    contents = [put for kept in attributes for k, v in kept.items() if k not in _OWN and (put := _hold(v)) is not None]
    buffers = [{k: (b, None if b is None else b.detach().clone()) for k, b in m._buffers.items()} for m in modules]
    with same_randomness():
        try:
            yield
        finally:
            for module, before, saved, mode in zip(modules, attributes, buffers, modes, strict=True):
                _put_back(module, before, saved)
                if module.training != mode:
                    module.training = mode
            for put in contents:
                put()


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
        if buffer is not None and value is not None:
            _write(buffer, value)


def _hold(value: Any) -> Callable[[], None] | None:
    """What gives an attribute's value the contents that it has now, in place; None for a value that has none, or too many."""
    if isinstance(value, Tensor):
        if value.requires_grad or value.is_meta or value.is_nested or value.layout != torch.strided:
            return None  # a parameter that is registered elsewhere, or part of a graph
        saved = value.detach().clone()
        return lambda: _write(value, saved)
    if not isinstance(value, (list, dict, set, deque)) or len(value) > _LARGE:
        return None
    entries = value.copy()

    def put() -> None:
        if len(value) == len(entries) and all(a is b for a, b in zip(_entries(value), _entries(entries), strict=True)):
            return
        value.clear()
        value.extend(entries) if isinstance(value, (list, deque)) else value.update(entries)

    return put


def _entries(value: Any) -> Iterator[Any]:
    """All that a container holds, keys and values, in order."""
    yield from value
    if isinstance(value, dict):
        yield from value.values()


def _write(tensor: Tensor, value: Tensor) -> None:
    if not _same(tensor, value):
        with torch.no_grad():
            tensor.copy_(value)


def _same(buffer: Tensor, value: Tensor) -> bool:
    """Whether nothing was written: a buffer that others view, or that was made in inference mode, is left alone then."""
    return buffer.is_meta or (buffer.shape == value.shape and torch.equal(buffer, value))


@contextmanager
def gradients_aside(model: nn.Module) -> Iterator[None]:
    """Backward may run in the block: no parameter has a gradient or a hook on its accumulation when it begins; afterwards each has what it had.

    Args:
        model: any module.
    """
    grads = [(p, p.grad) for p in model.parameters()]
    hooks = [(found, dict(found)) for p, _ in grads if (found := p._post_accumulate_grad_hooks)]
    try:
        for found, _ in hooks:
            found.clear()
        for p, _ in grads:
            p.grad = None
        yield
    finally:
        for p, grad in grads:  # a table whose rows were stored elsewhere meanwhile has none for them
            p.grad = grad if grad is None or grad.shape == p.shape else None
        for found, kept in hooks:
            found.update(kept)


def keep_randomness() -> Callable[[], None]:
    """The random state of Python, numpy and torch on every device.

    Returns:
        What sets all of it to what it is now.
    """
    numpy: Any = sys.modules.get("numpy")
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    host, devices = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

    def put_back() -> None:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)
        torch.set_rng_state(host)
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return put_back


@contextmanager
def same_randomness() -> Iterator[None]:
    """What follows the block draws the random numbers it would have drawn without it, on every device."""
    put_back = keep_randomness()
    try:
        yield
    finally:
        put_back()


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
    """Whether torch.compile wraps a part of the model, or `Module.compile` was called of one.

    Args:
        model: any module.
    """
    return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())


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


def train_recurrent(model: nn.Module) -> None:
    """Training mode for torch's recurrent layers, for whoever calls backward: cuDNN's have none in eval mode. All else of them that the mode decides is dropout between their layers.

    Args:
        model: any module.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.train()
