"""stored_sums: write the sum or concatenation in front of a norm to memory once, in compiled inference.

    x = x + attention(x);  x = x + mlp(norm(x));  ...

The residual stream is read by a norm and by the next sum. A compiler that fuses operations writes neither sum to memory:
every later kernel adds up all branches so far again, and a norm behind a concatenation reads its parts in an unfavorable
order. On an H200 the norms of a plain Wukong take 92 us a layer instead of 160, and those of a two-block residual MLP
39 instead of 55. In training such sums are saved for backward anyway, so there nothing changes.

A hook on the norm asks for its input as a view with the same strides, for which the compiler must store the input. The
values do not change.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from loka.mods.editor import Editor
from loka.mods.norms import find_norms
from loka.nn import BlockNorm
from loka.records.mods import ModClass
from loka.units.flow import Flow

_MADE_BY = {"add", "add_", "sub", "sub_", "cat", "stack"}


class StoreInput:
    """A forward-pre hook that lets a compiler store the module's input, in inference."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with a view of the first one; None, which changes nothing, in eager mode and training."""
        if not torch.compiler.is_compiling() or torch.is_grad_enabled() or not args:
            return None
        x = args[0]
        if not isinstance(x, Tensor) or not x.is_contiguous():
            return None
        return (x.as_strided(x.size(), x.stride()), *args[1:]), kwargs


@dataclass(frozen=True)
class StoreSums:
    """Store sums and concatenations in front of norms, in compiled inference. No options.

    Example:
        >>> loka.mods.apply(model, ["stored_sums"], example=batch)
    """

    name: ClassVar[str] = "stored_sums"
    effect: ClassVar[ModClass] = "exact"

    def rewrite(self, editor: Editor) -> None:
        """Hook the norms whose input is a sum or a concatenation in every call."""
        flow = editor.flow
        if not isinstance(flow, Flow):
            editor.leave("", f"what its norms read is not known: {flow.reason}")
            return
        for name, _ in editor.modules((*find_norms(editor.model), BlockNorm)):
            makers = [flow.maker(call.inputs[0]) for call in flow.calls_of(name) if call.inputs]
            if makers and all(made is not None and made.site is None and made.op in _MADE_BY for made in makers):
                editor.hook(name, StoreInput(), before=True)
                editor.change(name, "its input is written to memory once, in compiled inference", "exact")
