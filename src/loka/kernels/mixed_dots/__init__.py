"""mixed_dots: products of an example's feature vectors with a few mixtures of them (Wukong's factorization machine).

One pass over memory, forward and backward.
"""

from typing import Any

# not `import torch`: the backend `torch` is a submodule of this package
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.autograd import Function

from loka.kernels.mixed_dots.call import MixedDotsCall
from loka.kernels.registry import load, pick

__all__ = ["MixedDotsCall", "mixed_dots"]


class _MixedDots(Function):
    """The autograd function of `mixed_dots`."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, backend: str) -> Tensor:
        return _pick(x, weight, backend).run(x, weight.to(x.dtype))  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.backend = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx, dw = _pick(x, weight, ctx.backend).gradient(grads[0], x, weight.to(x.dtype))
        return (dx if ctx.needs_input_grad[0] else None), (dw.to(weight.dtype) if ctx.needs_input_grad[1] else None), None  # fmt: skip


def _pick(x: Tensor, weight: Tensor, backend: str) -> Any:
    b, n, d = x.shape
    return pick("mixed_dots", backend, MixedDotsCall(b, n, d, weight.shape[0], x.dtype), x.device).backend


def mixed_dots(x: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """Compute x (W x)^T for every example: its n vectors times k mixtures of them. Differentiable.

    Args:
        x: [B, n, d], bf16, fp16, float32 or float64.
        weight: [k, n]; cast to x's dtype, for example a float32 Parameter under autocast.
        backend: a name of the registry, or "auto".

    Returns:
        [B, n, k] in x's dtype.

    Raises:
        ValueError: the shapes do not fit.

    Example:
        >>> mixed_dots(x, p.T)  # torch.bmm(x, torch.einsum("bnd,nk->bdk", x, p))
    """
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(
            f"mixed_dots: x is {tuple(x.shape)} and weight {tuple(weight.shape)}, expected [B, n, d] and [k, n]"
        )
    with DisableTorchFunction():  # hide the ops inside from function modes
        result: Tensor = _MixedDots.apply(x, weight, backend)  # type: ignore[no-untyped-call]
    return result


load("mixed_dots")  # at import: torch.compile cannot trace an import inside a call
