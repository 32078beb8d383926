"""hard_swish: replace smooth activations and gates by their hard (piecewise) forms.

    SiLU, Swish, GELU    ->  x relu6(x + 3) / 6
    sigmoid gates        ->    relu6(x + 3) / 6
    SwishNorm, x * sigmoid(norm(x)), has a Sigmoid inside and becomes x * hard_sigmoid(norm(x)) by the second line

Why: without an exponential it fits into the epilogue of a GEMM, and beyond |x| = 3 an outlier is passed through or cut
off, never amplified.

A sigmoid whose output is the model's result is a probability, not a gate, and is kept. Without an example the two
cannot be told apart, so nn.Sigmoid is left unchanged then; `loka.nn.Sigmoid` is a gate by definition. Functions called
inside a forward (F.silu, torch.sigmoid) are not modules and cannot be swapped; those that the example shows are listed
as left.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from loka.mods.editor import Editor
from loka.nn import HardSigmoid, HardSwish, Sigmoid
from loka.nn.replacing import runs_as
from loka.records.mods import ModClass
from loka.units.flow import Flow
from loka.units.recording import Unknown

_SWISHES = ("Swish", "SiLU", "GELU", "MemoryEfficientSwish", "QuickGELU", "NewGELUActivation", "GELUActivation")
_FUNCTIONS = ("silu", "silu_", "gelu", "gelu_", "sigmoid", "sigmoid_")


@dataclass(frozen=True)
class UseHardSwish:
    """Replace smooth activations (SiLU, GELU) by hard swish, and sigmoid gates by hard sigmoid.

    Args:
        gates: whether to replace sigmoid gates too.

    Example:
        >>> loka.mods.apply(model, [UseHardSwish(gates=False)])
    """

    gates: bool = True
    name: ClassVar[str] = "hard_swish"
    effect: ClassVar[ModClass] = "architecture"

    def rewrite(self, editor: Editor) -> None:
        """Replace activations, recognized by class or class name, and sigmoids that are known to be gates."""
        for name, module in editor.modules():
            kind = type(module).__name__
            if next(module.children(), None) is not None:
                continue
            if runs_as(module, nn.SiLU, nn.GELU) or kind in _SWISHES:
                self._swap(editor, name, HardSwish())
            elif isinstance(module, (nn.SiLU, nn.GELU)):
                editor.leave(name, f"a {kind} with a forward of its own; what it computes is not known")
            elif self.gates and runs_as(module, nn.Sigmoid, Sigmoid):
                if why := self._refuse_gate(editor, name, module):
                    editor.leave(name, why)
                else:
                    self._swap(editor, name, HardSigmoid())
        self._list_functions(editor)

    @staticmethod
    def _swap(editor: Editor, name: str, new: nn.Module) -> None:
        if not name:
            editor.leave(name, "the model is itself an activation and cannot be swapped in place")
            return
        old = type(editor.model.get_submodule(name)).__name__
        editor.swap(name, new, f"{old} -> {type(new).__name__}", "architecture")

    @staticmethod
    def _refuse_gate(editor: Editor, name: str, module: nn.Module) -> str | None:
        flow = editor.flow
        if isinstance(flow, Unknown):
            known = isinstance(module, Sigmoid)
            return None if known else f"whether it is a gate or the model's output is not known: {flow.reason}"
        outputs = {value for call in flow.calls_of(name) for value in call.outputs}
        return "it makes the model's result: a probability, not a gate" if outputs & flow.results else None

    @staticmethod
    def _list_functions(editor: Editor) -> None:
        if not isinstance(editor.flow, Flow):
            return
        found = {(call.inside, call.op) for call in editor.flow.calls if call.site is None and call.op in _FUNCTIONS}
        for call in editor.flow.calls:
            found |= {(call.site, op) for op in call.inner if call.site is not None and op in _FUNCTIONS}
        for site, function in sorted(found):
            module = editor.model.get_submodule(site)
            if not isinstance(module, (nn.SiLU, nn.GELU, nn.Sigmoid, Sigmoid, HardSwish, HardSigmoid)):
                editor.leave(
                    site,
                    f"{type(module).__name__} calls {function} as a function, which cannot be swapped; hint: use a module",
                )
