"""Flow: which module feeds which, seen by running the model once on an example.

A module tree says what a model has, not in which order it is used. Whether a norm's gain can be folded into the next linear, whether a sigmoid is a gate or
the output, whether a module is used twice: all of that is in the forward pass. So it is run once, under no_grad, in eval mode or in training mode, and written down:

    atom   a module without children: one call, whatever happens inside it
    op     a tensor operation outside of any atom, as the dispatcher sees it (aten), so nothing is missed: views, autograd functions, custom ops
    span   one call of any module, with the arguments it was given and what it returned

Tensors are told apart by identity and by version, so an operation in place makes a new value.

This is one execution, not a proof: a model whose forward takes another path on other data may use a module in ways that were not seen. `loka.mods.branching` says which
forwards have other paths.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from loka.kernels.activation import LEAK
from loka.lowp.passing import DROPOUTS, spell_call
from loka.nn.wrapping import is_scripted
from loka.units.example import call_model, tensors_in
from loka.units.undisturbed import ordinary_encoders, set_mode, undisturbed

STEP = "the step"  # where operations are that a step does between calls of modules
# Operations that hand on every channel of the last dimension as it is.
_COPIES = {"_to_copy", "clone", "alias", "detach", "contiguous", "lift_fresh", "native_dropout"}
_RESHAPES = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "_reshape_alias"}
_CUTS = {"slice", "select", "index", "index_select", "gather"}
# What stands between a prediction layer and the result: no weights, no products, no norms.
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
    activation: tuple[str, float] | None = None  # an operation that is one: the kernels' name, and its slope
    dropout: float | None = None  # of a call of torch's dropout that has an effect: its p


@dataclass(frozen=True)
class Span:
    """One call of a module, from the module `inside` whose forward made it."""

    name: str
    inside: str
    arguments: tuple[tuple[int | str, int], ...]  # those that are tensors: position or name, value
    outputs: tuple[int, ...]
    sole: bool  # whether it returned one tensor and nothing else


@dataclass
class Flow:
    """Calls in the order they ran, the shapes of all values, and which values are the model's results."""

    calls: list[Call] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)  # in the order they ended
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    floating: list[bool] = field(default_factory=list)  # whether a value holds floating-point numbers
    dtypes: set[torch.dtype] = field(default_factory=set)  # of any value
    results: frozenset[int] = frozenset()
    owned: set[int] = field(default_factory=set)  # values that are parameters or buffers
    outside_reads: frozenset[str] = frozenset()  # parameters that are read outside of the atom that owns them

    def calls_of(self, site: str) -> list[Call]:
        """Every call of an atom."""
        return [call for call in self.calls if call.site == site]

    def readers(self, value: int) -> list[Call]:
        """The calls that read a value."""
        return [call for call in self.calls if value in call.inputs]

    def maker(self, value: int) -> Call | None:
        """The call that made a value; None for inputs and parameters."""
        return self.makers.get(value)

    @cached_property
    def makers(self) -> dict[int, Call]:
        """The call that made each value."""
        return {out: call for call in reversed(self.calls) for out in call.outputs}

    def spans_of(self, name: str) -> list[Span]:
        """Every call of a module."""
        return [span for span in self.spans if span.name == name]

    def ancestors(self, value: int) -> set[int]:
        """Every value that went into a value."""
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
    """Why a flow could not be seen."""

    reason: str


def channels_kept(flow: Flow, call: Call, value: int, width: int, *, shift: bool) -> bool:
    """Whether a call only moves whole rows of channels, so that an affine map of the channels can be applied after it instead.

    Args:
        flow: that the call is in.
        call: what reads the value.
        value: the number of the tensor with the channels.
        width: how many channels a row has.
        shift: whether the map adds something; dropout commutes with a product alone.

    Returns:
        True where the map may be moved behind the call.
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
    """A linear at the end of a walk; its inputs are `repeat` copies of the channels, one after another."""

    site: str
    repeat: int


def follow(flow: Flow, value: int, *, shift: bool) -> list[Sink] | str:
    """The linears that read a value, if nothing else does and nothing in between changes its channels; otherwise what stands in the way.

    `shift`: whether a constant is to be moved along, which random dropout would not let through as a constant.
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
    """Linears from which the result is reached without weights, products or norms in between, and not along a residual."""
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
    """An addition of something to what was made from it."""
    if call.op not in ("add", "add_") or len(call.inputs) != 2:
        return False
    first, second = call.inputs
    return first in flow.ancestors(second) or second in flow.ancestors(first)


def record(model: nn.Module, example: Any = None, *, training: bool = False) -> Flow | Unknown:
    """Run the model on an example and write down what fed what.

    Args:
        model: any module. Its mode, buffers and attributes and the random state are afterwards what they were.
        example: one input (a tuple is *args, a dict **kwargs). Without one, a model that has `example_inputs()` (shapes without storage, as the models of this package
            have) is run on the meta device.
        training: whether it runs in training mode.

    Returns:
        The flow; Unknown, with the reason, for a model that fails on the example or has none.
    """
    ghost = example is None
    if ghost and not hasattr(model, "example_inputs"):
        return Unknown("no example was given, so the order in which its modules run is not known; pass example=")
    recorder = _Recorder(model)
    try:
        with undisturbed(model), ordinary_encoders(), recorder.watching(training), torch.no_grad():
            result = recorder.run_without_storage() if ghost else call_model(model, example)
            return recorder.finish(result)  # in here: what a forward keeps in attributes is still there
    except Exception as error:  # whatever a user's forward raises: the mods can do without, and say so
        return Unknown(f"the model failed on the example: {type(error).__name__}: {error}")


def record_steps(model: nn.Module, run: Callable[[], Any], *, training: bool = False) -> list[Flow]:
    """Run whatever runs a model, and write down what fed what.

    Args:
        model: any module; it is left as `record` leaves it.
        run: calls the model, once or often, or its parts.
        training: whether it runs in training mode.

    Returns:
        A flow for every call of the model, and one for all of what called its parts one by one, where operations between them are inside of `STEP`.
    """
    recorder = _Recorder(model, steps=True)
    with undisturbed(model), ordinary_encoders(), recorder.watching(training), torch.no_grad():
        run()
        return recorder.finish_steps()


_ACTIVATIONS = {"relu": "relu", "silu": "silu", "hardswish": "hard_swish", "tanh": "tanh", "sigmoid": "sigmoid"}


def _spell_activation(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, float] | None:
    """An operation of the dispatcher, in place or not, as the kernels name it."""
    op = op.removesuffix("_")
    if op == "gelu":
        return "gelu_tanh" if kwargs.get("approximate", "none") == "tanh" else "gelu", LEAK
    if op == "leaky_relu":
        return op, float(args[1] if len(args) > 1 else kwargs.get("negative_slope", LEAK))
    return (_ACTIVATIONS[op], LEAK) if op in _ACTIVATIONS else None


def _forgetting(key: int, *known: dict[int, Any]) -> Callable[[Any], None]:
    """What is called when a tensor is gone."""

    def forget(_: Any) -> None:
        for one in known:
            one.pop(key, None)

    return forget


class _SeeDropout(TorchFunctionMode):
    """Shows a recorder the calls of torch's dropout that have an effect; the dispatcher sees what they are made of, a product with random numbers."""

    def __init__(self, recorder: "_Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        called = spell_call(func, args, kwargs) if func in DROPOUTS else None
        if called is None or called[1] == 0.0:
            return func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        return self._recorder.see_dropout(x, called[1], lambda: func(*args, **kwargs))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hooks on every module and a mode that sees every operation."""

    def __init__(self, model: nn.Module, *, steps: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._steps = steps  # whatever runs the model is recorded, not one call of it
        self._whole: list[Flow] = []  # of calls of the model itself
        self._given: list[int] = []  # what parts of it gave to a step that called them one by one
        self._names = {id(module): name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        self._owners = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        self._buffers = {id(b) for b in model.buffers()}
        self._flow = Flow()
        self._values: dict[int, int] = {}
        self._alive: dict[int, Any] = {}  # forgets values whose tensors are gone: their identity may become another's
        self._begun: tuple[Any, ...] | None = None  # what was recorded before the call of the model that is running
        self._stack: list[tuple[str, bool, tuple[int, ...], set[str]]] = []
        self._arguments: list[tuple[tuple[int | str, int], ...]] = []
        self._outside: set[str] = set()

    @contextmanager
    def watching(self, training: bool) -> Iterator[None]:
        set_mode(self._model, training)
        with ExitStack() as stack:
            for module in (m for m in self._model.modules() if not is_scripted(m)):
                stack.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            # in training alone: torch's fused encoder layer is not taken while any function mode is there
            with self, _SeeDropout(self) if training else nullcontext():
                yield

    def run_without_storage(self) -> Any:
        """The model on its own example inputs, with parameters that have shapes and no values."""
        named = [*self._model.named_parameters(remove_duplicate=False), *self._model.named_buffers()]
        ghosts: dict[int, Tensor] = {id(t): torch.empty_like(t, device="meta") for _, t in named}
        self._owners |= {id(ghosts[id(t)]): name for name, t in named if isinstance(t, nn.Parameter)}
        self._buffers |= {id(ghost) for ghost in ghosts.values()}
        inputs = self._model.example_inputs()  # type: ignore[operator]
        # anew: making the ghosts read every parameter, which the model does not
        self._flow, self._values, self._outside, self._alive = Flow(), {}, set(), {}
        return torch.func.functional_call(self._model, {name: ghosts[id(t)] for name, t in named}, inputs)

    def finish_steps(self) -> list[Flow]:
        """A flow for every call of the model, and one for whatever called its parts."""
        flow = self._flow
        read = {value for call in flow.calls if call.site is not None for value in call.inputs}
        read |= {source for value in tuple(read) for source in flow.ancestors(value)}
        flow.results = frozenset(value for value in self._given if value not in read)
        flow.outside_reads = frozenset(self._outside)
        return [*self._whole, *([flow] if self._given else [])]

    def finish(self, result: Any) -> Flow:
        # for a loss that reads it later
        kept = [value for module in self._model.modules() for value in vars(module).values()]
        known = [t for t in tensors_in(kept) if id(t) in self._values]
        self._flow.results = frozenset(self._value(t) for t in (*tensors_in(result), *known))
        self._flow.outside_reads = frozenset(self._outside)
        return self._flow

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
            # Identity, or Dropout in eval mode: what it hands on is told apart from what it was given
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
        """A step has called the model, or a part of it."""
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
            if id(tensor) in self._owners:  # not what a step reads: a penalty on all weights is no product
                self._outside.add(self._owners[id(tensor)])
        out = func(*args, **(kwargs or {}))
        outputs = tuple(self._new_value(t) for t in tensors_in(out))
        name = func.overloadpacket.__name__
        dim = args[1] if name in _CUTS and len(args) > 1 and isinstance(args[1], int) else None
        dim = 0 if name == "slice" and dim is None else dim
        self._add(name, inputs, outputs, None, dim=dim, activation=_spell_activation(name, args, kwargs or {}))
        return out

    def see_dropout(self, x: Tensor, p: float, run: Callable[[], Tensor]) -> Tensor:
        """A dropout called as a function: one operation, whatever the device makes of it."""
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
        self._flow.calls.append(Call(len(self._flow.calls), op, self._inside(), inputs, outputs, site, **known))

    def _read(self, values: Any) -> tuple[int, ...]:
        return tuple(self._value(t) for t in tensors_in(values))

    def _value(self, tensor: Tensor) -> int:
        return self._values[id(tensor)] if id(tensor) in self._values else self._new_value(tensor)

    def _new_value(self, tensor: Tensor) -> int:
        # not kept alive: on a GPU all that a batch computes would be there at once
        self._alive[id(tensor)] = weakref.ref(tensor, _forgetting(id(tensor), self._values, self._alive))
        self._values[id(tensor)] = len(self._flow.shapes)
        self._flow.shapes.append(tuple(tensor.shape))
        self._flow.floating.append(tensor.is_floating_point())
        self._flow.dtypes.add(tensor.dtype)
        if id(tensor) in self._owners or id(tensor) in self._buffers:
            self._flow.owned.add(self._values[id(tensor)])
        return self._values[id(tensor)]
