"""feature_products: a matrix over the n features of x [B, n, d], multiplied by a function, multiplies from the left where x lies.

    torch.einsum("bnd,nk->bdk", x, P)        x.transpose(1, 2) @ P        ->        (P^T x)^T

That is how the projections of factorisation machines are written in plain PyTorch. Both spellings make torch copy x transposed before the GEMM (8192 x 128 x 128 numbers in every layer of a
Wukong), and autograd keeps the copy. `feature_layout` does the same for linears; here the matrix is a Parameter of the user's module and its forward calls a function.

The forward stays the user's. While it runs, a torch function mode looks at transposes, einsum and matrix products, and computes those of this form from the left. Sums are in another order: rounding.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loka.mods.editor import Editor
from loka.mods.fused_dots import is_transpose, writes
from loka.nn.mix import compute_dtype, mix_features
from loka.nn.wrapping import is_scripted
from loka.records.mods import ModClass
from loka.units.example import call_model
from loka.units.undisturbed import set_mode, undisturbed

_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class _FromTheLeft(TorchFunctionMode):
    """Computes products over features from the left. A write in place forgets what was turned."""

    def __init__(self) -> None:
        super().__init__()
        self.turned: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.einsum and not kwargs:
            found = self._einsum(args)
            if found is not None:
                return found
        elif func in _PRODUCTS and len(args) == 2 and not kwargs and self.turned:
            for turned, x in self.turned:
                if args[0] is turned and _fits(x, args[1], args[1].shape[:1] if args[1].dim() else ()):
                    return self.multiply(args[1].mT, x).mT
        out = func(*args, **kwargs)
        if writes(func, kwargs):
            if self.turned:
                self.turned.clear()
        elif is_transpose(func, args):
            self.turned.append((out, args[0]))
        return out

    def _einsum(self, args: Any) -> Tensor | None:
        operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        if len(operands) != 2 or not isinstance(args[0], str):
            return None
        read = _read(args[0])
        if read is None:
            return None
        first, turned_matrix, turned_result = read
        x, matrix = operands[first], operands[1 - first]
        over = matrix.shape[-1:] if turned_matrix else matrix.shape[:1]
        if not _fits(x, matrix, over):
            return None
        y = self.multiply(matrix if turned_matrix else matrix.mT, x)
        return y.mT if turned_result else y

    def multiply(self, weight: Tensor, x: Tensor) -> Tensor:
        """W x for W [k, n] and x [B, n, d]."""
        x = x.to(compute_dtype(x))
        with torch.autocast(x.device.type, enabled=False):
            return mix_features(weight, x)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _read(equation: str) -> tuple[int, bool, bool] | None:
    """Which operand is x, whether the matrix is [k, n], whether the result is [B, d, k]; None where it is another contraction."""
    sides = equation.replace(" ", "").split("->")
    inputs = sides[0].split(",")
    if len(sides) != 2 or len(inputs) != 2 or sorted(map(len, inputs)) != [2, 3]:
        return None
    first = 0 if len(inputs[0]) == 3 else 1
    x, matrix, out = inputs[first], inputs[1 - first], sides[1]
    if len(set(x)) != 3 or len(set(matrix)) != 2 or len(set(x) | set(matrix)) != 4 or x[1] not in matrix:
        return None
    new = matrix.replace(x[1], "")
    if out not in (x[0] + x[2] + new, x[0] + new + x[2]):
        return None
    return first, matrix[1] == x[1], out == x[0] + x[2] + new


def _fits(x: Tensor, matrix: Tensor, over: Any) -> bool:
    """Whether it is a batch of feature vectors and one matrix over the features."""
    return x.dim() == 3 and matrix.dim() == 2 and tuple(over) == (x.shape[1],) and x.is_floating_point() and matrix.is_floating_point()  # fmt: skip


class OverFeaturesCalls(nn.Module):
    """Mixed in front of the module whose forward has the products."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, looked at."""
        with _FromTheLeft():
            return super().forward(*args, **kwargs)


class _Search(_FromTheLeft):
    """Notes in which module a product was found, innermost."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = []
        self.found: list[str] = []

    def multiply(self, weight: Tensor, x: Tensor) -> Tensor:
        self.found.append(self._stack[-1] if self._stack else "")
        return super().multiply(weight, x)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for module in (m for m in model.modules() if not is_scripted(m)):
                stack.callback(module.register_forward_pre_hook(self._enter).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            with self:
                yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._names[id(module)])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()


@dataclass(frozen=True)
class FeatureProducts:
    """Multiply matrices over features from the left. It has no options."""

    name: ClassVar[str] = "feature_products"
    effect: ClassVar[ModClass] = "rounding"

    def rewrite(self, editor: Editor) -> None:
        """Modules in whose forward a matrix multiplies over the features of a batch."""
        if editor.example is None:
            editor.leave("", "what its forwards multiply is not known; pass example=")
            return
        search = _Search(editor.model)
        try:
            with undisturbed(editor.model), search.watching(editor.model), torch.no_grad():
                set_mode(editor.model, False)
                call_model(editor.model, editor.example)
        except Exception as error:  # whatever a user's forward raises
            editor.leave("", f"the model failed on the example: {type(error).__name__}: {error}")
            return
        places = dict.fromkeys(search.found)
        for name, module in list(editor.modules()):
            if name in places:
                editor.mix(name, OverFeaturesCalls)
                editor.change(name, f"{type(module).__name__}: multiplies over features where they lie", "rounding")
