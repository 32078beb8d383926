"""normed_inputs: normalize and quantize what an FP8 chain reads in one kernel, in compiled serving.

    linear(norm(x)),  mlp(activation(norm(x)))        ->        norm_quantize(x), then the GEMM

A chain quantizes its input, and the compiler fuses that with the norm before it. Over rows of more than 1024 columns it
reads x twice, with a running mean that takes a division per element: layer norm and quantization of 8192 x 1536 take 44
us on an H200 (19 with max-autotune), of 8192 x 3072 80 (33). Our kernel keeps a row in registers and takes 14 and 25.

Applies to norms over 1025 to 16384 columns that only linears read. The linears are marked; a chain that begins with one
asks how its input was made (`loka.lowp.origins`). Without a chain, in training and in eager mode nothing changes.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from loka.kernels.norm_quantize.triton import WIDEST
from loka.lowp.origins import WIDE, Normed, Origins
from loka.mods.editor import Editor
from loka.mods.origins import find_origins, tell_origins
from loka.records.mods import ModClass
from loka.units.flow import Flow


@dataclass(frozen=True)
class NormInputs:
    """Let chains normalize and quantize their inputs in one kernel, in compiled serving. No options.

    Example:
        >>> loka.mods.apply(model, ["normed_inputs"], example=batch)
    """

    name: ClassVar[str] = "normed_inputs"
    effect: ClassVar[ModClass] = "rounding"

    def rewrite(self, editor: Editor) -> None:
        """Mark the linears that read a wide norm."""
        flow = editor.flow
        if not isinstance(flow, Flow):
            editor.leave("", f"what its norms are read by is not known: {flow.reason}")
            return
        linears = [name for name, linear in editor.modules(nn.Linear) if WIDE < linear.in_features <= WIDEST]  # type: ignore[operator]
        seen: dict[str, Origins] = {}
        for name, (origin, holder) in find_origins(editor, linears).items():
            values = [call.inputs[0] for call in flow.calls_of(name)]
            alone = all(reader.linear for value in values for reader in flow.readers(value))
            if isinstance(origin, Normed) and values and alone:
                tell_origins(editor, name, holder, seen)
                editor.change(name, f"a chain that begins here runs the {origin.norm} norm before it, in compiled serving", "rounding")  # fmt: skip
