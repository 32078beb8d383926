"""The data flow between the modules of a model in one execution, and questions about it.

A module tree does not say in which order modules are used, whether a norm's gain can be folded into the next linear,
whether a sigmoid is a gate or the output, or whether a module is used twice. One forward pass does
(`loka.units.recording`):

    atom   a module without children: one call, whatever happens inside it
    op     an operation outside of any atom, as the dispatcher sees it, custom ops and autograd functions included
    span   one call of any module, with its tensor arguments and outputs

Every output of a call is a new value, so an in-place operation makes one too.

This is one execution, not a proof: on other data the forward may take another path. `loka.mods.branching` says which
forwards have other paths.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch

STEP = "the step"  # `inside` of operations that a training step runs between its calls of modules
# Operations that keep every channel of the last dimension unchanged.
_COPIES = {"_to_copy", "clone", "alias", "detach", "contiguous", "lift_fresh", "native_dropout"}
_RESHAPES = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "_reshape_alias"}
CUTS = {"slice", "select", "index", "index_select", "gather"}
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
    grad: bool = False  # whether gradients were enabled; in eval mode only where the forward enables them


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
    return call.op in CUTS and call.dim is not None and call.dim % len(before) != len(before) - 1


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
