"""norm_order: move norms, so that quantized values are normalized.

    pre        y = norm(x + f(x))       ->  y = x + f(norm(x))           the branch's linears read normalized values
    post       y = x + f(norm(x))       ->  y = norm(x + f(x))           the residual stream itself stays bounded
    epilogue   y = norm(act(W x))       ->  y = act(norm(W x))           the order that a GEMM's epilogue computes

"epilogue" is the default: it lets `fuse` run the three as one kernel, and the result is still bounded by sqrt(256), so
a static scale is safe. Which of the other two is better depends on training. Pre-norm stacks usually need one more norm
after the last block, which this mod does not add.

No forward is rewritten: the user's own keeps running, with its branches, flags and random numbers. In an nn.Sequential
the children run in another order; two modules without parameters exchange places; otherwise the norm becomes a no-op
and a hook runs it in its new place: after the linear, on the inputs of the branch's modules, or on the block's output.
If an operation of the forward itself reads the sum, no hook can reach it, and the norm is left unchanged.

Each is an architecture change: parameters keep their names but compute another function. The moves are derived from one
run on the example, so modules whose forward may branch (`loka.mods.branching`) are left unchanged, and so are norms
between two widths.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from loka.mods.branching import other_entries
from loka.mods.editor import Editor
from loka.mods.interception import Elsewhere, Key, NormalizeInputs, NormalizeOutput, Reordered
from loka.mods.journal import names_of
from loka.mods.norms import find_norms, refuse_norm
from loka.nn import BlockNorm, HardSwish
from loka.records.mods import ModClass
from loka.units.flow import Call, Flow, Span

Order = Literal["epilogue", "pre", "post"]
_ACTIVATIONS = (nn.ReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.Mish, HardSwish)


@dataclass(frozen=True)
class NormOrder:
    """Move norms, so that quantized values are normalized.

    Args:
        to: where the norm goes: "epilogue", "pre" or "post".

    Example:
        >>> loka.mods.apply(model, [NormOrder("pre")], example=batch)
    """

    to: Order = "epilogue"
    name: ClassVar[str] = "norm_order"
    effect: ClassVar[ModClass] = "architecture"

    def __post_init__(self) -> None:
        if self.to not in ("epilogue", "pre", "post"):
            raise ValueError(f"norm_order(to={self.to!r}): expected 'epilogue', 'pre' or 'post'")

    def rewrite(self, editor: Editor) -> None:
        """Move every norm that is not in the requested place."""
        flow = editor.flow
        for name, norm in editor.modules(*find_norms(editor.model), BlockNorm):
            if not isinstance(flow, Flow):
                editor.leave(name, flow.reason)
                continue
            calls = flow.calls_of(name)
            if isinstance(norm, Elsewhere):
                editor.leave(name, str(refuse_norm(norm)))
                continue
            place = _MATCHERS[self.to](editor, flow, calls[0]) if calls and calls[0].inputs else None
            if place is None:
                continue
            why = refuse_norm(norm) or _refuse_use(editor, name, norm, len(calls))
            if why is None and isinstance(place, _Place):
                why = _refuse_frame(editor, calls[0].inside) or _add_hint(editor.find_branch(name, *place.passed))
            if why is None and isinstance(place, str):
                why = place
            if why is None and isinstance(place, _Place):
                place.move(editor, name)
            elif why is not None:
                editor.leave(name, why)


def _refuse_use(editor: Editor, name: str, norm: nn.Module, calls: int) -> str | None:
    if len(names_of(editor.model, norm)) > 1:
        return "it is registered under several names"
    if not name:
        return "the model is itself a norm"
    return f"it is used {calls} times in this forward" if calls > 1 else None


def _refuse_frame(editor: Editor, frame: str) -> str | None:
    """Refuse a module with other methods that use its children: they may do so in another order."""
    module = editor.model.get_submodule(frame)
    others = other_entries(module)
    kind = type(module).__name__
    return _add_hint(f"{kind} has other entry points ({', '.join(others)}) that may use its parts in another order") if others else None  # fmt: skip


def _add_hint(why: str | None) -> str | None:
    return None if why is None else f"{why}; hint: write the order in its forward, by hand"


@dataclass(frozen=True)
class _Place:
    """A new place for a norm. The sites in `passed` must always be called together with the norm."""

    passed: tuple[str, ...]

    def move(self, editor: Editor, norm: str) -> None:
        raise NotImplementedError

    def _hand_over(self, editor: Editor, norm: str) -> nn.Module:
        """Turn the norm's own call into a no-op, and return the norm for a hook to run."""
        editor.mix(norm, Elsewhere)
        return editor.model.get_submodule(norm)


@dataclass(frozen=True)
class _BeforeActivation(_Place):
    linear: str
    activation: str
    frame: str

    def move(self, editor: Editor, norm: str) -> None:
        model = editor.model
        frame, prefix = model.get_submodule(self.frame), f"{self.frame}." if self.frame else ""
        inside = {f"{prefix}{child}": child for child in frame._modules}
        if type(frame).forward in (nn.Sequential.forward, Reordered.forward) and {norm, self.activation} <= set(inside):
            self._reorder(editor, frame, inside[norm], inside[self.activation])
        elif self._may_exchange(editor, norm):
            editor.exchange(norm, self.activation)
        else:
            editor.hook(self.linear, NormalizeOutput(self._hand_over(editor, norm)), before=False)
        editor.change(norm, f"now stands before {self.activation}", "architecture")

    def _reorder(self, editor: Editor, frame: nn.Module, norm: str, activation: str) -> None:
        order = list(frame.__dict__.get("loka_order", frame._modules))
        first, second = order.index(activation), order.index(norm)
        order[first], order[second] = norm, activation
        if isinstance(frame, Reordered):
            editor.mark(self.frame, "loka_order", tuple(order))
        else:
            editor.mix(self.frame, Reordered, loka_order=tuple(order))

    def _may_exchange(self, editor: Editor, norm: str) -> bool:
        """Return True if both modules have one name, one call and no entries in the state_dict."""
        modules = [editor.model.get_submodule(name) for name in (norm, self.activation)]
        alone = all(len(names_of(editor.model, m)) == 1 and not m.state_dict() for m in modules)
        return alone and len(editor.calls(self.activation)) == 1


@dataclass(frozen=True)
class _BeforeBranch(_Place):
    readers: tuple[tuple[str, tuple[Key, ...]], ...]

    def move(self, editor: Editor, norm: str) -> None:
        moved = self._hand_over(editor, norm)
        for reader, keys in self.readers:
            editor.hook(reader, NormalizeInputs(moved, keys), before=True)
        editor.change(norm, "now stands before the branch (pre-norm)", "architecture")


@dataclass(frozen=True)
class _BehindSum(_Place):
    frame: str

    def move(self, editor: Editor, norm: str) -> None:
        editor.hook(self.frame, NormalizeOutput(self._hand_over(editor, norm)), before=False)
        editor.change(norm, "now stands behind the sum (post-norm)", "architecture")


def _match_epilogue(editor: Editor, flow: Flow, norm: Call) -> _Place | str | None:
    """Match norm(act(linear(x))). Return None if no activation comes before it, a reason if it cannot be moved."""
    act = flow.maker(norm.inputs[0])
    if act is None or act.site is None or not isinstance(editor.model.get_submodule(act.site), _ACTIVATIONS):
        return None
    linear = flow.maker(act.inputs[0])
    if linear is None or linear.site is None or not linear.linear or _is_shared(flow, act, linear):
        return "the activation before it does not follow a linear, or is read elsewhere too; hint: write the order in its forward, by hand"
    if len(flow.calls_of(linear.site)) > 1:
        return f"{linear.site} is used {len(flow.calls_of(linear.site))} times"
    return _BeforeActivation((linear.site, act.site), linear.site, act.site, norm.inside)


def _is_shared(flow: Flow, *calls: Call) -> bool:
    """Return True if the output of any of these calls is not read exactly once, or is a result of the model."""
    return any(len(flow.readers(call.outputs[0])) != 1 or call.outputs[0] in flow.results for call in calls)


def _match_pre(editor: Editor, flow: Flow, norm: Call) -> _Place | str | None:
    """Match norm(x + f(x)), and find the modules of the branch that read x."""
    add = flow.maker(norm.inputs[0])
    if add is None or not is_addition(add) or add.inside != norm.inside:
        return None
    stream = _find_stream(flow, add)
    if stream is None or _is_shared(flow, add):
        return (
            "the sum before it is not x + f(x), or is read elsewhere too; hint: if the sum itself is the residual "
            "stream, the model is pre-norm already"
        )
    branch = next(value for value in add.inputs if value != stream)
    into = flow.ancestors(branch)
    found: dict[str, tuple[Key, ...]] = {}
    for reader in flow.readers(stream):
        if reader is add or not (set(reader.outputs) & into or branch in reader.outputs):
            continue
        span = _find_span(flow, norm.inside, reader, stream)
        if span is None:
            where = reader.site or f"the operation {reader.op}"
            return (
                f"{where} reads x for the branch, but is not a module called by the forward that adds; hint: "
                "give x + f(x) a module of its own"
            )
        if len(flow.spans_of(span.name)) > 1 or len(names_of(editor.model, editor.model.get_submodule(span.name))) > 1:
            return f"{span.name}, which reads x, is used more than once"
        found[span.name] = tuple(key for key, value in span.arguments if value == stream)
    return _BeforeBranch(tuple(found), tuple(found.items()))


def _find_span(flow: Flow, frame: str, reader: Call, value: int) -> Span | None:
    """Return the call of a module by `frame` itself that received `value` and contains the reader."""
    for span in flow.spans:
        inside = span.name in (reader.site, reader.inside) or reader.inside.startswith(f"{span.name}.")
        if span.inside == frame and inside and any(value == given for _, given in span.arguments):
            return span
    return None


def _match_post(editor: Editor, flow: Flow, norm: Call) -> _Place | str | None:
    """Match x + f(norm(x)) as the output of a module."""
    stream, normed = norm.inputs[0], norm.outputs[0]
    sums = [call for call in flow.readers(stream) if is_addition(call) and call.inside == norm.inside]
    add = next(
        (call for call in sums if _find_stream(flow, call) == stream and _depends(flow, call, stream, normed)), None
    )
    if add is None:
        return None
    ahead = flow.ancestors(add.outputs[0])
    if (
        any(not set(call.outputs) & (ahead | set(add.outputs)) for call in flow.readers(normed))
        or normed in flow.results
    ):
        return "what it normalises is read by more than the branch; hint: write the order in its forward, by hand"
    spans = flow.spans_of(norm.inside)
    inside = [
        c for c in flow.readers(add.outputs[0]) if c.inside == norm.inside or c.inside.startswith(f"{norm.inside}.")
    ]
    if len(spans) != 1 or not spans[0].sole or spans[0].outputs != add.outputs or (inside and norm.inside):
        return "the sum is not the output of its module, so no hook can normalize it; hint: give each x + f(x) a module of its own"
    return _BehindSum((), norm.inside)


def _depends(flow: Flow, add: Call, stream: int, value: int) -> bool:
    other = next(side for side in add.inputs if side != stream)
    return other == value or value in flow.ancestors(other)


def is_addition(call: Call) -> bool:
    """Return True if a call of the flow adds two tensors."""
    return call.site is None and call.op in ("add", "add_") and len(set(call.inputs)) == 2


def _find_stream(flow: Flow, add: Call) -> int | None:
    """Return the x of x + f(x), or None."""
    first, second = add.inputs
    if first in flow.ancestors(second):
        return first
    return second if second in flow.ancestors(first) else None


_MATCHERS = {"epilogue": _match_epilogue, "pre": _match_pre, "post": _match_post}
