"""GroupedLinear: one linear per expert, each applied to its own rows of one matrix.

    y_r = W_e x_r      for the rows r of expert e; rows are sorted by expert, and end for expert e at ends[e]

All experts are one `weight` [E, out, in] and one op, `loka::grouped_linear`, with a gradient. On a GPU in bf16 it is
torch's grouped GEMM, which needs widths that are multiples of 8; otherwise it is a loop over the experts.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from loka.kernels.op import differentiate, fake_of, torch_op
from loka.nn.mix import compute_dtype


def _grouped_gemm(*operands: Tensor) -> bool:
    return all(t.is_cuda and t.dtype == torch.bfloat16 and t.shape[0] > 0 for t in operands)


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    return list(pairwise([0, *ends.tolist()]))


@torch_op("grouped_linear")
def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [N, in], weight [E, out, in], ends int32 [E] -> [N, out]."""
    if _grouped_gemm(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert, (start, stop) in enumerate(_spans(ends)):
        torch.mm(x[start:stop], weight[expert].t(), out=out[start:stop])
    return out


@fake_of(grouped_linear)
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch_op("grouped_linear_weight_grad")
def grouped_linear_weight_grad(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """grad [N, out], x [N, in] -> dW [E, out, in]; zero for an expert without rows."""
    if _grouped_gemm(grad, x):
        return F.grouped_mm(grad.t(), x, offs=ends)
    out = x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])
    for expert, (start, stop) in enumerate(_spans(ends)):
        torch.mm(grad[start:stop].t(), x[start:stop], out=out[expert])
    return out


@fake_of(grouped_linear_weight_grad)
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    dx = grouped_linear(grad, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    dw = grouped_linear_weight_grad(grad, x, ends) if ctx.needs_input_grad[1] else None
    return dx, dw, None


differentiate(grouped_linear, _differentiate, save=_save)


@register_flop_formula(torch.ops.loka.grouped_linear)
def _flops(x: torch.Size, weight: torch.Size, ends: torch.Size, *args: Any, **kwargs: Any) -> int:
    # every row is multiplied by the weight of exactly one expert
    return 2 * x[0] * x[1] * weight[1]


class GroupedLinear(nn.Module):
    """E linears without bias; the state_dict is a plain `weight` [E, out, in].

    Args:
        experts: number of experts.
        width_in: a multiple of 8.
        width_out: a multiple of 8.

    Example:
        >>> ends = torch.tensor([3, 3, 7, 8], dtype=torch.int32)  # rows 0 to 2 are of expert 0, 3 to 6 of expert 2, 7 of expert 3
        >>> GroupedLinear(4, 64, 128)(torch.randn(8, 64), ends).shape
        torch.Size([8, 128])
    """

    def __init__(self, experts: int, width_in: int, width_out: int) -> None:
        super().__init__()
        if experts < 1 or width_in < 1 or width_out < 1:
            raise ValueError(f"GroupedLinear needs positive sizes, got {experts} experts of {width_in} -> {width_out}")
        if width_in % 8 or width_out % 8:
            raise ValueError(f"grouped GEMMs need widths that are multiples of 8, got {width_in} -> {width_out}")
        self.experts, self.width_in, self.width_out = experts, width_in, width_out
        self.weight = nn.Parameter(torch.empty(experts, width_out, width_in))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize uniformly in +-1/sqrt(in), as `nn.Linear`."""
        nn.init.uniform_(self.weight, -(self.width_in**-0.5), self.width_in**-0.5)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [N, in] sorted by expert, ends int32 [E] -> [N, out]."""
        dtype = compute_dtype(x)
        out: Tensor = grouped_linear(x.to(dtype), self.weight.to(dtype), ends)
        return out

    def extra_repr(self) -> str:
        """Experts and widths."""
        return f"experts={self.experts}, {self.width_in} -> {self.width_out}"
