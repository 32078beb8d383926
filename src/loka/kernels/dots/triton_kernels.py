"""Pairwise products of an example's vectors, and their gradient, with one program per example.

    places     place[first[p], second[p]] = p, -1 elsewhere; a last element is set if a pair is out of range or repeats
    forward    G = X X^T in float32 on tensor cores; G[i, j] goes to column place[i, j] of the row, or nowhere (-1)
    backward   S[i, j] = dy[place[i, j]];  dX = (S + S^T) X

One small kernel makes the table of places in every call. A cached table would have to be invalidated when the indices
change, which compiled code does not report, and the compiler's CUDA graphs free memory that they do not know of. A
kernel cannot raise, so invalid pairs make every product NaN.

Each kernel reads X once: 27 vectors of 128 in bf16 are 7 KiB, and the time of copying B of them is the lower bound.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.plans import planned
from loka.kernels.strides import Maker, maker, next_power_of_2
from loka.kernels.triton_bound import Bound, bind
from loka.kernels.triton_launcher import quick


@quick
@triton.jit
def _places(first_ptr, second_ptr, place_ptr, pairs, n, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(place_ptr + i, -1, i < n * n)
    tl.debug_barrier()  # there is one program, so a barrier makes its writes visible
    listed = i < pairs
    a = tl.load(first_ptr + i, listed, 0)
    b = tl.load(second_ptr + i, listed, 0)
    inside = (a >= 0) & (a < n) & (b >= 0) & (b < n)
    cell = tl.where(inside, a * n + b, 0)
    tl.store(place_ptr + cell, i, listed & inside)
    tl.debug_barrier()
    mine = tl.load(place_ptr + cell, listed, -1) == i  # of two equal pairs one was overwritten
    tl.store(place_ptr + n * n, tl.max((listed & ~(inside & mine)).to(tl.int32), 0))


@quick
@triton.jit
def _dots(x_ptr, head_ptr, place_ptr, y_ptr, n, heads, d, pairs, N: tl.constexpr, D: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    i, k = tl.arange(0, N), tl.arange(0, D)
    inside = (i[:, None] < n) & (k[None, :] < d)
    if HEAD:  # the first vectors are in another tensor
        mine = inside & (i[:, None] >= heads)
        x = tl.load(x_ptr + b * (n - heads) * d + (i[:, None] - heads) * d + k[None, :], mine, 0.0)
        theirs = (i[:, None] < heads) & (k[None, :] < d)
        first = tl.load(head_ptr + b * heads * d + i[:, None] * d + k[None, :], theirs, 0.0)
        x = tl.where(i[:, None] < heads, first, x)
    else:
        x = tl.load(x_ptr + b * n * d + i[:, None] * d + k[None, :], inside, 0.0)
    if WIDE:
        gram = tl.dot(x, tl.trans(x), input_precision="ieee")
    else:
        gram = tl.dot(x, tl.trans(x))
    j = tl.arange(0, N)
    there = (i[:, None] < n) & (j[None, :] < n)
    place = tl.load(place_ptr + i[:, None] * n + j[None, :], there, -1)
    if tl.load(place_ptr + n * n) != 0:  # invalid pairs: fill all columns, as some get no product
        gram = tl.full((N, N), float("nan"), tl.float32)
        flat = i[:, None] * N + j[None, :]
        for start in range(0, pairs, N * N):
            tl.store(y_ptr + b * pairs + start + flat, gram.to(y_ptr.dtype.element_ty), start + flat < pairs)
    tl.store(y_ptr + b * pairs + place, gram.to(y_ptr.dtype.element_ty), place >= 0)


@quick
@triton.jit
def _dots_gradient(dy_ptr, x_ptr, place_ptr, dx_ptr, n, d, pairs, N: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    i, k = tl.arange(0, N), tl.arange(0, D)
    j = tl.arange(0, N)
    there = (i[:, None] < n) & (j[None, :] < n)
    here = tl.load(place_ptr + i[:, None] * n + j[None, :], there, -1)
    across = tl.load(place_ptr + j[None, :] * n + i[:, None], there, -1)
    s = tl.load(dy_ptr + b * pairs + here, here >= 0, 0.0).to(tl.float32)
    s += tl.load(dy_ptr + b * pairs + across, across >= 0, 0.0).to(tl.float32)
    s = tl.where(tl.load(place_ptr + n * n) != 0, float("nan"), s)
    inside = (i[:, None] < n) & (k[None, :] < d)
    x = tl.load(x_ptr + b * n * d + i[:, None] * d + k[None, :], inside, 0.0)
    if WIDE:
        dx = tl.dot(s, x, input_precision="ieee")
    else:
        dx = tl.dot(s.to(x.dtype), x)
    tl.store(dx_ptr + b * n * d + i[:, None] * d + k[None, :], dx.to(dx_ptr.dtype.element_ty), inside)


def _padded_sizes(n: int, d: int) -> tuple[int, int]:
    return max(16, next_power_of_2(n)), max(16, next_power_of_2(d))


@planned
def _plan_places(pairs: int, n: int, device: torch.device) -> tuple[Maker, Bound]:
    launch = bind(_places, (1,), pairs, n, next_power_of_2(max(n * n, pairs, 1)), num_warps=8)
    return maker((n * n + 1,), torch.int32, device), launch


def places(first: Tensor, second: Tensor, n: int) -> Tensor:
    """Return int32 [n * n + 1]: the column of every pair (i, j) or -1, and last whether any pair is invalid."""
    make, launch = _plan_places(first.shape[0], n, first.device)
    place = make()
    launch(first, second, place)
    return place


@planned
def _plan_dots(shape: tuple[int, int, int], heads: int, pairs: int, dtype: torch.dtype, device: torch.device) -> tuple[Maker, Bound | None]:  # fmt: skip
    """Without a launch if there is nothing to multiply."""
    b, n, d = shape
    make = maker((b, pairs), dtype, device)
    if not (b and pairs):
        return make, None
    size, width = _padded_sizes(n + heads, d)
    warps = 2 if size <= 32 else 4
    return make, bind(_dots, (b,), n + heads, heads, d, pairs, size, width, heads > 0, dtype == torch.float32, num_warps=warps)  # fmt: skip


def dots(x: Tensor, head: Tensor | None, place: Tensor, pairs: int) -> Tensor:
    """Return [B, pairs] of x [B, n, d], preceded by the vectors of head [B, m, d] if given."""
    make, launch = _plan_dots(x.shape, 0 if head is None else head.shape[1], pairs, x.dtype, x.device)
    y = make()
    if launch is not None:
        launch(x, head, place, y)
    return y


@planned
def _plan_gradient(shape: tuple[int, int, int], pairs: int, dtype: torch.dtype, device: torch.device) -> tuple[Maker, Bound | None]:  # fmt: skip
    b, n, d = shape
    size, width = _padded_sizes(n, d)
    launch = bind(
        _dots_gradient, (b,), n, d, pairs, size, width, dtype == torch.float32, num_warps=2 if size <= 32 else 4
    )
    return maker(shape, dtype, device), launch if b else None


def dots_gradient(dy: Tensor, x: Tensor, place: Tensor) -> Tensor:
    """Return dx [B, n, d] of dy [B, pairs] and x [B, n, d]."""
    make, launch = _plan_gradient(x.shape, dy.shape[1], x.dtype, x.device)
    dx = make()
    if launch is not None:
        launch(dy, x, place, dx)
    return dx
