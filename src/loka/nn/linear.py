"""Linear whose three GEMMs each run on their own kernel in their own precision.

    fprop   y  = x  W^T        dgrad   dx = dy W        wgrad   dW = dy^T x

It is an nn.Linear that shares the original's parameters, so a state_dict is the same before and after the swap. What runs is bound once, at
construction: `binding.fprop` and its siblings name a backend and the Specs of its operands, or are None for high precision. A backend that
cannot run what it is bound to raises in forward; nothing else is run in its place.

Operands are quantised where they are used, from their high-precision values, along the axis the GEMM contracts. The bias is added in the
output's type, after the GEMM.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from loka.dispatch.recipe import Operands
from loka.kernels import registry
from loka.kernels.quantize import quantize
from loka.kernels.scaled_mm import scaled_mm


@dataclass(frozen=True)
class BoundGemm:
    """A GEMM in low precision: on which backend, with which operands."""

    backend: str
    operands: Operands

    def __post_init__(self) -> None:
        for spec in (self.operands.a, self.operands.b):
            if spec.mode != "dynamic":
                raise ValueError(f"Linear computes its scales from its operands; {spec} brings its own")
        if self.backend != "auto":
            registry.backend("scaled_mm", self.backend)  # an unknown name raises here, not in the first forward
        registry.load("quantize")
        registry.load("scaled_mm")

    def __str__(self) -> str:
        return f"{self.operands.a}@{self.operands.b}/{self.backend}"


@dataclass(frozen=True)
class LinearBinding:
    """What each GEMM of a Linear runs; None is high precision."""

    fprop: BoundGemm | None = None
    dgrad: BoundGemm | None = None
    wgrad: BoundGemm | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name}={getattr(self, name) or 'high'}" for name in ("fprop", "dgrad", "wgrad"))


def _multiply(a: Tensor, b: Tensor, bound: BoundGemm | None, out_dtype: torch.dtype) -> Tensor:
    """a [M, K] @ b [N, K]^T, in low precision where bound."""
    if bound is None:
        return torch.matmul(a.to(out_dtype), b.to(out_dtype).T)
    qa, qb = quantize(a.contiguous(), bound.operands.a), quantize(b.contiguous(), bound.operands.b)
    return scaled_mm(qa, qb, out_dtype=out_dtype, backend=bound.backend, fast_accum=bound.operands.fast_accum)


class _LinearFunction(torch.autograd.Function):
    """Autograd of x [M, K], weight [N, K] -> y [M, N] with three separate bindings."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, binding: LinearBinding, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.binding, ctx.dtype = binding, dtype
        return _multiply(x, weight, binding.fprop, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        dx = dw = None
        with torch.autocast(dy.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                dx = _multiply(dy, weight.T, ctx.binding.dgrad, ctx.dtype).to(x.dtype)
            if ctx.needs_input_grad[1]:
                dw = _multiply(dy.T, x.T, ctx.binding.wgrad, ctx.dtype).to(weight.dtype)
        return dx, dw, None, None


class Linear(nn.Linear):
    """An nn.Linear in low precision. Make one with `Linear.replacing(module, binding)`."""

    binding: LinearBinding

    @classmethod
    def replacing(cls, module: nn.Linear, binding: LinearBinding) -> "Linear":
        """A Linear that shares the module's parameters and its hooks."""
        if parametrize.is_parametrized(module):
            raise ValueError(
                f"{module} has parametrised weights, which a Linear cannot share; hint: remove the parametrisation"
            )
        replacement = cls.__new__(cls)
        nn.Module.__init__(replacement)
        replacement.in_features, replacement.out_features = module.in_features, module.out_features
        replacement.weight, replacement.bias = module.weight, module.bias
        replacement.binding = binding
        replacement.train(module.training)
        for name, value in vars(module).items():
            if "hook" in name:
                setattr(replacement, name, value)
        return replacement

    def restored(self) -> nn.Linear:
        """The plain nn.Linear this replaced, sharing the parameters."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        plain.weight, plain.bias = self.weight, self.bias
        return plain.train(self.training)

    def forward(self, input: Tensor) -> Tensor:
        """x [..., K] -> y [..., N] in the input's type, or autocast's where it is on."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        with torch.autocast(kind, enabled=False):
            if input.shape[-1] != self.in_features:
                raise ValueError(f"Linear takes [..., {self.in_features}], got {tuple(input.shape)}")
            flat = input.reshape(math.prod(input.shape[:-1]), self.in_features)
            y: Tensor = _LinearFunction.apply(flat, self.weight, self.binding, dtype)  # type: ignore[no-untyped-call]
            if self.bias is not None:
                y = y + self.bias.to(dtype)
        return y.reshape(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Precision and kernel of each GEMM."""
        return f"{super().extra_repr()}, {self.binding}"
