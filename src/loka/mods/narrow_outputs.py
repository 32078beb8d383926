"""narrow_outputs: compile linears of up to 4 outputs as sums, and pad those of up to 63 to a multiple of 8.

    y_i = sum_k x_k w_ik (+ b_i)        dx = sum_i dy_i w_i        dW = dy^T x

Every ranker ends in such a linear: 1024 -> 1, 3072 -> 3. Its GEMM is bound by reading x, and slowly: widths that are
not a multiple of 8 fall back to kernels without aligned loads, in both directions, and x must be written and read
again. Written as sums, the compiler fuses y with whatever makes x (a norm, an activation, a concatenation, which may
then never reach memory), and dx with whatever uses it. dW stays a GEMM, of a gradient padded to eight columns.

A gate over six experts is too wide for sums, and slow as a GEMM of six columns: two of them over 8,192 x 1,536 take 35
us on an H200, padded with zeros to eight columns 24, the padding included. `align_shapes` does that for wider linears.

A linear that reads a concatenation sums over its parts in compiled inference, so that the concatenation is never
written: 62 us instead of 89 for a head over 3456 + 1024 columns and 8192 rows. In training it stays a GEMM: sums over
the fused concatenation would mask every load (132 us). Behind a norm over more than 1024 columns, which the compiler
would read twice, one kernel normalizes, activates and sums in compiled inference (`loka.kernels.norm_quantize`).

In eager mode the module runs as a plain nn.Linear. Sums are in float32: rounding.
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import guard_or_true

from loka.kernels.norm_quantize import norm_quantize
from loka.kernels.norm_quantize.triton import WIDEST
from loka.lowp.origins import ORIGINS, WIDE, Joined, Normed, Origin, Origins
from loka.mods.align_shapes import Aligned, is_aligned, round_up
from loka.mods.editor import Editor
from loka.mods.origins import find_origins, tell_origins
from loka.nn.mix import compute_dtype, without_autocast
from loka.records.mods import ModClass
from loka.units.flow import Flow
from loka.units.recording import Unknown

FEW = 4  # up to this many outputs are computed as sums, which read x once for all
SEVERAL = 64  # linears with fewer outputs are padded here; wider ones are for low precision and `align_shapes`
ALIGNED = 8  # a 16-bit GEMM needs a multiple of this many columns
PARTS = 4  # of a concatenation that are summed one by one; two were measured, and each takes a kernel
DEEP = 256  # outputs are padded from this many inputs on: chosen, not measured; padding the weight takes a kernel


class _SumProducts(torch.autograd.Function):
    """x [M, K], W [N, K] with few rows -> x W^T [M, N] in x's dtype."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        y = torch.stack([(wide * row).sum(-1) for row in weight.float().unbind()], -1)
        # not `y.to(y.dtype)`: torch 2.11 compiles a forward that ends in a cast to its own dtype to zero gradients
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            pairs = zip(dy.float().unbind(-1), weight.float().unbind(), strict=True)
            dx = functools.reduce(torch.add, [column[:, None] * row for column, row in pairs]).to(x.dtype)
        if ctx.needs_input_grad[1]:
            rows = F.pad(dy.to(x.dtype), (0, ALIGNED - dy.shape[1])).T @ x
            dw = rows[: dy.shape[1]].to(weight.dtype)
        return dx, dw


def sum_products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `F.linear` as sums, for a weight with few rows.

    Args:
        x: [..., K]; cast to autocast's dtype if autocast is on.
        weight: [N, K], N at most 8.
        bias: [N] or None.

    Returns:
        [..., N].

    Example:
        >>> sum_products(x, head.weight, head.bias)  # head(x)
    """
    x = x.to(compute_dtype(x))
    with torch.autocast(x.device.type, enabled=False), torch._C.DisableTorchFunction():
        y: Tensor = _SumProducts.apply(x.flatten(0, -2), weight.to(x.dtype))  # type: ignore[no-untyped-call]
        y = y.reshape(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias.to(y.dtype)


def sum_from_origin(origin: Origin, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute `F.linear` from what its input was made of. It has no gradient.

    Args:
        origin: the parts of a concatenation, or the input of a norm.
        weight: [N, K], N at most 8.
        bias: [N] or None.
        dtype: of the result.

    Returns:
        [..., N].

    Example:
        >>> sum_from_origin(Joined((a, b)), head.weight, head.bias, a.dtype)  # head(torch.cat([a, b], -1))
    """
    x = origin.x if isinstance(origin, Normed) else origin.parts[0]
    with without_autocast(x):
        if isinstance(origin, Normed):
            made = norm_quantize(
                x.flatten(0, -2), None, norm=origin.norm, weight=origin.weight, bias=origin.bias, activation=origin.activation, eps=origin.eps, head=weight
            )  # fmt: skip
            assert made.dots is not None
            y = made.dots.reshape(*x.shape[:-1], weight.shape[0])
        else:
            rows = torch.split(weight.float(), [part.shape[-1] for part in origin.parts], 1)
            sums = [_sum_rows(part.float(), some) for part, some in zip(origin.parts, rows, strict=True)]
            y = functools.reduce(torch.add, sums)
        return (y if bias is None else y + bias.float()).to(dtype)


def _sum_rows(x: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([(x * row).sum(-1) for row in weight.unbind()], -1)


class FewOutputs(nn.Module):
    """Mixin for an nn.Linear with few outputs: computed as sums in compiled code."""

    in_features: int
    weight: Tensor
    bias: Tensor | None
    loka_joined = False  # whether it reads a concatenation

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        plain = input.dim() < 2 or input.shape[-1] != self.in_features or input.dtype == torch.float64
        if not torch.compiler.is_compiling() or plain:  # sums are in float32
            return super().forward(input)  # type: ignore[no-any-return]
        origins: Origins | None = self.__dict__.get(ORIGINS)
        origin = None if origins is None else origins.find(input)
        if isinstance(origin, Normed) and guard_or_true(input.numel() == 0):
            origin = None  # no rows, or as many as only the data tells (`x[mask]`), for which no kernel can be chosen
        if origin is not None:
            return sum_from_origin(origin, self.weight, self.bias, compute_dtype(input))
        if self.loka_joined:
            return super().forward(input)  # type: ignore[no-any-return]
        return sum_products(input, self.weight, self.bias)

    forward.loka_is_linear = True  # type: ignore[attr-defined]


class PaddedOutputs(Aligned):
    """Mixin for an nn.Linear with several outputs: aligned in compiled code, with a contiguous result."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        if not torch.compiler.is_compiling() or input.shape[-1] != self.in_features:
            return super(Aligned, self).forward(input)  # type: ignore[no-any-return]
        return super().forward(input).contiguous()

    forward.loka_is_linear = True  # type: ignore[attr-defined]


def _reads_concatenation(flow: Flow | Unknown, name: str) -> bool:
    """Return True if the linear reads a concatenation in one of its calls on the example."""
    if isinstance(flow, Unknown):
        return False
    makers = [flow.maker(call.inputs[0]) for call in flow.calls_of(name)]
    return any(maker is not None and maker.op in ("cat", "concat") for maker in makers)


@dataclass(frozen=True)
class NarrowOutputs:
    """In compiled code, compute linears of up to 4 outputs as sums and pad up to 63 to a multiple of 8. No options."""

    name: ClassVar[str] = "narrow_outputs"
    effect: ClassVar[ModClass] = "rounding"

    def rewrite(self, editor: Editor) -> None:
        """Rewrite every plain nn.Linear with few outputs."""
        few_outputs: list[str] = []
        for name, linear in editor.modules(nn.Linear):
            assert isinstance(linear, nn.Linear)
            few = linear.out_features <= FEW
            padded = (
                FEW < linear.out_features < SEVERAL
                and linear.out_features % ALIGNED > 0
                and linear.in_features >= DEEP
                and linear.in_features % ALIGNED == 0
            )
            if linear.in_features <= FEW or not (few or padded) or is_aligned(linear):
                continue
            if type(linear).forward is not nn.Linear.forward or "forward" in vars(linear):
                editor.leave(
                    name, f"{type(linear).__name__} is more than an nn.Linear; hint: keep it, or use a plain nn.Linear"
                )
            elif parametrize.is_parametrized(linear) or "weight" not in linear._parameters:
                editor.leave(name, "its weight is parametrised; hint: keep it, or call remove_parametrizations first")
            elif padded:
                editor.mix(name, PaddedOutputs, loka_multiple=ALIGNED)
                editor.change(name, f"{linear.out_features} outputs, compiled as {round_up(linear.out_features, ALIGNED)}", "rounding")  # fmt: skip
            else:
                few_outputs.append(name)
        found = find_origins(editor, few_outputs)
        seen: dict[str, Origins] = {}
        for name in few_outputs:
            origin, holder = found.get(name, (None, ""))
            joined = isinstance(origin, Joined) or _reads_concatenation(editor.flow, name)
            said = f"{editor.model.get_submodule(name).out_features} outputs, compiled as sums"
            if isinstance(origin, Joined) and len(origin.parts) <= PARTS:
                said += "; in inference, over the parts of the concatenation that it reads"
            elif isinstance(origin, Normed) and WIDE < origin.x.shape[-1] <= WIDEST:
                said += "; in inference, by the kernel of the norm before it"
            elif joined:
                editor.leave(name, "it reads a concatenation, over which sums are slower than its GEMM; hint: keep it")
                continue
            else:
                origin = None
            editor.mix(name, FewOutputs, **({"loka_joined": True} if joined else {}))
            if origin is not None:
                tell_origins(editor, name, holder, seen)
            editor.change(name, said, "rounding")
