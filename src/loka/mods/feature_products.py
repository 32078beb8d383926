"""feature_products: multiply matrices over the n features of x [B, n, d] (einsum, @) from the left, without copying x.

    torch.einsum("bnd,nk->bdk", x, P)        x.transpose(1, 2) @ P        ->        (P^T x)^T

This is how projections of factorization machines are written in plain PyTorch. Both spellings make torch copy x
transposed before the GEMM (8192 x 128 x 128 numbers in every layer of a Wukong), and autograd saves the copy. If x is
then multiplied by these mixtures of its own features, `bmm(x, x^T P)`, compiled code runs both products in one kernel
(`loka.kernels.mixed_dots`). `feature_layout` does the same for linears; here the matrix is a Parameter of the user's
module.

The user's forward still runs. A torch function mode intercepts transposes, einsum and matrix products inside it, and
computes those of this form from the left. Sums are in another order: rounding.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loka.mods.calling import Note, find_callers, find_saving_hooks, is_checkpointed
from loka.mods.editor import Editor
from loka.mods.fused_dots import forget, is_transpose
from loka.mods.sharing import SHARED, SharedFeatures, Transpose
from loka.nn.mix import compute_dtype, mix_features, multiply_mixtures, without_autocast
from loka.nn.sharing import is_valid, take_stamp
from loka.nn.writing import writes
from loka.records.mods import ModClass

_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)


class _Mixture(NamedTuple):
    """A mixture W x of features that a forward has computed."""

    made: Tensor  # the returned tensor
    matrix: Tensor  # W, or W^T if `turned`, as the forward has it
    turned: bool
    weight: Tensor
    x: Tensor
    transposed: bool  # whether `made` is (W x)^T
    grad: bool  # whether gradients were enabled
    dtype: torch.dtype
    stamp: str


class _MultiplyFromLeft(TorchFunctionMode):
    """Computes products over features from the left.

    In compiled code with `fuses`, products of x with mixtures of itself run in one kernel. An in-place write clears all
    recorded tensors, because they may no longer hold what was computed.
    """

    def __init__(self, note: Note | None = None, *, fuses: bool = False, shared: SharedFeatures | None = None) -> None:
        super().__init__()
        self.note = note  # called for every product found
        self.fuses = fuses
        self.shared = shared  # what else reads the same features
        self.transposes: list[Transpose] = []
        self.mixtures: list[_Mixture] = []
        self.saving = find_saving_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = None
        if kwargs or (func is not torch.einsum and func not in _PRODUCTS) or is_checkpointed(self.saving):
            pass
        elif func is torch.einsum:
            found = self._replace_einsum(args)
        elif len(args) == 2:
            found = self._replace_matmul(args[0], args[1])
        if found is not None:
            return found
        out = func(*args, **kwargs)
        if writes(func, args, kwargs):
            forget(self.transposes, self.mixtures)
        elif is_transpose(func, args):
            self.transposes.append((out, args[0], torch.is_grad_enabled()))
        return out

    def _replace_einsum(self, args: Any) -> Tensor | None:
        operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        if len(operands) != 2 or not isinstance(args[0], str):
            return None
        transposed = _parse_product(args[0])
        if transposed is not None:
            return self._multiply_mixture(operands[0], operands[1], transposed)
        parsed = _parse_mixture(args[0])
        if parsed is None:
            return None
        first, transposed_matrix, transposed_result = parsed
        x, matrix = operands[first], operands[1 - first]
        over = matrix.shape[-1:] if transposed_matrix else matrix.shape[:1]
        if not _fits(x, matrix, over):
            return None
        return self._mix(matrix, not transposed_matrix, x, transposed_result)

    def _replace_matmul(self, a: Any, b: Any) -> Tensor | None:
        grad = torch.is_grad_enabled()
        for transpose, x, made in self.transposes:
            if a is transpose and made == grad and _fits(x, b, b.shape[:1] if b.dim() else ()):
                return self._mix(b, True, x, True)
        found = self._multiply_mixture(a, b, True)
        if found is not None:
            return found
        for transpose, source, made in self.transposes:
            if b is transpose and made == grad:
                return self._multiply_mixture(a, source, False)
        return None

    def _mix(self, matrix: Tensor, turned: bool, x: Tensor, transposed: bool) -> Tensor:
        """Return W x, or its transpose, for W [k, n], which is the matrix or, `turned`, its transpose, and x [B, n, d]."""
        if self.note is not None:
            self.note("")
        weight = matrix.mT if turned else matrix
        wide = x.to(compute_dtype(x))
        with without_autocast(x):
            y = mix_features(weight, wide)
        y = y.mT if transposed else y
        if self.fuses and (torch.compiler.is_compiling() or (self.shared is not None and self.shared.noting)):
            # not in eager mode: the mixture is computed already, and one product is cheaper than two
            self.mixtures.append(
                _Mixture(y, matrix, turned, weight, x, transposed, torch.is_grad_enabled(), wide.dtype, take_stamp())
            )
        return y

    def _multiply_mixture(self, x: Tensor, made: Tensor, transposed: bool) -> Tensor | None:
        """Return the products of x with a recorded mixture of itself, or None. The mixture itself is then unused."""
        for mixture in self.mixtures:
            same = made is mixture.made and x is mixture.x and transposed == mixture.transposed
            if same and (mixture.grad, mixture.dtype) == (torch.is_grad_enabled(), compute_dtype(x)) and is_valid(mixture.stamp):  # fmt: skip
                found = None if self.shared is None else self.shared.find_products(x, mixture.matrix, mixture.turned)
                return multiply_mixtures(x, mixture.weight) if found is None else found
        return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _parse_product(equation: str) -> bool | None:
    """Return True for "bnd,bdk->bnk", False for "bnd,bkd->bnk", None for any other contraction."""
    sides = equation.replace(" ", "").split("->")
    inputs = sides[0].split(",")
    if (
        len(sides) != 2
        or [len(part) for part in (*inputs, sides[1])] != [3, 3, 3]
        or any(len(set(part)) < 3 for part in (*inputs, sides[1]))
    ):
        return None
    other, out = inputs[1], sides[1]
    b, n, d = inputs[0][0], inputs[0][1], inputs[0][2]
    k = out[2]
    if k in (b, n, d) or out != b + n + k or other not in (b + d + k, b + k + d):
        return None
    return other == b + d + k


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _parse_mixture(equation: str) -> tuple[int, bool, bool] | None:
    """Return which operand is x, whether the matrix is [k, n], and whether the result is [B, d, k]; None otherwise."""
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
    """Return True if x is a batch of feature vectors and the matrix multiplies over the features."""
    return x.dim() == 3 and matrix.dim() == 2 and tuple(over) == (x.shape[1],) and x.is_floating_point() and matrix.is_floating_point()  # fmt: skip


class _DetectWrites(_MultiplyFromLeft):
    """Detects, in eager mode on the example, in-place writes after a mixture: before its product with x, and at any time.

    This must be known beforehand, because in compiled code a mode does not see every write.
    """

    def __init__(self, note: Note) -> None:
        super().__init__()
        self.report = note
        self.versions: list[tuple[_Mixture, tuple[int, ...] | None]] = []
        self.inside: list[str] = []  # the module that computed each of them

    def _mix(self, matrix: Tensor, turned: bool, x: Tensor, transposed: bool) -> Tensor:
        y = super()._mix(matrix, turned, x, transposed)
        mixture = _Mixture(y, matrix, turned, matrix, x, transposed, torch.is_grad_enabled(), y.dtype, "")
        self.versions.append((mixture, _versions(mixture)))
        self.inside.append(self.report(None))
        return y

    def _multiply_mixture(self, x: Tensor, made: Tensor, transposed: bool) -> Tensor | None:
        for mixture, before in self.versions:
            if made is mixture.made and x is mixture.x:
                self.report("" if before is not None and before == _versions(mixture) else "written to")
        return None

    def find_overwritten(self) -> set[str]:
        """Return the modules whose x was written to by the end of the run."""
        seen = zip(self.inside, self.versions, strict=True)
        return {name for name, (mixture, before) in seen if before is not None and before[2] != mixture.x._version}


def _versions(mixture: _Mixture) -> tuple[int, ...] | None:
    """Return the version counters of the tensors; None for inference tensors, which have none."""
    tensors = mixture.made, mixture.matrix, mixture.x
    return None if any(t.is_inference() for t in tensors) else tuple(t._version for t in tensors)


class OverFeaturesCalls(nn.Module):
    """Mixin for a module whose forward multiplies over features."""

    loka_fuses: bool  # whether products of x with mixtures of itself may run in one kernel

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward under the mode."""
        with _MultiplyFromLeft(fuses=self.loka_fuses, shared=self.__dict__.get(SHARED)):
            return super().forward(*args, **kwargs)


@dataclass(frozen=True)
class FeatureProducts:
    """Multiply matrices over features from the left. No options."""

    name: ClassVar[str] = "feature_products"
    effect: ClassVar[ModClass] = "rounding"

    def rewrite(self, editor: Editor) -> None:
        """Rewrite modules whose forward multiplies a matrix over the features of a batch."""
        found = find_callers(editor, _MultiplyFromLeft)
        detectors: list[_DetectWrites] = []

        def detect(note: Note) -> _DetectWrites:
            detectors.append(_DetectWrites(note))
            return detectors[-1]

        written: set[str] = set()
        multiplied = {name for name, _ in find_callers(editor, detect, left=written)} if found else set()
        overwritten = {name for detector in detectors for name in detector.find_overwritten()}
        for name, module in found:
            if name in overwritten:  # torch saves its transposed copy for backward, this mod the features themselves
                editor.leave(name, "the features it multiplies are written to in place afterwards")
                continue
            editor.mix(name, OverFeaturesCalls, loka_fuses=name in multiplied and name not in written)
            editor.change(name, f"{type(module).__name__}: multiplies over features where they lie", "rounding")
