"""Record the data flow between the modules of a model by running it once on an example.

A module tree does not say in which order modules are used, whether a norm's gain can be folded into the next linear,
whether a sigmoid is a gate or the output, or whether a module is used twice. The forward pass does, so it is run once
under no_grad, in eval or training mode, and recorded as:

    atom   a module without children: one call, whatever happens inside it
    op     an operation outside of any atom, as the dispatcher sees it, custom ops and autograd functions included
    span   one call of any module, with its tensor arguments and outputs

Every output of a call is a new value, so an in-place operation makes one too.

This is one execution, not a proof: on other data the forward may take another path. `loka.mods.branching` says which
forwards have other paths.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from loka.kernels.activation import LEAK
from loka.lowp.passing import is_hidden, spell_call
from loka.nn.wrapping import is_scripted
from loka.units.example import call_model, tensors_in
from loka.units.undisturbed import ordinary_encoders, set_mode, undisturbed

STEP = "the step"  # `inside` of operations that a training step runs between its calls of modules
# Operations that keep every channel of the last dimension unchanged.
_COPIES = {"_to_copy", "clone", "alias", "detach", "contiguous", "lift_fresh", "native_dropout"}
_RESHAPES = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "_reshape_alias"}
_CUTS = {"slice", "select", "index", "index_select", "gather"}
# What may come between a prediction layer and the result: no weights, no products, no norms.
_TAIL = {
    "sigmoid", "sigmoid_", "softmax", "_softmax", "log_softmax", "_log_softmax", "tanh", "clamp", "add", "add_", "mul", "mul_", "div", "neg", "exp",
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "permute", "_to_copy", "clone", "alias", "detach", "select", "slice", "cat", "stack",
    "Sigmoid", "HardSigmoid", "Softmax", "LogSoftmax", "Identity", "Dropout", "Flatten",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One atom or operation that ran: the values it read and made, and the innermost module it ran in."""

    index: int
    op: str
    inside: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    site: str | None = None  # the atom's name; None for an operation
    inner: frozenset[str] = frozenset()  # operations inside an atom
    dim: int | None = None  # the dimension an operation cuts
    linear: bool = False  # whether the atom is an nn.Linear
    activation: tuple[str, float] | None = None  # for an activation: its name in the kernels, and its slope
    dropout: float | None = None  # p of a functional dropout that has an effect
    in_function: bool = False  # whether it ran in the forward of an autograd function, such as a reentrant checkpoint


@dataclass(frozen=True)
class Span:
    """One call of a module, from the module `inside` whose forward made it."""

    name: str
    inside: str
    arguments: tuple[tuple[int | str, int], ...]  # tensor arguments: (position or name, value)
    outputs: tuple[int, ...]
    sole: bool  # whether it returned one tensor and nothing else


@dataclass
class Flow:
    """Calls in the order they ran, the shapes of all values, and which values are the model's results."""

    calls: list[Call] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)  # in the order they ended
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    floating: list[bool] = field(default_factory=list)  # whether a value holds floating-point numbers
    dtypes: list[torch.dtype] = field(default_factory=list)  # of every value
    nested: set[int] = field(default_factory=set)  # values that are nested tensors
    results: frozenset[int] = frozenset()
    owned: set[int] = field(default_factory=set)  # values that are parameters or buffers
    outside_reads: frozenset[str] = frozenset()  # parameters that are read outside of the atom that owns them

    def calls_of(self, site: str) -> list[Call]:
        """Return every call of an atom."""
        return [call for call in self.calls if call.site == site]

    def readers(self, value: int) -> list[Call]:
        """Return the calls that read a value."""
        return [call for call in self.calls if value in call.inputs]

    def maker(self, value: int) -> Call | None:
        """Return the call that produced a value; None for inputs and parameters."""
        return self.makers.get(value)

    @cached_property
    def makers(self) -> dict[int, Call]:
        """The call that produced each value."""
        return {out: call for call in reversed(self.calls) for out in call.outputs}

    def spans_of(self, name: str) -> list[Span]:
        """Return every call of a module."""
        return [span for span in self.spans if span.name == name]

    def ancestors(self, value: int) -> set[int]:
        """Return every value that a value depends on."""
        makers = self.makers
        found: set[int] = set()
        waiting = [value]
        while waiting:
            call = makers.get(waiting.pop())
            for source in () if call is None else call.inputs:
                if source not in found:
                    found.add(source)
                    waiting.append(source)
        return found


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


def channels_kept(flow: Flow, call: Call, value: int, width: int, *, shift: bool) -> bool:
    """Check whether a call only moves whole rows of channels, so that an affine map per channel commutes with it.

    Args:
        flow: the flow that contains the call.
        call: the call that reads the value.
        value: the number of the tensor with the channels.
        width: the number of channels per row.
        shift: whether the map adds a constant; dropout commutes only with a product.
    """
    last = flow.shapes[call.outputs[0]][-1:] if call.outputs else ()
    if call.site is not None and call.op in ("Flatten", "Unflatten"):
        return bool(last) and last[0] % width == 0
    if call.site is not None:
        return call.op == "Identity" or (call.op == "Dropout" and not shift)
    if call.op in _COPIES:
        return not (shift and call.op == "native_dropout")
    if call.op in _RESHAPES:
        return bool(last) and last[0] % width == 0
    before = flow.shapes[value]
    return call.op in _CUTS and call.dim is not None and call.dim % len(before) != len(before) - 1


@dataclass(frozen=True)
class Sink:
    """A linear that reads the followed channels; its input is `repeat` copies of them, one after another."""

    site: str
    repeat: int


def follow(flow: Flow, value: int, *, shift: bool) -> list[Sink] | str:
    """Return the linears that read a value if nothing else reads it or changes its channels on the way, else why not.

    With `shift`, a constant is to be moved past the calls in between, which random dropout does not allow.
    """
    width, sinks, waiting = flow.shapes[value][-1], [], [value]
    while waiting:
        at = waiting.pop()
        if at in flow.results:
            return "it is a result of the model"
        readers = flow.readers(at)
        for call in readers:
            if call.site is not None and call.linear:
                sinks.append(Sink(call.site, flow.shapes[at][-1] // width))
            elif channels_kept(flow, call, at, width, shift=shift):
                waiting.extend(call.outputs)
            else:
                where = f" in {call.inside}" if call.inside else ""
                return f"it is also read by {call.site or call.op}{where if call.site is None else ''}"
    return sinks or "nothing reads it"


def prediction_linears(flow: Flow) -> Iterator[str]:
    """Yield the linears with no weights, products, norms or residual additions between them and the result."""
    makers = flow.makers
    waiting, seen = list(flow.results), set(flow.results)
    while waiting:
        call = makers.get(waiting.pop())
        if call is None:
            continue
        if call.site is not None and call.linear:
            yield call.site
        elif (call.op in _TAIL or (call.inner and call.inner <= _TAIL)) and not _is_residual(flow, call):
            waiting.extend(value for value in call.inputs if value not in seen)
            seen.update(call.inputs)


def _is_residual(flow: Flow, call: Call) -> bool:
    """Check whether a call adds a value to something that was computed from it."""
    if call.op not in ("add", "add_") or len(call.inputs) != 2:
        return False
    first, second = call.inputs
    return first in flow.ancestors(second) or second in flow.ancestors(first)


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
        with undisturbed(model), ordinary_encoders(), recorder.watching(training), torch.no_grad():
            result = recorder.run_on_meta() if on_meta else call_model(model, example)
            return recorder.finish(result)  # before `undisturbed` restores the attributes, which may hold results
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
    with undisturbed(model), ordinary_encoders(), recorder.watching(training), torch.no_grad():
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


class _CallMode(TorchFunctionMode):
    """Report calls of activations, and of dropouts with an effect, to a recorder.

    The dispatcher only sees what a dropout decomposes to. It also sees activations that a placed chain would not, since
    no function mode does: in TorchScript, in `torch.ops`, and functions that torch.compile hides from modes.
    """

    def __init__(self, recorder: "_Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        hidden = is_hidden(func, sys._getframe(1).f_code)
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
        self._flow = Flow()
        self._values: dict[int, int] = {}  # id of a tensor -> value
        self._alive: dict[int, Any] = {}  # weakrefs that drop the id of a freed tensor, which may be reused
        self._begun: tuple[Any, ...] | None = None  # the step's recording, while a call of the model is recorded
        self._stack: list[tuple[str, bool, tuple[int, ...], set[str]]] = []  # running: name, atom, inputs, inner
        self._arguments: list[tuple[tuple[int | str, int], ...]] = []
        self._outside: set[str] = set()
        self._activating = False  # inside a call of an activation that function modes see

    def _own(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, parameter in named:
            self._owners.setdefault(id(parameter), []).append(name)

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
        set_mode(self._model, training)
        with ExitStack() as stack:
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
        self._flow, self._values, self._outside, self._alive = Flow(), {}, set(), {}
        return torch.func.functional_call(self._model, {name: on_meta[id(t)] for name, t in named}, inputs)

    def finish_steps(self) -> list[Flow]:
        """Return a flow for every call of the model, and one for the calls of its parts, if there were any."""
        flow = self._flow
        read = {value for call in flow.calls if call.site is not None for value in call.inputs}
        read |= {source for value in tuple(read) for source in flow.ancestors(value)}
        flow.results = frozenset(value for value in self._given if value not in read)
        flow.outside_reads = frozenset(self._outside)
        return [*self._whole, *([flow] if self._given else [])]

    def finish(self, result: Any) -> Flow:
        # what somebody keeps is a result too, in attributes, a global list or an object of any class: a loss may read it
        results = frozenset(self._value(t) for t in tensors_in(result))
        if not self._kept() <= results:
            gc.collect()  # what is only part of a cycle is kept by nobody
        self._flow.results = results | self._kept()
        self._flow.outside_reads = frozenset(self._outside)
        return self._flow

    def _kept(self) -> set[int]:
        """Return the values made in this flow whose tensors still exist."""
        alive = [self._values[key] for key, tensor in self._alive.copy().items() if tensor() is not None]
        return self._flow.makers.keys() & alive

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        atom = next(module.children(), None) is None
        if self._steps and module is self._model and not self._stack:
            self._begun = (self._flow, self._values, self._outside, self._alive)
            self._flow, self._values, self._outside, self._alive = Flow(), {}, set(), {}
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        self._arguments.append(tuple((key, self._value(value)) for key, value in named if isinstance(value, Tensor)))
        self._stack.append((self._names[id(module)], atom, self._read((args, kwargs)), set()))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._stack[-1][1] and isinstance(output, Tensor) and any(output is value for value in args):
            # Identity, or Dropout in eval mode: its output must be a value of its own
            output = output.view_as(output)
        name, atom, inputs, inner = self._stack.pop()
        if atom and not self._in_atom():
            outputs = tuple(self._new_value(t) for t in tensors_in(output))
            linear = isinstance(module, nn.Linear)
            self._add(type(module).__name__, inputs, outputs, name, inner=frozenset(inner), linear=linear)
        arguments = self._arguments.pop()
        if not self._in_atom():
            made = tuple(self._value(t) for t in tensors_in(output))
            self._flow.spans.append(Span(name, self._inside(), arguments, made, isinstance(output, Tensor)))
            if self._steps and not self._stack:
                self._end_call(output, made)
        return output

    def _end_call(self, output: Any, made: tuple[int, ...]) -> None:
        """Finish a step's call of the model or of a part of it."""
        if self._begun is None:
            self._given += made
            return
        self._whole.append(self.finish(output))
        self._flow, self._values, self._outside, self._alive = self._begun
        self._begun = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._in_atom():
            self._stack[-1][3].add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))
        inputs = self._read((args, kwargs or {}))
        for tensor in tensors_in((args, kwargs or {})) if self._stack or not self._steps else ():
            if id(tensor) in self._owners:  # reads by a step do not count: they may be a penalty on all weights
                self._outside.update(self._owners[id(tensor)])
        out = func(*args, **(kwargs or {}))
        outputs = tuple(self._new_value(t) for t in tensors_in(out))
        name = func.overloadpacket.__name__
        dim = args[1] if name in _CUTS and len(args) > 1 and isinstance(args[1], int) else None
        dim = 0 if name == "slice" and dim is None else dim
        activation = _spell_activation(name, args, kwargs or {}) if self._activating else None
        self._add(name, inputs, outputs, None, dim=dim, activation=activation)
        return out

    def see_dropout(self, x: Tensor, p: float, run: Callable[[], Tensor]) -> Tensor:
        """Record a functional dropout as one operation, however the device implements it."""
        if self._in_atom():
            return run()
        inputs = self._read((x,))
        self._stack.append(("", True, inputs, set()))
        try:
            out = run()
        finally:
            self._stack.pop()
        self._add("native_dropout", inputs, (self._new_value(out),), None, dropout=p)
        return out

    def _in_atom(self) -> bool:
        return any(atom for _, atom, _, _ in self._stack)

    def _inside(self) -> str:
        return self._stack[-1][0] if self._stack else STEP if self._steps else ""

    def _add(self, op: str, inputs: tuple[int, ...], outputs: tuple[int, ...], site: str | None, **known: Any) -> None:
        in_function = not torch._C._is_fwd_grad_enabled()  # torch.no_grad leaves it on, an autograd function does not
        self._flow.calls.append(
            Call(len(self._flow.calls), op, self._inside(), inputs, outputs, site, in_function=in_function, **known)
        )

    def _read(self, values: Any) -> tuple[int, ...]:
        return tuple(self._value(t) for t in tensors_in(values))

    def _value(self, tensor: Tensor) -> int:
        return self._values[id(tensor)] if id(tensor) in self._values else self._new_value(tensor)

    def _new_value(self, tensor: Tensor) -> int:
        # a weakref: keeping every intermediate of a batch alive could exhaust GPU memory
        self._alive[id(tensor)] = weakref.ref(tensor, _make_forget(id(tensor), self._values, self._alive))
        self._values[id(tensor)] = len(self._flow.shapes)
        if tensor.is_nested:
            self._flow.nested.add(self._values[id(tensor)])
        self._flow.shapes.append(_shape_of(tensor))
        self._flow.floating.append(tensor.is_floating_point())
        self._flow.dtypes.append(tensor.dtype)
        if id(tensor) in self._owners or id(tensor) in self._buffers:
            self._flow.owned.add(self._values[id(tensor)])
        return self._values[id(tensor)]


def _shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape; of a nested tensor that of its rows, one behind another, if it has them so."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    values = getattr(tensor, "_values", None)  # not `values()`, which would be recorded as an operation
    return tuple(values.shape) if isinstance(values, Tensor) else ()
