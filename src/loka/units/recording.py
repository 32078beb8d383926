"""Record the data flow between the modules of a model (`loka.units.flow`) by running it once on an example.

Hooks on every module and a dispatch mode see what runs, in eval mode under no_grad, or in training mode, where a part
under no_grad can be told from the others. No graph for backward is made, which would add operations and keep what it
holds alive, but where the forward asks for it (`torch.enable_grad`). The model, its buffers and the random
state are restored afterwards.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from loka.kernels.activation import LEAK
from loka.lowp.passing import is_hidden, spell_call
from loka.nn.wrapping import is_scripted
from loka.units.example import call_model, tensors_in
from loka.units.flow import CUTS, STEP, Call, Flow, Span
from loka.units.undisturbed import ordinary_encoders, set_mode, sparing_weights, undisturbed


@dataclass(frozen=True)
class Unknown:
    """The result of `record` when it fails.

    Args:
        reason: why the flow could not be recorded.

    Example:
        >>> isinstance(record(model, batch), Unknown)
        False
    """

    reason: str


def record(model: nn.Module, example: Any = None, *, training: bool = False) -> Flow | Unknown:
    """Run the model on an example and record its data flow.

    Args:
        model: any module. Its mode, buffers and attributes and the random state are restored afterwards.
        example: one input; a tuple is *args, a dict **kwargs. Without one, a model with `example_inputs()`, as the
            models of this package have it, is run on the meta device.
        training: run in training mode.

    Returns:
        The flow, or Unknown with the reason if the model fails on the example or there is none.

    Example:
        >>> flow = loka.units.record(model, batch)
    """
    on_meta = example is None
    if on_meta and not hasattr(model, "example_inputs"):
        return Unknown("no example was given, so the order in which its modules run is not known; pass example=")
    recorder = _Recorder(model)
    try:
        with recorder.watching(training):
            result = recorder.run_on_meta() if on_meta else call_model(model, example)
            return recorder.finish(result)  # before `watching` restores the attributes, which may hold results
    except Exception as error:  # a user's forward may raise anything; mods can do without a flow and report it
        return Unknown(f"the model failed on the example: {type(error).__name__}: {error}")


def record_steps(model: nn.Module, run: Callable[[], Any], *, training: bool = False) -> list[Flow]:
    """Run a function that calls a model or its parts, and record the data flow.

    Args:
        model: any module; restored afterwards, as by `record`.
        run: calls the model, any number of times, or its parts.
        training: run in training mode.

    Returns:
        A flow for every call of the model, and one for all calls of its parts outside of these; operations between
        them are recorded as inside `STEP`.
    """
    recorder = _Recorder(model, steps=True)
    with recorder.watching(training):
        run()
        return recorder.finish_steps()


_ACTIVATIONS = {"relu": "relu", "silu": "silu", "hardswish": "hard_swish", "tanh": "tanh", "sigmoid": "sigmoid"}


def _spell_activation(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, float] | None:
    """Return the kernels' name and slope of an aten activation, in place or not; None if the op is none of them."""
    op = op.removesuffix("_")
    if op == "gelu":
        return "gelu_tanh" if kwargs.get("approximate", "none") == "tanh" else "gelu", LEAK
    if op == "leaky_relu":
        return op, float(args[1] if len(args) > 1 else kwargs.get("negative_slope", LEAK))
    return (_ACTIVATIONS[op], LEAK) if op in _ACTIVATIONS else None


def _make_forget(key: int, *known: dict[int, Any]) -> Callable[[Any], None]:
    """Return a weakref callback that drops a tensor's id from some dicts."""

    def forget(_: Any) -> None:
        for one in known:
            one.pop(key, None)

    return forget


@dataclass
class _Recording:
    """A flow that is being recorded."""

    flow: Flow = field(default_factory=Flow)
    values: dict[int, int] = field(default_factory=dict)  # id of a tensor -> value
    alive: dict[int, Any] = field(
        default_factory=dict
    )  # weakrefs that drop the id of a freed tensor, which may be reused
    outside: set[str] = field(default_factory=set)  # parameters that are read outside of the atom that owns them


@dataclass
class _Running:
    """A call of a module, or of a functional dropout, that has not returned."""

    name: str
    atom: bool
    inputs: tuple[int, ...]
    arguments: tuple[tuple[int | str, int], ...] = ()
    inner: set[str] = field(default_factory=set)  # operations inside of an atom


# no_grad does not call them, but `_set_grad_enabled` by itself
_ENTERS = {kind.__enter__.__code__ for kind in (torch.enable_grad, torch.set_grad_enabled)}
_EXITS = {kind.__exit__.__code__ for kind in (torch.enable_grad, torch.set_grad_enabled)}


class _CallMode(TorchFunctionMode):
    """Report calls of activations, and of dropouts with an effect, to a recorder, and keep calls from making a graph.

    The dispatcher only sees what a dropout decomposes to. It also sees activations that a placed chain would not, since
    no function mode does: in TorchScript, in `torch.ops`, and functions that torch.compile hides from modes.
    """

    def __init__(self, recorder: "_Recorder") -> None:
        super().__init__()
        self._recorder = recorder
        self._enabled: list[bool] = []  # for every block of `enable_grad` or `set_grad_enabled`, whether it enables

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch._C._set_grad_enabled:
            if (code := sys._getframe(1).f_code) in _ENTERS:
                self._enabled.append(args[0])
            elif code in _EXITS and self._enabled:
                self._enabled.pop()
            return func(*args, **kwargs)
        with nullcontext() if any(self._enabled) else self._recorder.without_graph():
            return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        hidden = is_hidden(func, sys._getframe(2).f_code)
        called = None if hidden else spell_call(func, args, kwargs)
        if called is None or called == ("dropout", 0.0):
            return func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        if called[0] == "dropout":
            return self._recorder.see_dropout(x, called[1], lambda: func(*args, **kwargs))
        with self._recorder.activating():
            return func(*args, **kwargs)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record a flow by hooks on every module and a dispatch mode that sees every operation."""

    def __init__(self, model: nn.Module, *, steps: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._steps = steps  # record a function that calls the model or its parts, not one call of the model
        self._whole: list[Flow] = []  # flows of calls of the model itself
        self._given: list[int] = []  # values that parts of the model returned to a step
        self._names = {id(module): name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        self._owners: dict[int, list[str]] = {}  # id of a parameter -> all of its names
        self._own(model.named_parameters(remove_duplicate=False))
        self._buffers = {id(b) for b in model.buffers()}
        self._made = _Recording()
        self._begun: _Recording | None = None  # the step's recording, while a call of the model is recorded
        self._stack: list[_Running] = []  # calls of modules that have not returned, outermost first
        self._activating = False  # inside a call of an activation that function modes see
        self._grad: bool | None = None  # inside a call that makes no graph, whether it would

    def _own(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, parameter in named:
            self._owners.setdefault(id(parameter), []).append(name)

    @contextmanager
    def without_graph(self) -> Iterator[None]:
        """Run a call of the forward under no_grad, and record its operations as what they are without it."""
        self._grad = torch.is_grad_enabled()
        try:
            with torch.no_grad():
                yield
        finally:
            self._grad = None

    @contextmanager
    def activating(self) -> Iterator[None]:
        """Record the operation in this block as an activation that a chain may contain."""
        self._activating = True
        try:
            yield
        finally:
            self._activating = False

    @contextmanager
    def watching(self, training: bool) -> Iterator[None]:
        """Record what runs in this block, in one mode, and restore the model after it."""
        with (
            undisturbed(self._model),
            sparing_weights(self._model),
            ordinary_encoders(),
            torch.set_grad_enabled(training),
            ExitStack() as stack,
        ):
            set_mode(self._model, training)
            for module in (m for m in self._model.modules() if not is_scripted(m)):
                stack.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            with self, _CallMode(self):
                yield

    def run_on_meta(self) -> Any:
        """Run the model on its own example inputs, with all parameters and buffers on the meta device."""
        named = [*self._model.named_parameters(remove_duplicate=False), *self._model.named_buffers()]
        on_meta: dict[int, Tensor] = {id(t): torch.empty_like(t, device="meta") for _, t in named}
        self._own((name, on_meta[id(t)]) for name, t in named if isinstance(t, nn.Parameter))
        self._buffers |= {id(tensor) for tensor in on_meta.values()}
        inputs = self._model.example_inputs()  # type: ignore[operator]
        # start afresh: `empty_like` was recorded as a read of every parameter
        self._made = _Recording()
        return torch.func.functional_call(self._model, {name: on_meta[id(t)] for name, t in named}, inputs)

    def finish_steps(self) -> list[Flow]:
        """Return a flow for every call of the model, and one for the calls of its parts, if there were any."""
        flow = self._made.flow
        read = {value for call in flow.calls if call.site is not None for value in call.inputs}
        read |= {source for value in tuple(read) for source in flow.ancestors(value)}
        flow.results = frozenset(value for value in self._given if value not in read)
        flow.outside_reads = frozenset(self._made.outside)
        return [*self._whole, *([flow] if self._given else [])]

    def finish(self, result: Any) -> Flow:
        # what somebody keeps is a result too, in attributes, a global list or an object of any class: a loss may read it
        results = frozenset(self._value(t) for t in tensors_in(result))
        if not self._kept() <= results:
            gc.collect()  # what is only part of a cycle is kept by nobody
        self._made.flow.results = results | self._kept()
        self._made.flow.outside_reads = frozenset(self._made.outside)
        return self._made.flow

    def _kept(self) -> set[int]:
        """Return the values made in this flow whose tensors still exist."""
        alive = [self._made.values[key] for key, tensor in self._made.alive.copy().items() if tensor() is not None]
        return self._made.flow.makers.keys() & alive

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        atom = next(module.children(), None) is None
        if self._steps and module is self._model and not self._stack:
            self._begun, self._made = self._made, _Recording()
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        arguments = tuple((key, self._value(value)) for key, value in named if isinstance(value, Tensor))
        self._stack.append(_Running(self._names[id(module)], atom, self._read((args, kwargs)), arguments))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._stack[-1].atom and isinstance(output, Tensor) and any(output is value for value in args):
            # Identity, or Dropout in eval mode: its output must be a value of its own
            output = output.view_as(output)
        call = self._stack.pop()
        if call.atom and not self._in_atom():
            outputs = tuple(self._new_value(t) for t in tensors_in(output))
            known = {"inner": frozenset(call.inner), "linear": isinstance(module, nn.Linear)}
            self._add(type(module).__name__, call.inputs, outputs, call.name, **known)
        if not self._in_atom():
            made = tuple(self._value(t) for t in tensors_in(output))
            one = isinstance(output, Tensor)
            self._made.flow.spans.append(Span(call.name, self._inside(), call.arguments, made, one))
            if self._steps and not self._stack:
                self._end_call(output, made)
        return output

    def _end_call(self, output: Any, made: tuple[int, ...]) -> None:
        """Finish a step's call of the model or of a part of it."""
        if self._begun is None:
            self._given += made
            return
        self._whole.append(self.finish(output))
        self._made, self._begun = self._begun, None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._in_atom():
            self._stack[-1].inner.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))
        inputs = self._read((args, kwargs or {}))
        for tensor in tensors_in((args, kwargs or {})) if self._stack or not self._steps else ():
            if id(tensor) in self._owners:  # reads by a step do not count: they may be a penalty on all weights
                self._made.outside.update(self._owners[id(tensor)])
        out = func(*args, **(kwargs or {}))
        outputs = tuple(self._new_value(t) for t in tensors_in(out))
        name = func.overloadpacket.__name__
        dim = args[1] if name in CUTS and len(args) > 1 and isinstance(args[1], int) else None
        dim = 0 if name == "slice" and dim is None else dim
        activation = _spell_activation(name, args, kwargs or {}) if self._activating else None
        self._add(name, inputs, outputs, None, dim=dim, activation=activation)
        return out

    def see_dropout(self, x: Tensor, p: float, run: Callable[[], Tensor]) -> Tensor:
        """Record a functional dropout as one operation, however the device implements it."""
        if self._in_atom():
            return run()
        inputs = self._read((x,))
        self._stack.append(_Running("", True, inputs))
        try:
            out = run()
        finally:
            self._stack.pop()
        self._add("native_dropout", inputs, (self._new_value(out),), None, dropout=p)
        return out

    def _in_atom(self) -> bool:
        return any(call.atom for call in self._stack)

    def _inside(self) -> str:
        return self._stack[-1].name if self._stack else STEP if self._steps else ""

    def _add(self, op: str, inputs: tuple[int, ...], outputs: tuple[int, ...], site: str | None, **known: Any) -> None:
        known["in_function"] = not torch._C._is_fwd_grad_enabled()  # torch.no_grad leaves it on
        known["grad"] = torch.is_grad_enabled() if self._grad is None else self._grad
        index = len(self._made.flow.calls)
        self._made.flow.calls.append(Call(index, op, self._inside(), inputs, outputs, site, **known))

    def _read(self, values: Any) -> tuple[int, ...]:
        return tuple(self._value(t) for t in tensors_in(values))

    def _value(self, tensor: Tensor) -> int:
        return self._made.values[id(tensor)] if id(tensor) in self._made.values else self._new_value(tensor)

    def _new_value(self, tensor: Tensor) -> int:
        # a weakref: keeping every intermediate of a batch alive could exhaust GPU memory
        self._made.alive[id(tensor)] = weakref.ref(
            tensor, _make_forget(id(tensor), self._made.values, self._made.alive)
        )
        self._made.values[id(tensor)] = len(self._made.flow.shapes)
        if tensor.is_nested:
            self._made.flow.nested.add(self._made.values[id(tensor)])
        self._made.flow.shapes.append(_shape_of(tensor))
        self._made.flow.floating.append(tensor.is_floating_point())
        self._made.flow.dtypes.append(tensor.dtype)
        if id(tensor) in self._owners or id(tensor) in self._buffers:
            self._made.flow.owned.add(self._made.values[id(tensor)])
        return self._made.values[id(tensor)]


def _shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape; of a nested tensor that of its rows, one behind another, if it has them so."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    values = getattr(tensor, "_values", None)  # not `values()`, which would be recorded as an operation
    return tuple(values.shape) if isinstance(values, Tensor) else ()
