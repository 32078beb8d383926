"""Pairwise products as torch ops. Where a pair goes is a small table, made once for every pair of index tensors."""

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from loka.kernels.dots import triton_kernels as kernels
from loka.kernels.dots.pairs import check_pairs
from loka.kernels.op import fake_of, torch_op

_PLACES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def places(first: Tensor, second: Tensor, n: int) -> Tensor:
    """[n, n] int32: the number of the pair (i, j), or -1."""
    counted = not first.is_inference() and not second.is_inference()
    known = _PLACES.get(first) if counted else None
    if known is not None and known[0] is second and known[1:4] == (first._version, second._version, n):
        return known[4]  # type: ignore[no-any-return]
    check_pairs(first, second, n)  # a pair that occurs twice has two places and would get one
    table = torch.full((n * n,), -1, dtype=torch.int32, device=first.device)
    table[first * n + second] = torch.arange(first.shape[0], dtype=torch.int32, device=first.device)
    table = table.view(n, n)
    if counted:
        _PLACES[first] = (second, first._version, second._version, n, table)
    return table


@torch_op("dots")
def dots(x: Tensor, head: Tensor | None, first: Tensor, second: Tensor) -> Tensor:
    """[B, P]."""
    n = x.shape[1] + (0 if head is None else head.shape[1])
    return kernels.dots(x, head, places(first, second, n), first.shape[0])


@fake_of(dots)
def _(x, head, first, second):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], first.shape[0])


@torch_op("dots_gradient")
def dots_gradient(dy: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """dx [B, n, d]."""
    return kernels.dots_gradient(dy, x, places(first, second, x.shape[1]))


@fake_of(dots_gradient)
def _(dy, x, first, second):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)
