"""dots: products of chosen pairs of an example's feature vectors, the interaction of DLRM, read once and written once."""

import torch
from torch import Tensor

from loka.kernels.dots.call import DotsCall
from loka.kernels.dots.pairs import check_pairs
from loka.kernels.registry import load, pick

__all__ = ["DotsCall", "dots"]


class _Dots(torch.autograd.Function):
    """x [B, n, d], first and second [P] -> [B, P]."""

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
    """sum over d of x[b, first[p]] * x[b, second[p]] for every example b and pair p.

    Args:
        x: [B, n, d], 16, 32 or 64 bits.
        first: [P] int64, indices into n, from 0; no pair (first, second) may occur twice. Looked at once for as long as the tensors live: keep them in buffers.
        second: [P] int64.
        head: [B, m, d], vectors in front of x's, as if torch.cat([head, x], 1) were given; without gradients they are read where they lie.
        backend: a name of the registry, or "auto".

    Returns:
        [B, P] in the type of x, summed in float32, float64 in float64.

    Raises:
        ValueError: x is not [B, n, d], or the pairs are out of range or repeat; compiled, where values cannot be asked for, our kernel makes every product NaN instead, and `reference` does what torch's own index does.

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
    with torch._C.DisableTorchFunction():  # function modes look at what a user's forward calls, not inside of this
        result: Tensor = _Dots.apply(x.contiguous(), first, second, backend)  # type: ignore[no-untyped-call]
    return result


load("dots")  # not in a call, which may be compiled: torch.compile cannot trace an import
