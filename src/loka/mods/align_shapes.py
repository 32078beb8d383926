"""align_shapes: K and N of every linear padded with zeros to what kernels want, invisible in the state_dict.

    y = W x + b    ->    y = (W' x' + b')[:N],    W' = [[W, 0], [0, 0]]  [N', K'],    x' = [x, 0],    b' = [b, 0]

FP8 GEMMs want K and N in multiples of 16 (TMA loads and the libraries refuse other strides), blockwise scales of 128. The padding is real storage, made
once, so that nothing is copied in a step but x's last columns; the padded entries stay zero under any optimiser, because their gradient is zero: x' is zero
there in wgrad, and the outputs beyond N are cut off, so their gradient is zero too. Weight decay keeps zero at zero.

The wrapper is called as before and saves and loads the plain weight [N, K] under the plain name. The aligned linear is its child `inner`: that is the site
Probe sees and `convert` swaps. Parameters are new objects: make the optimiser after the mod.

Prediction layers are left (a GEMM with one output is no GEMM worth aligning), and linears that share their weight, because one padding cannot serve two.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn

from loka.mods.editor import Editor
from loka.records.mods import ModClass
from loka.units.flow import Flow


def round_up(count: int, multiple: int) -> int:
    """The next multiple."""
    return -(-count // multiple) * multiple


class Aligned(nn.Module):
    """A linear of width_in -> width_out on an inner linear of aligned sizes."""

    def __init__(self, linear: nn.Linear, multiple_k: int, multiple_n: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        k, n = round_up(self.in_features, multiple_k), round_up(self.out_features, multiple_n)
        like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.inner = nn.Linear(k, n, bias=linear.bias is not None, **like)
        self._fill(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
        for name, parameter in linear.named_parameters():
            getattr(self.inner, name).requires_grad_(parameter.requires_grad)
        self.train(linear.training)
        self._register_state_dict_hook(_cut)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_pad)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _fill(self, weight: Tensor, bias: Tensor | None) -> None:
        self.inner.weight.zero_()[: self.out_features, : self.in_features] = weight
        if bias is not None:
            self.inner.bias.zero_()[: self.out_features] = bias

    @property
    def weight(self) -> Tensor:
        """The plain weight [N, K], a view."""
        return self.inner.weight[: self.out_features, : self.in_features]

    @property
    def bias(self) -> Tensor | None:
        """The plain bias [N], a view."""
        bias: Tensor | None = self.inner.bias
        return None if bias is None else bias[: self.out_features]

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        if input.shape[-1] != self.in_features:
            raise ValueError(f"this linear takes [..., {self.in_features}], got {tuple(input.shape)}")
        out: Tensor = self.inner(F.pad(input, (0, self.inner.in_features - self.in_features)))
        return out[..., : self.out_features]

    def restore(self, linear: nn.Linear) -> None:
        """Give a plain linear the values this one has now."""
        with torch.no_grad():
            linear.weight.copy_(self.weight)
            if linear.bias is not None and self.bias is not None:
                linear.bias.copy_(self.bias)

    def extra_repr(self) -> str:
        """The plain sizes."""
        return f"{self.in_features} -> {self.out_features}"


def _cut(module: Aligned, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    for name in ("weight", "bias"):
        value = state.pop(f"{prefix}inner.{name}", None)
        if value is not None:
            rows = value[: module.out_features]
            state[prefix + name] = rows[:, : module.in_features] if name == "weight" else rows


def _pad(module: Aligned, state: dict[str, Tensor], prefix: str, *others: Any) -> None:
    """Plain entries become padded ones; a tensor of another size stays as it is, so that loading reports it."""
    inner = module.inner
    plain = {"weight": (module.out_features, module.in_features), "bias": (module.out_features,)}
    for name, shape in plain.items():
        value = state.pop(prefix + name, None)
        if value is None:
            continue
        if tuple(value.shape) == shape:
            rows = inner.out_features - module.out_features
            columns = inner.in_features - module.in_features
            value = F.pad(value, (0, columns, 0, rows) if name == "weight" else (0, rows))
        state[f"{prefix}inner.{name}"] = value


@dataclass(frozen=True)
class AlignShapes:
    """multiple: what K and N shall be multiples of (16: any FP8 kernel; 128: blockwise scales without a ragged block)."""

    multiple: int = 16
    name: ClassVar[str] = "align_shapes"
    effect: ClassVar[ModClass] = "exact"

    def __post_init__(self) -> None:
        if self.multiple < 1 or self.multiple % 8:
            raise ValueError(f"align_shapes(multiple={self.multiple}): expected a multiple of 8, e.g. 16 or 128")

    def rewrite(self, editor: Editor) -> None:
        """Every linear whose K or N is no multiple."""
        for name, linear in editor.modules(nn.Linear):
            assert isinstance(linear, nn.Linear)
            if linear.in_features % self.multiple == 0 and linear.out_features % self.multiple == 0:
                continue
            if name.endswith(".inner") and isinstance(editor.model.get_submodule(name[: -len(".inner")]), Aligned):
                editor.leave(name, "it is aligned already")
            elif why := self._refuse(editor, name, linear):
                editor.leave(name, why)
            else:
                new = Aligned(linear, self.multiple, self.multiple)
                shape = f"{linear.in_features} x {linear.out_features}"
                what = f"{shape} -> {new.inner.in_features} x {new.inner.out_features}, padded with zeros"
                editor.swap(name, new, what, "exact")

    def _refuse(self, editor: Editor, name: str, linear: nn.Linear) -> str | None:
        if not name:
            return "the model is itself a linear and cannot be swapped in place; wrap it in nn.Sequential"
        if type(linear) is not nn.Linear:
            return f"{type(linear).__name__} is more than an nn.Linear"
        if parametrize.is_parametrized(linear):
            return "its weight is parametrised"
        if editor.is_tied(linear):
            return "it shares its weight with another module"
        if name in editor.prediction:
            return "a prediction layer: too small a GEMM to gain from it"
        if isinstance(editor.flow, Flow) and f"{name}.weight" in editor.flow.outside_reads:
            return "its weight is read outside of it"
        return None
