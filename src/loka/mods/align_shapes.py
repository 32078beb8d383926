"""align_shapes: K and N of every linear padded with zeros to what kernels want, invisible to everybody else.

    y = W x + b    ->    y = (W' x' + b')[:N],    W' = [[W, 0], [0, 0]]  [N', K'],    x' = [x, 0],    b' = [b, 0]

Tensor cores want K and N in multiples of 16 (16-bit GEMMs at K = 479 fall back to slow kernels, FP8 GEMMs refuse), blockwise scales of 128. The padding is made in forward from the
plain parameters: the module and its Parameters stay the objects they were, so an optimizer that exists goes on working, a state_dict does not change, and loading needs no help. It
costs one copy of W in a call, together with the cast where autocast makes one anyway; entries beyond N and K get no gradient, because what they make is cut off.

An aligned linear is a site for Probe and `convert` under its own name. In low precision the kernels pad as they quantise, so converted linears run without this copy.

Prediction layers are left (a GEMM with one output is no GEMM worth aligning).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn

from loka.mods.editor import FEW_OUTPUTS, Editor
from loka.records.mods import ModClass


def round_up(count: int, multiple: int) -> int:
    """The next multiple.

    Args:
        count: a width.
        multiple: what it shall be a multiple of.
    """
    return -(-count // multiple) * multiple


class Aligned(nn.Module):
    """Mixed in front of an nn.Linear: the same product at aligned sizes."""

    in_features: int
    out_features: int
    weight: Tensor
    bias: Tensor | None
    loka_multiple: int  # of K and N

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        if input.shape[-1] != self.in_features:
            raise ValueError(f"this linear takes [..., {self.in_features}], got {tuple(input.shape)}")
        k, n = self._missing()
        weight = F.pad(self._cast(self.weight), (0, k, 0, n))
        bias = None if self.bias is None else F.pad(self._cast(self.bias), (0, n))
        out = F.linear(F.pad(input, (0, k)) if k else input, weight, bias)
        return out[..., : self.out_features] if n else out

    forward.loka_is_linear = True  # type: ignore[attr-defined]  # x W^T + b of its own parameters: `convert` may compute it another way

    def _missing(self) -> tuple[int, int]:
        return tuple(round_up(width, self.loka_multiple) - width for width in (self.in_features, self.out_features))  # type: ignore[return-value]

    @staticmethod
    def _cast(value: Tensor) -> Tensor:
        """To what autocast computes in, before the padding copies it: once, and not once more behind it."""
        kind = value.device.type
        if kind == "meta" or not torch.is_autocast_enabled(kind) or value.dtype == torch.float64:
            return value
        return value.to(torch.get_autocast_dtype(kind))

    def extra_repr(self) -> str:
        """The plain sizes and the aligned ones."""
        k, n = self._missing()
        return f"{super().extra_repr()}, computed as {self.in_features + k} x {self.out_features + n}"


def is_aligned(module: nn.Module) -> bool:
    """Whether a linear computes at aligned sizes.

    Args:
        module: any module.
    """
    return isinstance(module, Aligned)


@dataclass(frozen=True)
class AlignShapes:
    """Pad misaligned widths of linears with zeros while they compute; parameters and state_dict keep their shapes.

    Args:
        multiple: what K and N shall be multiples of (16: any FP8 kernel; 128: blockwise scales without a ragged block).

    Example:
        >>> loka.mods.apply(model, [AlignShapes(128)])
    """

    multiple: int = 16
    name: ClassVar[str] = "align_shapes"
    under_autocast: ClassVar[bool] = True  # where it is checked, too
    effect: ClassVar[ModClass] = "exact"

    def __post_init__(self) -> None:
        if self.multiple < 1 or self.multiple % 8:
            raise ValueError(f"align_shapes(multiple={self.multiple}): expected a multiple of 8, e.g. 16 or 128")

    def rewrite(self, editor: Editor) -> None:
        """Every linear whose K or N is no multiple."""
        for name, linear in editor.modules(nn.Linear):
            assert isinstance(linear, nn.Linear)
            sizes = linear.in_features, linear.out_features
            if all(size % self.multiple == 0 for size in sizes):
                continue
            if why := self._refuse(editor, name, linear):
                editor.leave(name, why)
                continue
            editor.mix(name, Aligned, loka_multiple=self.multiple)
            k, n = (round_up(size, self.multiple) for size in sizes)
            editor.change(name, f"{sizes[0]} x {sizes[1]} computed as {k} x {n}, padded with zeros", "exact")

    def _refuse(self, editor: Editor, name: str, linear: nn.Linear) -> str | None:
        if is_aligned(linear):
            return "it is aligned already"
        if type(linear).forward is not nn.Linear.forward or "forward" in vars(linear):
            return f"{type(linear).__name__} is more than an nn.Linear"
        if type(linear).__name__ == "NonDynamicallyQuantizableLinear" and not getattr(linear, "loka_called", False):
            return "nn.MultiheadAttention reads its weight without calling it; hint: the mod attention_layout"
        if parametrize.is_parametrized(linear) or "weight" not in linear._parameters:
            return "its weight is parametrised"
        if name in editor.prediction or linear.out_features <= FEW_OUTPUTS:
            return "a prediction layer, or as few outputs: too small a GEMM to gain from it"
        return None
