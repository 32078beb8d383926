"""protect_residual: keep the residual stream and its additions in float32; branches keep their precision.

    y = x + f(x)    ->    y = float32(x) + f(x)

Why: the stream is a sum over all layers. In 16-bit precision every addition rounds it to 8 (bf16) or 11 bits, and small
contributions of late layers are lost first; the branches, which are normalized, do not need more. The sum stays in
float32 until the next branch's linears, which cast their input under autocast. In a float32 model without autocast
nothing changes.

A sum has the wider dtype of its sides, so it suffices to upcast one side. Additions are found by running the model on
the example: x + f(x), two branches from one input (a projected shortcut), and DCN's cross x + x_0 f(x). If a side is an
argument of the module that adds, a hook upcasts this argument; if a child produced it, a hook upcasts the child's
output. No forward is rewritten, so its conditions and random numbers still work. On paths that the example did not
take, a wider input is still the same input.

A model with 16-bit parameters is refused: without autocast its linears could not read a float32 stream.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from loka.mods.editor import Editor
from loka.mods.interception import Key, WidenInputs, WidenOutputs
from loka.records.mods import ModClass
from loka.units.flow import Call, Flow, Span

_SUMS = ("add", "add_", "addcmul", "addcmul_")
# Operations whose result has the widest dtype of their inputs.
_PROMOTING = {
    *_SUMS,
    "sub",
    "mul",
    "div",
    "cat",
    "stack",
    "where",
    "native_dropout",
    "clone",
    "alias",
    "detach",
    "neg",
    "relu",
}
_PROMOTING |= {
    "view",
    "_unsafe_view",
    "reshape",
    "_reshape_alias",
    "unsqueeze",
    "squeeze",
    "expand",
    "flatten",
    "contiguous",
}
_PROMOTING |= {
    "t",
    "transpose",
    "permute",
    "slice",
    "select",
    "split",
    "split_with_sizes",
    "unbind",
    "index",
    "index_select",
}


@dataclass(frozen=True)
class ProtectResidual:
    """Keep the residual stream and its additions in float32. No options.

    Example:
        >>> loka.mods.apply(model, [ProtectResidual()], example=batch)
    """

    name: ClassVar[str] = "protect_residual"
    under_autocast: ClassVar[bool] = True
    effect: ClassVar[ModClass] = "rounding"

    def rewrite(self, editor: Editor) -> None:
        """Rewrite every module whose own forward adds a branch to a residual stream."""
        narrow = {p.dtype for p in editor.model.parameters()} & {torch.float16, torch.bfloat16}
        if narrow:
            editor.leave("", f"its parameters are {narrow.pop()}: keep them in float32 and use autocast")
            return
        flow = editor.flow
        if not isinstance(flow, Flow):
            editor.leave("", flow.reason)
            return
        sums = [call for call in flow.calls if call.site is None and call.op in _SUMS and _is_residual(flow, call)]
        frames = {call.inside for call in sums}
        hooked: set[str] = set()
        for name, module in editor.modules():
            if name in frames and next(module.children(), None) is not None:
                _upcast_sums(editor, flow, name, [call for call in sums if call.inside == name], hooked)


def _upcast_sums(editor: Editor, flow: Flow, frame: str, sums: list[Call], hooked: set[str]) -> None:
    """Upcast one side of every sum of a module, or report why that is not possible.

    `hooked` collects the modules whose output is upcast already.
    """
    sources = _Sources(flow, frame)
    keys: list[Key] = []
    exits: list[str] = []
    for call in sums:
        if sources.is_wide(call):
            continue
        source = sources.find(call)
        if source is None:
            editor.leave(
                frame,
                f"neither side of its {call.op} is an input of it or an output of one of its modules; "
                "hint: add in float32 there, x.float() + y",
            )
            return
        sources.widen(source)
        if isinstance(source, Span):
            exits.append(source.name)
        else:
            keys += [key for key, value in sources.arguments if value == source]
    if keys:
        editor.hook(frame, WidenInputs(tuple(dict.fromkeys(keys))), before=True)
    for name in exits:
        if name not in hooked:
            editor.hook(name, WidenOutputs(), before=False)
            hooked.add(name)
    if keys or exits:
        where = [*(["its input"] if keys else []), *(f"the output of {name}" for name in exits)]
        what = f"{len(sums)} residual addition{'s' * (len(sums) > 1)} in float32, by upcasting {', '.join(where)}"
        editor.change(frame, what, "rounding")


class _Sources:
    """Traces the sides of a module's sums back to arguments or child modules, and tracks which values are upcast."""

    def __init__(self, flow: Flow, frame: str) -> None:
        self.flow, self.frame = flow, frame
        spans = flow.spans_of(frame)
        self.arguments = spans[0].arguments if spans else ()
        self._children = {value: span for span in flow.spans if span.inside == frame for value in span.outputs}
        self._wide: set[int] = set()

    def widen(self, source: "int | Span") -> None:
        self._wide |= set(source.outputs) if isinstance(source, Span) else {source}

    def is_wide(self, call: Call) -> bool:
        """Return True if a side of a sum derives from an upcast value by operations that keep the dtype.

        For an in-place sum, the first side counts alone.
        """
        sides = call.inputs[:1] if call.op.endswith("_") else call.inputs
        return any(not self._wide.isdisjoint(self._reach(side)) for side in sides)

    def find(self, call: Call) -> "int | Span | None":
        """Return what to upcast: preferably an argument of the module, else a child's output, composite ones first."""
        in_place = call.op.endswith("_")
        reached = [value for side in (call.inputs[:1] if in_place else call.inputs) for value in self._reach(side)]
        given = {value for _, value in self.arguments}
        # not an argument that is added to in place: the caller would no longer see the sum in its own tensor
        if not in_place:
            for value in reached:
                if value in given:
                    return value
        spans = [self._children[value] for value in reached if value in self._children]
        atoms = {c.site for c in self.flow.calls if c.site is not None}
        return next((span for span in spans if span.name not in atoms), spans[0] if spans else None)

    def _reach(self, value: int) -> list[int]:
        """Return a value and its sources through the module's own dtype-keeping operations, nearest first."""
        found, waiting = [value], [value]
        while waiting:
            at = waiting.pop(0)
            call = self.flow.maker(at)
            if at in self._children or call is None or call.site is not None or call.op not in _PROMOTING:
                continue
            fresh = [source for source in call.inputs if source not in found]
            found += fresh
            waiting += fresh
        return found


def _is_residual(flow: Flow, call: Call) -> bool:
    """Return True for x + f(x), and for g(x) + f(x) where x is an input of the module."""
    if len(set(call.inputs)) < 2:
        return False
    first, *others = call.inputs
    own = flow.ancestors(first) | {first}
    ways = [flow.ancestors(side) | {side} for side in others]
    if any(first in way or side in own for side, way in zip(others, ways, strict=True)):
        return True
    given = {value for span in flow.spans_of(call.inside) for _, value in span.arguments}
    return any(given & own & way for way in ways)
