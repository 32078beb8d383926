"""feature_layout: multiply linears over the n features of x [B, n, d] from the left, without a transposed copy of x.

    lin(x.transpose(1, 2)).transpose(1, 2)  =  W x (+ b)

Compression layers and shortcuts of Wukong, DHEN and similar models are written with transposes in plain PyTorch. These
look free but are not: the GEMM copies the transposed x, autograd saves the copy, and every later sum and norm reads
memory with a stride. On a plain Wukong (6 layers, 8192 rows, H200) the kernels that do this take a third of the bf16
step.

The linear gets a forward that takes and returns transposed views, so the model's own transposes cancel out and a
compiler sees none. Parameters, names and the user's forward do not change. Products are summed in another order:
rounding. A linear whose input or output is used in any other way is left unchanged.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from loka.lowp.linear import refuse
from loka.mods.editor import Editor
from loka.mods.sharing import SHARED, SharedFeatures
from loka.nn.mix import compute_dtype, mix_features
from loka.records.mods import ModClass
from loka.units.example import call_model
from loka.units.flow import Call, Flow
from loka.units.undisturbed import undisturbed

_TRANSPOSES = ("transpose", "permute", "t", "mT")


class OverFeatures(nn.Module):
    """Mixin for an nn.Linear: takes and returns transposed views, and multiplies in the original layout."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """[B, d, n] -> [B, d, m], both views of contiguous tensors [B, n, d] and [B, m, d]."""
        if input.dim() != 3:  # unlike on the example
            return super().forward(input)  # type: ignore[no-any-return]
        shared: SharedFeatures | None = self.__dict__.get(SHARED)
        y = None if shared is None else shared.find_mixture(self, input)
        if y is None:
            x = input.transpose(-1, -2)
            y = mix_features(self.weight, x.to(compute_dtype(x)))
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)[:, None]
        return y.transpose(-1, -2)

    forward.loka_refused = (  # type: ignore[attr-defined]
        "rewritten by the mod feature_layout: it multiplies over features where they lie, in 16 bits"
    )


@dataclass(frozen=True)
class FeatureLayout:
    """Multiply linears over features from the left. No options.

    Example:
        >>> loka.mods.apply(model, [FeatureLayout()], example=batch)
    """

    name: ClassVar[str] = "feature_layout"
    effect: ClassVar[ModClass] = "rounding"

    def rewrite(self, editor: Editor) -> None:
        """Rewrite linears whose input was just transposed and whose output is transposed next."""
        flow = editor.flow
        if not isinstance(flow, Flow):
            editor.leave("", f"which operations surround its linears is not known: {flow.reason}")
            return
        makers = {value: call for call in flow.calls for value in call.outputs}
        found = []
        for name, module in editor.modules(nn.Linear):
            calls = flow.calls_of(name)
            if calls and all(_is_transposed(flow, call, makers) for call in calls):
                found.append((name, module))
        overwritten = _find_overwritten(editor, found)
        for name, module in found:
            if name in overwritten:  # torch saves its transposed copy for backward, this mod the features themselves
                editor.leave(name, "the features it multiplies are written to in place afterwards")
                continue
            if why := refuse(module):
                editor.leave(name, why)
                continue
            editor.mix(name, OverFeatures)
            editor.change(name, "multiplies over features where they lie, without a transposed copy", "rounding")


def _find_overwritten(editor: Editor, linears: Sequence[tuple[str, nn.Module]]) -> set[str]:
    """Return the linears whose input is written to by the end of the example's run."""
    if editor.example is None or not linears:
        return set()
    seen: list[tuple[str, Tensor, int]] = []

    def note(name: str, x: Any) -> None:
        if isinstance(x, Tensor) and not x.is_inference():  # inference tensors have no version counter
            seen.append((name, x, x._version))

    with undisturbed(editor.model), torch.no_grad(), ExitStack() as hooks:
        for name, linear in linears:
            handle = linear.register_forward_pre_hook(lambda _, args, name=name: note(name, args[0] if args else None))
            hooks.callback(handle.remove)
        call_model(editor.model, editor.example)
    return {name for name, x, version in seen if x._version != version}


def _is_transposed(flow: Flow, call: Call, makers: dict[int, Call]) -> bool:
    """Return True if a linear's 3-D input is a transpose, and every reader of its output transposes it back."""
    value, result = call.inputs[0], call.outputs[0]
    made = makers.get(value)
    if len(flow.shapes[value]) != 3 or made is None or not _swaps(flow, made, value) or result in flow.results:
        return False
    readers = flow.readers(result)
    return bool(readers) and all(_swaps(flow, reader, reader.outputs[0]) for reader in readers if reader.outputs)


def _swaps(flow: Flow, call: Call, made: int) -> bool:
    if call.site is not None or call.op not in _TRANSPOSES or not call.inputs:
        return False
    before, after = flow.shapes[call.inputs[0]], flow.shapes[made]
    return len(before) == 3 and after == (before[0], before[2], before[1])
