"""mixed_dots: products of an example's feature vectors with a few mixtures of them (Wukong's factorization machine).

One pass over memory, forward and backward, together with other mixtures of the same vectors (its linear compression).
"""

from typing import Any

# not `import torch`: the backend `torch` is a submodule of this package
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.autograd import Function

from loka.kernels.mixed_dots.call import MixedDotsCall
from loka.kernels.registry import load, pick

__all__ = ["MixedDotsCall", "mix_and_multiply", "mixed_dots"]


class _MixedDots(Function):
    """The autograd function: P, and Z if there is a `mixing`."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, mixing: Tensor | None, backend: str) -> Any:
        given = None if mixing is None else mixing.to(x.dtype)
        products, mixed = _pick(x, weight, backend).run(x, weight.to(x.dtype), given)
        return products if mixed is None else (products, mixed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, str], output: Any) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.backend = inputs[3]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, mixing = ctx.saved_tensors
        given = None if mixing is None else mixing.to(x.dtype)
        dz = None if mixing is None else grads[1]
        dx, dw, dv = _pick(x, weight, ctx.backend).gradient(grads[0], dz, x, weight.to(x.dtype), given)
        return (
            dx if ctx.needs_input_grad[0] else None,
            dw.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            dv.to(mixing.dtype) if ctx.needs_input_grad[2] else None,
            None,
        )


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
    result: Tensor = _apply(x, weight, None, backend)
    return result


def mix_and_multiply(x: Tensor, weight: Tensor, mixing: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Compute `mixed_dots(x, weight)` and other mixtures V x in one pass over x. Differentiable.

    Args:
        x: [B, n, d], bf16, fp16, float32 or float64.
        weight: [k, n], the mixtures that x is multiplied by; cast to x's dtype.
        mixing: [m, n], the mixtures to return, such as a compression layer's; cast to x's dtype.
        backend: a name of the registry, or "auto".

    Returns:
        x (W x)^T [B, n, k] and V x [B, m, d], in x's dtype.

    Raises:
        ValueError: the shapes do not fit.

    Example:
        >>> products, compressed = mix_and_multiply(x, p.T, compress.weight)
    """
    if mixing.dim() != 2 or mixing.shape[1:] != x.shape[1:2]:
        raise ValueError(
            f"mix_and_multiply: x is {tuple(x.shape)} and mixing {tuple(mixing.shape)}, expected [B, n, d] and [m, n]"
        )
    products, mixed = _apply(x, weight, mixing, backend)
    return products, mixed


def _apply(x: Tensor, weight: Tensor, mixing: Tensor | None, backend: str) -> Any:
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(
            f"mixed_dots: x is {tuple(x.shape)} and weight {tuple(weight.shape)}, expected [B, n, d] and [k, n]"
        )
    with DisableTorchFunction():  # hide the ops inside from function modes
        return _MixedDots.apply(x, weight, mixing, backend)  # type: ignore[no-untyped-call]


load("mixed_dots")  # at import: torch.compile cannot trace an import inside a call
