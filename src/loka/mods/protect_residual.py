"""protect_residual: the residual stream and its additions in float32, the branches in whatever they run in.

    y = x + f(x)    ->    y = float32(x) + f(x)

Why: the stream is a sum over all layers. In 16 bits every addition rounds it to 8 (bf16) or 11 bits, and small contributions of late layers are lost
first; the branches, which are normalised, do not need more. The sum comes out in float32 and stays so until the next branch's linears, which cast what
they read under autocast. Without autocast in a float32 model nothing changes.

Additions are found by tracing the forward of the module they are in (torch.fx): x + f(x), two ways from one input (a projected shortcut), and the
cross x + x_0 f(x) of DCN. A module whose forward cannot be traced, or that has other methods that do the same work (a
decoder's `step`), gets its stream raised at the entrance instead, where the stream is its first input; otherwise it is left.

A model whose parameters are 16-bit themselves is refused: without autocast its linears could not read a float32 stream.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from loka.mods.editor import Editor
from loka.mods.graph import compile_forward, is_addition, trace
from loka.records.mods import ModClass
from loka.units.flow import Flow


def add_wide(stream: Tensor, branch: Tensor) -> Tensor:
    """The sum in float32 (float64 stays)."""
    wide = torch.promote_types(stream.dtype, torch.float32)
    return stream.to(wide) + branch.to(wide)


def add_product_wide(stream: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """stream + first * second in float32 (float64 stays)."""
    wide = torch.promote_types(stream.dtype, torch.float32)
    return torch.addcmul(stream.to(wide), first.to(wide), second.to(wide))


class WideEntrance(nn.Module):
    """Mixed in front of a module's own class: its first input in float32, so that what is added to it is promoted."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own."""
        first, *rest = args
        return super().forward(first.to(torch.promote_types(first.dtype, torch.float32)), *rest, **kwargs)


@dataclass(frozen=True)
class ProtectResidual:
    """No options."""

    name: ClassVar[str] = "protect_residual"
    effect: ClassVar[ModClass] = "rounding"

    def rewrite(self, editor: Editor) -> None:
        """Every module whose own forward adds a branch to a stream."""
        narrow = {p.dtype for p in editor.model.parameters()} & {torch.float16, torch.bfloat16}
        if narrow:
            editor.leave("", f"its parameters are {narrow.pop()}: keep them in float32 and use autocast")
            return
        for name, module in editor.modules():
            if next(module.children(), None) is None or type(module).forward in _FORWARDS:
                continue
            found = trace(module)
            if isinstance(found, str):
                self._raise_entrance(editor, name, module, found)
            else:
                self._rewrite_additions(editor, name, module, found)

    @staticmethod
    def _rewrite_additions(editor: Editor, name: str, module: nn.Module, graph: fx.Graph) -> None:
        additions = [node for node in graph.nodes if _adds_to_stream(node)]
        for node in additions:
            function = add_product_wide if node.target is torch.addcmul else add_wide
            with graph.inserting_after(node):
                wide = graph.call_function(function, node.args)
            node.replace_all_uses_with(wide)
            graph.erase_node(node)
        if additions:
            what = f"{len(additions)} residual addition{'s' * (len(additions) > 1)} in float32"
            editor.reclass(name, compile_forward(module, graph), what, "rounding")

    @staticmethod
    def _raise_entrance(editor: Editor, name: str, module: nn.Module, why: str) -> None:
        """Only where the example showed a residual directly in this module."""
        flow = editor.flow
        if not isinstance(flow, Flow):
            return
        additions = [c for c in flow.calls if c.site is None and c.op in ("add", "add_") and c.inside == name]
        residual = [c for c in additions if len(c.inputs) == 2 and _related(flow, *c.inputs)]
        if not residual:
            return
        if not name or not isinstance(module, nn.Module) or not _streams_first(flow, name, residual):
            editor.leave(name, f"{why}; and its stream is not its first input")
            return
        new = type(type(module).__name__, (WideEntrance, type(module)), {"__module__": type(module).__module__})
        editor.reclass(name, new, "its stream is raised to float32 where it enters", "rounding")


_FORWARDS = (nn.Sequential.forward, nn.ModuleList.forward, nn.Module.forward)


def _adds_to_stream(node: fx.Node) -> bool:
    """Whether a node adds two values that come from the same input."""
    if node.target is torch.addcmul and len(node.args) == 3 and not node.kwargs:
        sides = [a for a in node.args if isinstance(a, fx.Node)]
        return len(sides) == 3 and bool(_inputs_of(sides[0]) & (_inputs_of(sides[1]) | _inputs_of(sides[2])))
    if not is_addition(node):
        return False
    first, second = (_inputs_of(a) for a in node.args[:2] if isinstance(a, fx.Node))
    return bool(first & second)


def _inputs_of(node: fx.Node) -> set[fx.Node]:
    seen, waiting = set(), [node]
    while waiting:
        at = waiting.pop()
        seen.add(at)
        waiting.extend(n for n in at.all_input_nodes if n not in seen)
    return {n for n in seen if n.op == "placeholder"}


def _related(flow: Flow, first: int, second: int) -> bool:
    return first in flow.ancestors(second) or second in flow.ancestors(first)


def _streams_first(flow: Flow, name: str, residual: list[Any]) -> bool:
    """Whether the first residual of the module adds to something made outside of it."""
    inside = {v for c in flow.calls if c.inside == name or (c.inside or "").startswith(f"{name}.") for v in c.outputs}
    return any(value not in inside for value in residual[0].inputs)
