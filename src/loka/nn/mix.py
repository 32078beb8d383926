"""Products over the n feature vectors of x [B, n, d], as small modules, without a materialized transpose.

    FeatureMix            Y = W X             W [m, n]: compression, shortcuts, the mixtures of a factorization machine
    FactorizationMachine  X Y^T = X (X^T P)   with Y = P^T X; X^T P first costs n d k, X X^T first would cost n^2 d
    DotInteraction        strict lower triangle of X X^T

`nn.Linear` mixes the last dimension, so mixing n with it needs a transposed x, which autograd saves: in a compiled bf16
Wukong these copies cost more than the GEMMs. Here W is broadcast over the batch with stride 0 and multiplied from the
left, and the batched GEMM reads x in place. `torch.matmul(W, x)` is avoided on purpose: if W requires a gradient, it
folds B and d together, which copies x.

Three products have their own backward, because autograd's has a poor memory layout:

    W X      dW = sum_b G_b X_b^T, one part of the batch at a time: autograd would write all B products [B, m, n] before
             summing them. The products of a part stay in a GPU's cache and are summed in float32 (rounded once for a
             16-bit W)
    A B^T    dB = G^T A directly in B's layout; autograd would compute A^T G and return its transpose, which gets copied
    dots     dX = (G + G^T) X with G + G^T gathered from the triangle; autograd would scatter it with atomics and
             multiply twice
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from loka.kernels.dots import dots
from loka.kernels.mixed_dots import mix_and_multiply, mixed_dots


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype a matrix product of x runs in: autocast's if enabled (but not for float64), else x's own."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context that disables autocast on the device of x."""
    return nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False)


# Elements of the products that are summed at a time: 32 MiB in 16-bit, which fit in the 50 MiB cache of a Hopper GPU.
PRODUCTS = 2**24


class _MixRows(torch.autograd.Function):
    """W X for one W [m, n] and a batch x [B, n, d]; W is cast to x's dtype."""

    @staticmethod
    def forward(weight: Tensor, x: Tensor) -> Tensor:
        # cast before the expand: casting an expanded tensor would write one copy of W per example
        return torch.bmm(weight.to(x.dtype).expand(x.shape[0], -1, -1), x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        weight, x = ctx.saved_tensors
        dw = _sum_products(grad, x, weight) if ctx.needs_input_grad[0] else None
        dx = None
        if ctx.needs_input_grad[1]:
            dx = torch.bmm(weight.to(x.dtype).mT.expand(x.shape[0], -1, -1), grad)
        return dw, dx


def mix_features(weight: Tensor, x: Tensor) -> Tensor:
    """Return W X [B, m, d] for one weight [m, n], cast to x's dtype, and x [B, n, d], without copying either."""
    with torch._C.DisableTorchFunction():  # function modes are meant to see what a user's forward calls, not this
        out: Tensor = _MixRows.apply(weight, x)  # type: ignore[no-untyped-call]
    return out


def _sum_products(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return sum_b G_b X_b^T in the dtype of the weight, from grad [B, m, d] and x [B, n, d]."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    total = torch.zeros(weight.shape, dtype=wide, device=weight.device)
    size = max(1, PRODUCTS // weight.numel())
    for first in range(0, x.shape[0], size):
        part = slice(first, first + size)
        total = total + torch.bmm(grad[part], x[part].mT).sum(0, dtype=wide)
    return total if weight.dtype == wide else total.to(weight.dtype)


class FeatureMix(nn.Module):
    """Y = W X for x [B, n, d], with a `weight` [sum(rows), n] initialized like `nn.Linear` and no bias: a norm follows.

    Args:
        n: number of vectors.
        rows: number of mixtures. Several sizes share one product and one read of x, and `split` returns views of it.

    Example:
        >>> FeatureMix(8, 4)(torch.randn(2, 8, 16)).shape
        torch.Size([2, 4, 16])
    """

    def __init__(self, n: int, rows: int | Sequence[int]) -> None:
        super().__init__()
        self.rows = (rows,) if isinstance(rows, int) else tuple(rows)
        if n < 1 or not self.rows or min(self.rows) < 1:
            raise ValueError(f"FeatureMix needs positive counts, got n={n} and rows={self.rows}")
        self.n = n
        self.weight = nn.Parameter(torch.empty(sum(self.rows), n))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize uniformly in +-1/sqrt(n), as `nn.Linear` with n inputs."""
        nn.init.uniform_(self.weight, -(self.n**-0.5), self.n**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return all rows at once, [B, sum(rows), d]."""
        out: Tensor = _MixRows.apply(self.weight, x.to(compute_dtype(x)))  # type: ignore[no-untyped-call]
        return out

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return one [B, r, d] view per entry of `rows`."""
        mixed: Tensor = self(x)
        return torch.split(mixed, list(self.rows), dim=1)

    def extra_repr(self) -> str:
        """Inputs and rows."""
        return f"n={self.n}, rows={self.rows}"


def multiply_pairs(x: Tensor, first: Tensor, second: Tensor, head: Tensor | None = None) -> Tensor:
    """Return products [B, P] of pairs of vectors of x [B, n, d]: `torch.bmm(x, x.mT)[:, first, second]` in one kernel.

    `head` are vectors to put before those of x. The dtype is autocast's if enabled, else that of their concatenation.
    """
    dtype = compute_dtype(x) if head is None else torch.promote_types(compute_dtype(x), compute_dtype(head))
    x = x.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        return dots(x, first, second, head=None if head is None else head.to(x.dtype))


class _ProductTransposed(torch.autograd.Function):
    """A B^T for a batch of matrices."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a, b.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        a, b = ctx.saved_tensors
        da = torch.bmm(grad, b) if ctx.needs_input_grad[0] else None
        db = torch.bmm(grad.mT, a) if ctx.needs_input_grad[1] else None
        return da, db


def multiply_transposed(a: Tensor, b: Tensor) -> Tensor:
    """Return A B^T [B, n, k] of a [B, n, d] and b [B, k, d], in autocast's dtype if enabled."""
    dtype = compute_dtype(a)
    out: Tensor = _ProductTransposed.apply(a.to(dtype), b.to(dtype))  # type: ignore[no-untyped-call]
    return out


def multiply_mixtures(x: Tensor, weight: Tensor) -> Tensor:
    """Return x (W x)^T [B, n, k] of x [B, n, d] and weight [k, n], in autocast's dtype if enabled."""
    x = x.to(compute_dtype(x))
    with without_autocast(x):
        return mixed_dots(x, weight)


def multiply_and_mix(x: Tensor, weight: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor]:
    """Return x (W x)^T [B, n, k] and V x [B, m, d] of x [B, n, d], weight [k, n] and mixing [m, n] in one pass over x.

    Both are in autocast's dtype if enabled.
    """
    x = x.to(compute_dtype(x))
    with without_autocast(x):
        return mix_and_multiply(x, weight, mixing)


class FactorizationMachine(nn.Module):
    """Products of the n vectors of x with k mixtures of them: X Y^T, [B, n, k].

    Example:
        >>> FactorizationMachine()(torch.randn(2, 8, 16), torch.randn(2, 4, 16)).shape
        torch.Size([2, 8, 4])
    """

    def forward(self, x: Tensor, mixtures: Tensor) -> Tensor:
        """x [B, n, d], mixtures [B, k, d] (= P^T X, from a FeatureMix) -> [B, n, k]."""
        return multiply_transposed(x, mixtures)


class _Dots(torch.autograd.Function):
    """The strict lower triangle of X X^T, row by row."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        n = x.shape[1]
        i, j = torch.tril_indices(n, n, offset=-1, device=x.device)
        return torch.bmm(x, x.mT).flatten(1).index_select(1, i * n + j)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        (x,) = ctx.saved_tensors
        steps = torch.arange(x.shape[1], device=x.device)
        low, high = torch.minimum(steps[:, None], steps), torch.maximum(steps[:, None], steps)
        # Entry (high, low) is at high (high - 1) / 2 + low. The diagonal has no entry: it reads any and is set to zero.
        place = (high * (high - 1) // 2 + low).clamp(max=grad.shape[1] - 1)
        both = grad.index_select(1, place.flatten()).view(-1, *place.shape)
        return torch.bmm(torch.where(high == low, 0.0, both).to(x.dtype), x)


class DotInteraction(nn.Module):
    """Dot products of all pairs of n vectors: the strict lower triangle of X X^T row by row, [B, n (n - 1) / 2].

    Args:
        n: vectors.

    Example:
        >>> DotInteraction(3)(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3])
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        if n < 2:
            raise ValueError(f"DotInteraction needs at least two vectors to pair, got n={n}")
        self.n, self.width = n, n * (n - 1) // 2

    def forward(self, x: Tensor) -> Tensor:
        """x [B, n, d] -> [B, n (n - 1) / 2]."""
        out: Tensor = _Dots.apply(x.to(compute_dtype(x)))  # type: ignore[no-untyped-call]
        return out
