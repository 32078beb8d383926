"""weighted_sums: compile a vector-matrix product per example as sums, fused by the compiler with what surrounds them.

    torch.einsum("be,bed->bd", g, v)      torch.bmm(g[:, None], v)      scores @ values      ->      sum_e g_be v_bed

This is how the gates of MMoE and PLE mix experts, how DIN and target attention pool a history, and how one query
attends to its keys. Libraries run it as a batch of matrix-vector products, far below memory bandwidth: two gates over
8,192 times six experts of 512 take 128 us on an H200. As sums, fused with each other and with the softmax before them,
they take 20.

The user's forward still runs. In compiled code, a torch function mode intercepts einsum and matrix products inside it
and computes those of this form as sums, in float32: rounding. In eager mode torch computes every call.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loka.mods.calling import Note, find_callers
from loka.mods.editor import Editor
from loka.nn.mix import compute_dtype, without_autocast
from loka.records.mods import ModClass

MANY = 32  # products in the example; fewer, larger products are left to library kernels
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)


class _ComputeAsSums(TorchFunctionMode):
    """Computes a vector-matrix product per example as a sum: in compiled code, or everywhere if `note` is given."""

    def __init__(self, note: Note | None = None) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not kwargs and (self.note is not None or torch.compiler.is_compiling()):
            found = None
            if func is torch.einsum:
                found = self._replace_einsum(args)
            elif func in _PRODUCTS and len(args) == 2:
                found = self._replace_matmul(*args)
            if found is not None:
                return found
        return func(*args, **kwargs)

    def _replace_einsum(self, args: Any) -> Tensor | None:
        operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        if len(operands) != 2 or not isinstance(args[0], str):
            return None
        parsed = _parse_equation(args[0])
        if parsed is None:
            return None
        which, order = parsed
        vector, matrix = operands[which], operands[1 - which]
        return self._sum(vector, matrix.permute(order)) if matrix.dim() == len(order) else None

    def _replace_matmul(self, a: Any, b: Any) -> Tensor | None:
        if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dim() != b.dim() or a.dim() < 3:
            return None
        if a.shape[-2] == 1:
            found = self._sum(a.squeeze(-2), b)
            return None if found is None else found.unsqueeze(-2)
        if b.shape[-1] == 1:
            found = self._sum(b.squeeze(-1), a.mT)
            return None if found is None else found.unsqueeze(-1)
        return None

    def _sum(self, vector: Tensor, matrix: Tensor) -> Tensor | None:
        """Compute [..., e] times [..., e, d] -> [..., d]; None if torch should compute it, or raise its own error."""
        if vector.shape != matrix.shape[:-1] or not vector.is_floating_point() or not matrix.is_floating_point():
            return None
        dtype = compute_dtype(vector)
        if torch.float64 in (vector.dtype, matrix.dtype) or (vector.dtype != matrix.dtype and dtype == vector.dtype):
            return None
        if self.note is not None:  # not in compiled code, where the number of rows may be dynamic
            count = vector.shape[:-1].numel()
            if count < MANY:
                self.note(
                    f"{count} products of a vector and a matrix in the example, fewer than {MANY}, "
                    "are left to library kernels; hint: use an example with a realistic number of rows"
                )
                return None
            self.note("")
        with without_autocast(vector):
            wide = vector.to(dtype).float().unsqueeze(-1) * matrix.to(dtype).float()
            return wide.sum(-2).to(dtype)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _parse_equation(equation: str) -> tuple[int, tuple[int, ...]] | None:
    """Return which operand is the vector, and the permutation of the other one to [examples, summed, free].

    None for any other contraction.
    """
    sides = equation.replace(" ", "").split("->")
    inputs = sides[0].split(",")
    if len(sides) != 2 or len(inputs) != 2 or "." in equation:
        return None
    out = sides[1]
    which = 0 if len(inputs[0]) < len(inputs[1]) else 1
    vector, matrix = inputs[which], inputs[1 - which]
    if len(vector) < 2 or len(matrix) != len(vector) + 1 or any(len(set(side)) != len(side) for side in (vector, matrix, out)):  # fmt: skip
        return None
    examples, summed = vector[:-1], vector[-1]
    free = set(matrix) - set(vector)
    if len(free) != 1 or not set(vector) <= set(matrix) or out != examples + next(iter(free)):
        return None
    return which, tuple(matrix.index(letter) for letter in examples + summed + next(iter(free)))


class WeightedSums(nn.Module):
    """Mixin for a module whose forward computes such products."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward under the mode."""
        with _ComputeAsSums():
            return super().forward(*args, **kwargs)


@dataclass(frozen=True)
class SumWeighted:
    """Compute vector-matrix products per example as sums in compiled code. No options."""

    name: ClassVar[str] = "weighted_sums"
    effect: ClassVar[ModClass] = "rounding"

    def rewrite(self, editor: Editor) -> None:
        """Rewrite modules whose forward multiplies one vector by one matrix per example."""
        for name, module in find_callers(editor, _ComputeAsSums):
            editor.mix(name, WeightedSums)
            editor.change(name, f"{type(module).__name__}: weighted sums, compiled with what is around them", "rounding")  # fmt: skip
