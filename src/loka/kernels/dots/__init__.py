"""dots: dot products of chosen pairs of an example's feature vectors (DLRM's interaction) in one pass over memory."""

import torch
from torch import Tensor

from loka.kernels.dots.call import DotsCall
from loka.kernels.dots.pairs import check_pairs
from loka.kernels.registry import load, pick

__all__ = ["DotsCall", "dots"]


class _Dots(torch.autograd.Function):
    """The autograd function of `dots`."""

    @staticmethod
    def forward(ctx, x: Tensor, first: Tensor, second: Tensor, backend: str) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, first, second)
        ctx.backend = backend
        return _pick(x, first, backend).run(x, first, second)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx, *grads: Tensor):  # type: ignore[no-untyped-def]
        x, first, second = ctx.saved_tensors
        return _pick(x, first, ctx.backend).gradient(grads[0].contiguous(), x, first, second), None, None, None


def _pick(x: Tensor, first: Tensor, backend: str, heads: int = 0):  # type: ignore[no-untyped-def]
    b, n, d = x.shape
    return pick("dots", backend, DotsCall(b, n + heads, d, first.shape[0], x.dtype), x.device).backend


def dots(x: Tensor, first: Tensor, second: Tensor, *, head: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Compute the dot product of x[b, first[p]] and x[b, second[p]] for every example b and pair p. Differentiable.

    Args:
        x: [B, n, d], bf16, fp16, float32 or float64.
        first: int64 [P], indices from 0 to n - 1. No pair (first, second) may occur twice. Pairs are checked once per
            tensor and the result is cached, so keep the indices in buffers.
        second: int64 [P].
        head: [B, m, d], vectors in front of x's, as torch.cat([head, x], 1); without gradients, the Triton kernel reads
            them without the copy.
        backend: a name of the registry, or "auto".

    Returns:
        [B, P] in x's dtype, summed in float32 (float64 for float64).

    Raises:
        ValueError: x is not [B, n, d], or pairs are out of range or repeat. Compiled code cannot check values: there
            the Triton kernel returns NaN for every product, and `reference` does what torch's indexing does.

    Example:
        >>> i, j = torch.triu_indices(n, n, 1)
        >>> dots(x, i, j)  # torch.bmm(x, x.transpose(1, 2))[:, i, j]
    """
    if x.dim() != 3:
        raise ValueError(f"dots: x is {tuple(x.shape)}, expected [B, n, d]")
    if head is not None and (head.dim() != 3 or head.dtype != x.dtype or head.shape[::2] != x.shape[::2]):
        raise ValueError(f"dots: head is {tuple(head.shape)} {head.dtype}, expected [{x.shape[0]}, m, {x.shape[2]}] {x.dtype}")  # fmt: skip
    n = x.shape[1] + (0 if head is None else head.shape[1])
    if not torch.compiler.is_compiling():
        check_pairs(first, second, n)
    elif first.shape[0] > n * n:
        raise ValueError(f"dots: {first.shape[0]} pairs of {n} vectors, which have {n * n}: expected every pair at most once")  # fmt: skip
    if head is not None:
        chosen = _pick(x, first, backend, head.shape[1])
        if getattr(chosen, "READS_HEADS", False) and not torch.is_grad_enabled():
            return chosen.run(x.contiguous(), first, second, head=head.contiguous())  # type: ignore[no-any-return]
        x = torch.cat([head, x], 1)
    with torch._C.DisableTorchFunction():  # hide the ops inside from function modes
        result: Tensor = _Dots.apply(x.contiguous(), first, second, backend)  # type: ignore[no-untyped-call]
    return result


load("dots")  # at import: torch.compile cannot trace an import inside a call
