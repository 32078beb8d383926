"""fused_dots: pairwise products of feature vectors, written with torch, run in one kernel.

    torch.bmm(x, x.transpose(1, 2))[:, i, j]        ->        loka.kernels.dots(x, i, j)

The first writes n x n products of every example (27 x 27, which no fast GEMM is aligned for) and then gathers half of them. Recognised by what the example shows, a batch product of a tensor with
its own transpose that is read by an index alone, in whichever module it stands and whatever it is called.

The forward stays the user's. While it runs, a torch function mode looks at three operations: a transpose of the last two dimensions, a batch product of a tensor with its transpose, and an index of
that product by two index tensors; the third returns the kernel's result. Compiled, the product that nobody reads is never computed. Sums are in another order: rounding.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loka.mods.editor import Editor
from loka.nn.mix import multiply_pairs
from loka.records.mods import ModClass
from loka.units.flow import Call, Flow

_TURNS = (torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes)
_MATRIX_TRANSPOSE = vars(torch._C.TensorBase)["mT"].__get__  # what `x.mT` shows as
_PRODUCTS = (torch.bmm, Tensor.bmm, torch.matmul, Tensor.matmul, Tensor.__matmul__)


class _Looking(TorchFunctionMode):
    """Returns the pairwise products where their index is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.turned: list[tuple[Tensor, Tensor]] = []
        self.products: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and self.products:
            found = self._asked(args[0], args[1])
            if found is not None:
                return found
        out = func(*args, **(kwargs or {}))
        if (func in _TURNS and len(args) == 3 and args[0].dim() == 3 and {args[1] % 3, args[2] % 3} == {1, 2}) or (
            func == _MATRIX_TRANSPOSE and args[0].dim() == 3
        ):
            self.turned.append((out, args[0]))
        elif func in _PRODUCTS and len(args) == 2:
            for turned, x in self.turned:
                if args[1] is turned and args[0] is x:
                    self.products.append((out, x))
        return out

    def _asked(self, value: Any, index: Any) -> Tensor | None:
        if not isinstance(index, tuple) or len(index) != 3 or index[0] != slice(None):
            return None
        first, second = index[1], index[2]
        if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first.dim() != 1 or second.dim() != 1:
            return None
        for product, x in self.products:
            if value is product:
                return multiply_pairs(x, first, second)
        return None


class FusedDots(nn.Module):
    """Mixed in front of the module whose forward has the products."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, looked at."""
        with _Looking():
            return super().forward(*args, **kwargs)


@dataclass(frozen=True)
class FuseDots:
    """Run pairwise products in one kernel. It has no options."""

    name: ClassVar[str] = "fused_dots"
    effect: ClassVar[ModClass] = "rounding"

    def rewrite(self, editor: Editor) -> None:
        """Modules in whose forward a tensor is multiplied by its own transpose and then indexed."""
        flow = editor.flow
        if not isinstance(flow, Flow):
            editor.leave("", f"what it multiplies is not known: {flow.reason}")
            return
        makers = {value: call for call in flow.calls for value in call.outputs}
        places = {call.inside for call in flow.calls if _is_gram(flow, call, makers)}
        for name, module in list(editor.modules()):
            if name in places:
                editor.mix(name, FusedDots)
                editor.change(name, f"{type(module).__name__}: pairwise products in one kernel", "rounding")


def _is_gram(flow: Flow, call: Call, makers: dict[int, Call]) -> bool:
    """A product of x [B, n, d] with its transpose that is read by one index and by nothing else."""
    if call.site is not None or call.op not in ("bmm", "matmul") or len(call.inputs) != 2:
        return False
    x, turned = call.inputs
    turn = makers.get(turned)
    if turn is None or turn.op not in ("transpose", "permute") or turn.inputs[:1] != (x,):
        return False
    readers = flow.readers(call.outputs[0])
    return len(readers) == 1 and readers[0].op == "index" and call.outputs[0] not in flow.results
