"""no_bias: drop the biases of linears and norms, keep those of the prediction layers.

    y = W x + b   ->   y = W x

Why: biases that diverge in training are one of the hazards of low precision; a bias is an extra term in a fused
epilogue; and a norm behind it undoes most of it anyway. A bias that feeds directly into a linear which keeps its own
bias, W2 (W1 x + b1) + b2, is folded exactly: b2 <- b2 + W2 b1. Otherwise, dropping a non-zero bias changes the
function.

Left unchanged: biases of convolutions, recurrent layers and embeddings; nn.MultiheadAttention, which reads the tensors
of its projections itself; norms with tracked statistics, whose bias belongs to their running mean.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from loka.mods.editor import Editor
from loka.mods.journal import Fold
from loka.mods.norms import find_norms, refuse_norm
from loka.records.mods import ModClass


@dataclass(frozen=True)
class NoBias:
    """Drop the biases of linears and norms. Prediction layers keep theirs.

    Args:
        fold: fold a bias into the next linear's bias where that is exact, instead of dropping it.

    Example:
        >>> loka.mods.apply(model, [NoBias(fold=False)])
    """

    fold: bool = True
    name: ClassVar[str] = "no_bias"
    effect: ClassVar[ModClass] = "architecture"

    def rewrite(self, editor: Editor) -> None:
        """Remove the biases in execution order, so that a folded bias can be folded further."""
        inside_attention = {
            f"{name}.out_proj" for name, m in editor.model.named_modules() if isinstance(m, nn.MultiheadAttention)
        }
        sites: list[str] = []
        for name, module in editor.modules(nn.Linear, *find_norms(editor.model)):
            if not isinstance(getattr(module, "bias", None), Tensor):
                continue
            if name in inside_attention:
                editor.leave(name, "nn.MultiheadAttention reads its bias itself")
            elif name in editor.prediction:
                editor.leave(name, "a prediction layer keeps its bias")
            elif not isinstance(module, nn.Linear) and (why := refuse_norm(module)):
                editor.leave(name, why)
            else:
                sites.append(name)
        order = {name: editor.calls(name)[0].index for name in sites if editor.calls(name)}
        for name in sorted(sites, key=lambda name: order.get(name, -1)):
            self._remove(editor, name, set(sites))

    def _remove(self, editor: Editor, name: str, dropped: set[str]) -> None:
        bias = editor.model.get_submodule(name).bias
        assert isinstance(bias, nn.Parameter)
        if not bias.detach().any():
            editor.drop(name, "bias")
            editor.change(name, "a bias of zeros dropped", "exact")
            return
        sinks = editor.sinks(name, shift=True) if self.fold else "folding is off"
        kept = isinstance(sinks, list) and all(map(editor.has_bias, sinks))
        if not isinstance(sinks, list) or not kept:
            editor.drop(name, "bias")
            editor.change(name, "bias dropped", "architecture")
            return
        for sink in sinks:
            editor.fold(Fold(f"{name}.bias", sink.site, "shift", sink.repeat))
        editor.drop(name, "bias")
        into = ", ".join(sink.site for sink in sinks)
        final = [sink.site for sink in sinks if sink.site not in dropped]
        branch = editor.find_branch(name, *(sink.site for sink in sinks))
        effect: ModClass = "rounding" if len(final) == len(sinks) and branch is None else "architecture"
        only = f"; the same function only on the path that the example took ({branch})" if branch else ""
        editor.change(name, f"bias folded into that of {into}{only}", effect)
