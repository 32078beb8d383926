"""align_shapes: compute linears with K and N zero-padded to multiples of 16; parameters and results keep their shapes.

    y = W x + b    ->    y = (W' x' + b')[:N],    W' = [[W, 0], [0, 0]]  [N', K'],    x' = [x, 0],    b' = [b, 0]

Tensor cores need K and N in multiples of 16 (16-bit GEMMs at K = 479 fall back to slow kernels, FP8 GEMMs refuse);
blockwise scales need multiples of 128. The padding happens in forward. The module and its Parameters remain the same
objects, so existing optimizers keep working and the state_dict does not change. It costs one copy of W per call, which
is combined with the cast that autocast makes anyway. The padded entries get no gradient, because their outputs are cut
off.

An aligned linear is still a site for Probe and `convert` under its own name. The low-precision kernels pad while they
quantize, so converted linears do not make this copy.

Prediction layers are left unchanged: a GEMM with one output gains nothing from alignment.
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
    """Round `count` up to the next multiple of `multiple`."""
    return -(-count // multiple) * multiple


class Aligned(nn.Module):
    """Mixin for an nn.Linear: the same product, computed at aligned sizes."""

    in_features: int
    out_features: int
    weight: Tensor
    bias: Tensor | None
    loka_multiple: int  # K and N are padded to multiples of this

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        if input.shape[-1] != self.in_features:
            raise ValueError(f"this linear takes [..., {self.in_features}], got {tuple(input.shape)}")
        k, n = self._padding()
        weight = F.pad(self._cast(self.weight), (0, k, 0, n))
        bias = None if self.bias is None else F.pad(self._cast(self.bias), (0, n))
        out = F.linear(F.pad(input, (0, k)) if k else input, weight, bias)
        return out[..., : self.out_features] if n else out

    # forward is x W^T + b of the module's own parameters, so `convert` may replace it
    forward.loka_is_linear = True  # type: ignore[attr-defined]

    def _padding(self) -> tuple[int, int]:
        return tuple(round_up(width, self.loka_multiple) - width for width in (self.in_features, self.out_features))  # type: ignore[return-value]

    @staticmethod
    def _cast(value: Tensor) -> Tensor:
        """Cast to autocast's dtype before padding, so that autocast does not copy the padded tensor again."""
        kind = value.device.type
        if kind == "meta" or not torch.is_autocast_enabled(kind) or value.dtype == torch.float64:
            return value
        return value.to(torch.get_autocast_dtype(kind))

    def extra_repr(self) -> str:
        """Show the plain and the aligned sizes."""
        k, n = self._padding()
        return f"{super().extra_repr()}, computed as {self.in_features + k} x {self.out_features + n}"


def is_aligned(module: nn.Module) -> bool:
    """Return True if a linear is computed at aligned sizes."""
    return isinstance(module, Aligned)


@dataclass(frozen=True)
class AlignShapes:
    """Zero-pad misaligned linears while they compute. Parameters and state_dict keep their shapes.

    Args:
        multiple: K and N are padded to multiples of this (16: any FP8 kernel; 128: blockwise scales, no partial block).

    Example:
        >>> loka.mods.apply(model, [AlignShapes(128)])
    """

    multiple: int = 16
    name: ClassVar[str] = "align_shapes"
    under_autocast: ClassVar[bool] = True
    effect: ClassVar[ModClass] = "exact"

    def __post_init__(self) -> None:
        if self.multiple < 1 or self.multiple % 8:
            raise ValueError(f"align_shapes(multiple={self.multiple}): expected a multiple of 8, e.g. 16 or 128")

    def rewrite(self, editor: Editor) -> None:
        """Align every linear whose K or N is not a multiple of `multiple`."""
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
            return "a prediction layer, or one with as few outputs: its GEMM is too small to gain from padding"
        return None
