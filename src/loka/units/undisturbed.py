"""Run a model to observe it, and leave no trace.

What a forward may change is restored afterwards: the random state of Python, numpy and torch on every device in use,
the mode of every module, its buffers (batch norm statistics, the vectors of spectral_norm) and its plain attributes:
values kept for an auxiliary loss, a counter tensor that is no buffer, a list, dict, set or deque. Hooks of parameters,
which may count or log gradients, or step an optimizer inside backward, are not called. For a backward, also use
`gradients_aside`, which restores gradients.

A forward may even write to parameters: a target network that follows another one, weights that are clamped or
normalized. Parameters are too large to copy all of them. One that got other memory (`p.data = ...`) gets its own back.
Writes in place are seen by `sparing_weights`, which surrounds the first runs of a model; from then on, `undisturbed`
copies the parameters that were written to.

Not restored: nested containers and those with more than 10,000 entries (a vocabulary), other objects that a forward
changes in place, and anything outside of the model.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

_KEPT = ("_parameters", "_buffers", "_modules")
_OWN = frozenset(vars(nn.Module()))  # attributes that every module has
_LARGE = 10_000  # entries; larger containers take too long to copy
_WRITTEN = WeakIdKeyDictionary()  # the parameters that a forward was seen to write to


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore the model and the random state after the block. Parts that torch.compile wraps run eagerly in it."""
    with put_back(model), run_eagerly(model):
        yield


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Restore the model and the random state after the block.

    Unlike `undisturbed`, it lets compiled parts run compiled.
    """
    modules = list(model.modules())
    modes = [m.training for m in modules]  # TorchScript does not store it in the module's __dict__
    attributes = [{k: v for k, v in vars(m).items() if k not in _KEPT} for m in modules]
    contents = [put for kept in attributes for k, v in kept.items() if k not in _OWN and (put := _hold(v)) is not None]
    buffers = [{k: (b, None if b is None else b.detach().clone()) for k, b in m._buffers.items()} for m in modules]
    weights = list(_hold_weights(model))
    with same_randomness(), _hooks_aside(model):
        try:
            yield
        finally:
            for put in weights:
                put()
            for module, before, saved, mode in zip(modules, attributes, buffers, modes, strict=True):
                _put_back(module, before, saved)
                if module.training != mode:
                    module.training = mode
            for put in contents:
                put()


@torch.inference_mode(False)
def _hold_weights(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Yield functions that restore the memory of each parameter and, of those that forwards write to, the values."""
    for parameter in model.parameters():
        if type(parameter) is not nn.Parameter or parameter.layout != torch.strided or parameter.is_inference():
            continue  # a shard, or a part of another library
        value = parameter.detach().clone() if parameter in _WRITTEN else None
        yield partial(put_weight, parameter, parameter.detach(), value)


@torch.inference_mode(False)
def put_weight(parameter: Tensor, memory: Tensor, value: Tensor | None) -> None:
    """Give a parameter its memory and value back: a forward may have assigned other memory to its `data`."""
    if not parameter.is_meta and parameter.data_ptr() != memory.data_ptr():
        parameter.data = memory
    if value is not None:
        _write(parameter, value)


class _Sparing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copy every parameter before something writes to its memory."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved: list[tuple[nn.Parameter, Tensor]] = []
        self._at: dict[int, list[nn.Parameter]] = {}  # address of the memory -> the parameters in it
        for parameter in model.parameters():
            if type(parameter) is nn.Parameter and parameter.layout == torch.strided and parameter.numel():
                self._at.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # a table with max_norm rescales rows when it reads them, again and again to the same values
        if func._schema.is_mutable and func is not torch.ops.aten.embedding_renorm_.default:
            given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
            for one in func._schema.arguments:
                if one.alias_info is not None and one.alias_info.is_write:
                    value = given.get(one.name)
                    for tensor in value if isinstance(value, (list, tuple)) else [value]:
                        self._save(tensor)
        return func(*args, **kwargs)

    def _save(self, tensor: Any) -> None:
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta:
            for parameter in self._at.pop(tensor.untyped_storage().data_ptr(), ()):
                self.saved.append((parameter, parameter.detach().clone()))


@contextmanager
def sparing_weights(model: nn.Module) -> Iterator[None]:
    """Restore the parameters that the forward writes to in this block, and note them for `undisturbed`."""
    mode = _Sparing(model)
    try:
        with mode:
            yield
    finally:
        for parameter, value in mode.saved:
            _WRITTEN[parameter] = True
            _write(parameter, value)


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
    """Return a function that restores the current contents of a tensor or container in place; None if not supported."""
    if isinstance(value, Tensor):
        if value.requires_grad or value.is_meta or value.is_nested or value.layout != torch.strided:
            return None  # e.g. a parameter that is registered elsewhere, or part of a graph
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
    """Yield everything in a container in order, both keys and values of a dict."""
    yield from value
    if isinstance(value, dict):
        yield from value.values()


def _write(tensor: Tensor, value: Tensor) -> None:
    if not _same(tensor, value):
        with torch.no_grad():
            tensor.copy_(value)


def _same(buffer: Tensor, value: Tensor) -> bool:
    """Check whether a buffer is unchanged: a view or an inference tensor is not written to without need."""
    return buffer.is_meta or (buffer.shape == value.shape and torch.equal(buffer, value))


@contextmanager
def gradients_aside(model: nn.Module) -> Iterator[None]:
    """Clear gradients for a block that runs backward, and restore them afterwards."""
    grads = [(p, p.grad) for p in model.parameters()]
    try:
        for p, _ in grads:
            p.grad = None
        yield
    finally:
        for p, grad in grads:  # the parameter of a table that was replaced in the block is empty: no gradient fits it
            p.grad = grad if grad is None or grad.shape == p.shape else None


@contextmanager
def _hooks_aside(model: nn.Module) -> Iterator[None]:
    """Call no hook of a parameter in the block, and restore the hooks afterwards."""
    parameters = list(model.parameters())
    kept = [[dict(hooks or {}) for hooks in _hooks_of(p)] for p in parameters]
    try:
        for p in parameters:
            _set_hooks(p, ({}, {}))
        yield
    finally:
        for p, before in zip(parameters, kept, strict=True):
            _set_hooks(p, before)


def _hooks_of(parameter: nn.Parameter) -> Iterator[dict[int, Any] | None]:
    """Yield the hooks that get a gradient, and those that run once it is in `grad`; None if there never were any."""
    yield parameter._backward_hooks
    yield parameter._post_accumulate_grad_hooks


def _set_hooks(parameter: nn.Parameter, wanted: Iterable[dict[int, Any]]) -> None:
    for hooks, those in zip(_hooks_of(parameter), wanted, strict=True):
        if hooks is not None:
            hooks.clear()  # also of what a forward has registered meanwhile
            hooks.update(those)


def keep_randomness() -> Callable[[], None]:
    """Return a function that restores the current random state of Python, numpy and torch on every device."""
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
    """Restore the random state of Python, numpy and torch after the block."""
    put_back = keep_randomness()
    try:
        yield
    finally:
        put_back()


@contextmanager
def ordinary_encoders() -> Iterator[None]:
    """Disable torch's fused transformer encoder, which calls none of its modules and packs padding into nested tensors.

    Converted encoders do not use it either (`loka.lowp.fast_path`).
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def is_compiled(model: nn.Module) -> bool:
    """Check whether torch.compile wraps a part of the model, or `Module.compile` was called on one."""
    return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())


def run_eagerly(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which compiled parts run eagerly, so that the modules they call can be observed."""
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()


def set_mode(model: nn.Module, training: bool) -> None:
    """Set training or eval mode on the whole model.

    A module that the user put in eval mode on purpose inside a training model (a frozen batch norm) cannot be told from
    one that was forgotten there.
    """
    model.train(training)


def train_recurrent(model: nn.Module) -> None:
    """Put torch's recurrent layers in training mode: cuDNN has no backward for them in eval mode.

    The mode changes nothing else but the dropout between their layers.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.train()
