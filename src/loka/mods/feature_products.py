"""feature_products: a matrix over the n features of x [B, n, d], multiplied by a function, multiplies from the left where x lies.

    torch.einsum("bnd,nk->bdk", x, P)        x.transpose(1, 2) @ P        ->        (P^T x)^T

That is how the projections of factorisation machines are written in plain PyTorch. Both spellings make torch copy x transposed before the GEMM (8192 x 128 x 128 numbers in every layer of a
Wukong), and autograd keeps the copy. Where x then meets these mixtures of itself, `bmm(x, x^T P)`, compiled code runs both products in one kernel (`loka.kernels.mixed_dots`). `feature_layout` does the same for linears; here the matrix is a Parameter of the user's module and its forward calls a function.

The forward stays the user's. While it runs, a torch function mode looks at transposes, einsum and matrix products, and computes those of this form from the left. Sums are in another order: rounding.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loka.mods.calling import Note, find_callers
from loka.mods.editor import Editor
from loka.mods.fused_dots import is_transpose
from loka.nn.mix import compute_dtype, mix_features, multiply_mixtures, without_autocast
from loka.nn.writing import writes
from loka.records.mods import ModClass

_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)


class _Mixed(NamedTuple):
    """Mixtures W x that a forward has made, and how."""

    made: Tensor  # as they were returned
    weight: Tensor
    x: Tensor
    turned: bool  # whether transposed
    grad: bool  # whether with gradients
    dtype: torch.dtype


class _FromTheLeft(TorchFunctionMode):
    """Computes products over features from the left, and in compiled code products of x with mixtures of itself in one kernel. A write in place forgets what was seen."""

    def __init__(self, note: Note | None = None, *, fuses: bool = False) -> None:
        super().__init__()
        self.note = note  # called where one is found
        self.fuses = fuses
        self.turned: list[tuple[Tensor, Tensor]] = []  # a transpose, and of what
        self.mixed: list[_Mixed] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = None
        if func is torch.einsum and not kwargs:
            found = self._einsum(args)
        elif func in _PRODUCTS and len(args) == 2 and not kwargs:
            found = self._product(args[0], args[1])
        if found is not None:
            return found
        out = func(*args, **kwargs)
        if writes(func, args, kwargs):
            if self.turned:  # an empty list is left alone: nothing may be written from inside of an autograd function that is compiled
                self.turned.clear()
            if self.mixed:
                self.mixed.clear()
        elif is_transpose(func, args):
            self.turned.append((out, args[0]))
        return out

    def _einsum(self, args: Any) -> Tensor | None:
        operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        if len(operands) != 2 or not isinstance(args[0], str):
            return None
        turned = _read_product(args[0])
        if turned is not None:
            return self._find_mixed(operands[0], operands[1], turned)
        read = _read(args[0])
        if read is None:
            return None
        first, turned_matrix, turned_result = read
        x, matrix = operands[first], operands[1 - first]
        over = matrix.shape[-1:] if turned_matrix else matrix.shape[:1]
        if not _fits(x, matrix, over):
            return None
        return self._mix(matrix if turned_matrix else matrix.mT, x, turned_result)

    def _product(self, a: Any, b: Any) -> Tensor | None:
        for turned, x in self.turned:
            if a is turned and _fits(x, b, b.shape[:1] if b.dim() else ()):
                return self._mix(b.mT, x, True)
        found = self._find_mixed(a, b, True)
        if found is not None:
            return found
        for turned, source in self.turned:
            if b is turned:
                return self._find_mixed(a, source, False)
        return None

    def _mix(self, weight: Tensor, x: Tensor, turned: bool) -> Tensor:
        """W x for W [k, n] and x [B, n, d]; `turned`: transposed."""
        if self.note is not None:
            self.note("")
        wide = x.to(compute_dtype(x))
        with without_autocast(x):
            y = mix_features(weight, wide)
        y = y.mT if turned else y
        if self.fuses and torch.compiler.is_compiling():
            # not in eager mode: the mixtures are there already, and one product is cheaper than two
            self.mixed.append(_Mixed(y, weight, x, turned, torch.is_grad_enabled(), wide.dtype))
        return y

    def _find_mixed(self, x: Tensor, made: Tensor, turned: bool) -> Tensor | None:
        """The products of x with mixtures of itself, where those are what it is multiplied by; what made them is then read by nobody."""
        for mixed in self.mixed:
            if made is mixed.made and x is mixed.x and turned == mixed.turned and (mixed.grad, mixed.dtype) == (torch.is_grad_enabled(), compute_dtype(x)):  # fmt: skip
                return multiply_mixtures(x, mixed.weight)
        return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _read_product(equation: str) -> bool | None:
    """Of "bnd,bdk->bnk" True, of "bnd,bkd->bnk" False; None for another contraction."""
    sides = equation.replace(" ", "").split("->")
    inputs = sides[0].split(",")
    if len(sides) != 2 or [len(part) for part in (*inputs, sides[1])] != [3, 3, 3] or any(len(set(part)) < 3 for part in (*inputs, sides[1])):  # fmt: skip
        return None
    other, out = inputs[1], sides[1]
    b, n, d = inputs[0][0], inputs[0][1], inputs[0][2]
    k = out[2]
    if k in (b, n, d) or out != b + n + k or other not in (b + d + k, b + k + d):
        return None
    return other == b + d + k


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


class _Unwritten(_FromTheLeft):
    """Finds out in eager mode, on the example, whether anything is written to between the making of mixtures and their product with x: in compiled code a mode does not see every write."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self.told = note
        self.versions: list[tuple[_Mixed, tuple[int, ...] | None]] = []

    def _mix(self, weight: Tensor, x: Tensor, turned: bool) -> Tensor:
        y = super()._mix(weight, x, turned)
        mixed = _Mixed(y, weight, x, turned, torch.is_grad_enabled(), y.dtype)
        self.versions.append((mixed, _versions(mixed)))
        return y

    def _find_mixed(self, x: Tensor, made: Tensor, turned: bool) -> Tensor | None:
        for mixed, before in self.versions:
            if made is mixed.made and x is mixed.x:
                self.told("" if before is not None and before == _versions(mixed) else "written to")
        return None


def _versions(mixed: _Mixed) -> tuple[int, ...] | None:
    """How often each was written to; None where torch does not count."""
    tensors = mixed.made, mixed.weight, mixed.x
    return None if any(t.is_inference() for t in tensors) else tuple(t._version for t in tensors)


class OverFeaturesCalls(nn.Module):
    """Mixed in front of the module whose forward has the products."""

    loka_fuses: bool  # whether x may meet mixtures of itself in one kernel

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, looked at."""
        with _FromTheLeft(fuses=self.loka_fuses):
            return super().forward(*args, **kwargs)


@dataclass(frozen=True)
class FeatureProducts:
    """Multiply matrices over features from the left. It has no options."""

    name: ClassVar[str] = "feature_products"
    effect: ClassVar[ModClass] = "rounding"

    def rewrite(self, editor: Editor) -> None:
        """Modules in whose forward a matrix multiplies over the features of a batch."""
        found = find_callers(editor, _FromTheLeft)
        written: set[str] = set()
        met = {name for name, _ in find_callers(editor, _Unwritten, left=written)} if found else set()
        for name, module in found:
            editor.mix(name, OverFeaturesCalls, loka_fuses=name in met and name not in written)
            editor.change(name, f"{type(module).__name__}: multiplies over features where they lie", "rounding")
