"""Products with mixtures: a program loops over examples. Memory-bound: x and the results are read or written once.

    Y = W X [k, d],   P = X Y^T [n, k],                 Z = V X [m, d] (optional: mixtures that are results themselves)
    dY = dP^T X,      dX = dP Y + W^T dY + V^T dZ,      dW += dY X^T,      dV += dZ X^T

As batched GEMMs of 24 columns these read x three times forward and six times backward, and write Y and dY, at a
fraction of the memory bandwidth: no library has tiles for them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.scaled_mm.triton_kernels import processors
from loka.kernels.strides import next_power_of_2
from loka.kernels.tile import INTERPRETED, multiply
from loka.kernels.triton_launcher import quick

# (programs per multiprocessor, warps, stages) without V by the largest number of elements of an example: up to 16,384
# the fastest of a sweep on an H200, beyond it what fits into shared memory. With V see `launch_options`.
FORWARD = {8192: (3, 4, 3), 16384: (2, 8, 3), 32768: (1, 8, 2)}
GRADIENT = {8192: (2, 4, 3), 16384: (1, 8, 3), 32768: (1, 8, 1)}
SHARED_MEMORY = 227 << 10  # bytes that a program may use on Hopper


@triton.jit
def _load(ptr, stride: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Load a matrix of one example, zero-padded."""
    row, column = tl.arange(0, BR), tl.arange(0, BC)
    inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    return tl.load(ptr + row[:, None] * stride + column[None, :], inside, other=0.0)


@triton.jit
def _store(ptr, value, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    row, column = tl.arange(0, BR), tl.arange(0, BC)
    inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    tl.store(ptr + row[:, None] * COLUMNS + column[None, :], value, inside)


@quick
@triton.jit
def _forward(x_ptr, weight_ptr, mixing_ptr, out_ptr, mixed_ptr, B, N: tl.constexpr, D: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
             BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    weight = _load(weight_ptr, N, K, N, BK, BN)
    if M:
        mixing = _load(mixing_ptr, N, M, N, BM, BN)
    for example in tl.range(tl.program_id(0), B, tl.num_programs(0)):
        at = tl.full((), 0, tl.int64) + example
        x = _load(x_ptr + at * N * D, D, N, D, BN, BD)
        mixtures = multiply(weight, x, PREROUND).to(x.dtype)
        products = multiply(x, tl.trans(mixtures), PREROUND)
        _store(out_ptr + at * N * K, products.to(x.dtype), N, K, BN, BK)
        if M:
            _store(mixed_ptr + at * M * D, multiply(mixing, x, PREROUND).to(x.dtype), M, D, BM, BD)


@quick
@triton.jit
def _gradient(dp_ptr, dz_ptr, x_ptr, weight_ptr, mixing_ptr, dx_ptr, dw_ptr, dv_ptr, B, N: tl.constexpr, D: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
              BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """Compute dx and this program's parts of dW and dV."""
    weight = _load(weight_ptr, N, K, N, BK, BN)
    dw = tl.zeros((BK, BN), tl.float32)
    if M:
        mixing = _load(mixing_ptr, N, M, N, BM, BN)
        dv = tl.zeros((BM, BN), tl.float32)
    for example in tl.range(tl.program_id(0), B, tl.num_programs(0)):
        at = tl.full((), 0, tl.int64) + example
        x = _load(x_ptr + at * N * D, D, N, D, BN, BD)
        dp = _load(dp_ptr + at * N * K, K, N, K, BN, BK)
        mixtures = multiply(weight, x, PREROUND).to(x.dtype)
        dy = multiply(tl.trans(dp), x, PREROUND).to(x.dtype)
        dw += multiply(dy, tl.trans(x), PREROUND)
        dx = multiply(dp, mixtures, PREROUND) + multiply(tl.trans(weight), dy, PREROUND)
        if M:
            dz = _load(dz_ptr + at * M * D, D, M, D, BM, BD)
            dv += multiply(dz, tl.trans(x), PREROUND)
            dx += multiply(tl.trans(mixing), dz, PREROUND)
        _store(dx_ptr + at * N * D, dx.to(x.dtype), N, D, BN, BD)
    _store(dw_ptr + tl.program_id(0).to(tl.int64) * K * N, dw, K, N, BK, BN)
    if M:
        _store(dv_ptr + tl.program_id(0).to(tl.int64) * M * N, dv, M, N, BM, BN)


def _padded(count: int) -> int:
    return max(16, next_power_of_2(count))


def launch_options(n: int, d: int, k: int, m: int, *, gradient: bool) -> tuple[int, int, int] | None:
    """Return how the kernel is launched for n vectors of width d.

    With results, there are as many warps as the sums need registers, and as many stages as fit into shared memory. At
    the shapes of a Wukong that were swept on an H200 this is the fastest choice, or within 2 % of it.

    Args:
        n, d: vectors of an example, and their width.
        k: mixtures that x is multiplied by.
        m: mixtures that are results; 0 for none.
        gradient: of the backward kernel.

    Returns:
        Programs per multiprocessor, warps and stages; None if shared memory or, beyond a width of 256 with results,
        registers do not suffice.
    """
    n, d, k = _padded(n), _padded(d), _padded(k)
    if not m:
        table = GRADIENT if gradient else FORWARD
        return next((found for most, found in table.items() if n * d <= most), None)
    m = _padded(m)
    if d > 256:
        return None
    stage, fixed = 2 * n * d, 2 * (k + m) * n + 2 * m * d  # bytes: x; the weights, and what is stored
    sums = max(m, n) * d
    if gradient:
        stage, fixed = stage + 2 * (n * k + m * d), 2 * (k + m) * n + 4 * k * d
        sums = n * d + (k + m) * n - 4096
    stages = next((count for count in (3, 2, 1) if count * stage + fixed <= SHARED_MEMORY), None)
    if stages is None:
        return None
    warps = 4 if sums <= 16384 else 8
    return (2 if n * d <= (8192 if gradient else 16384) else 1), warps, stages


def _launch_options(n: int, d: int, k: int, m: int, *, gradient: bool) -> tuple[int, int, int]:
    found = launch_options(n, d, k, m, gradient=gradient)
    if found is None:
        raise ValueError(f"mixed_dots: {n} vectors of {d}, {k} mixtures and {m} results do not fit into a program")
    return found


def mixed_dots(x: Tensor, weight: Tensor, mixing: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return P [B, n, k] and Z [B, m, d] of contiguous x [B, n, d], weight [k, n] and mixing [m, n] in one dtype.

    Without a mixing, Z is None.
    """
    (rows, n, d), k = x.shape, weight.shape[0]
    m = 0 if mixing is None else mixing.shape[0]
    out = torch.empty(rows, n, k, dtype=x.dtype, device=x.device)
    mixed = None if mixing is None else torch.empty(rows, m, d, dtype=x.dtype, device=x.device)
    if d == 0:
        out.zero_()
    elif out.numel() or (mixed is not None and mixed.numel()):
        blocks = _padded(n), _padded(d), _padded(k), _padded(m)
        resident, warps, stages = _launch_options(n, d, k, m, gradient=False)
        programs = min(rows, resident * processors(x.device))
        _forward[(programs,)](
            x, weight, mixing, out, mixed, rows, n, d, k, m, *blocks, INTERPRETED, num_warps=warps, num_stages=stages
        )
    return out, mixed


def mixed_dots_gradient(
    dp: Tensor, dz: Tensor | None, x: Tensor, weight: Tensor, mixing: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx [B, n, d], and dW [k, n] and dV [m, n] in float32; dV is None without a mixing.

    Each program sums over its examples, then the parts are summed, so results are bitwise reproducible.
    """
    (rows, n, d), k = x.shape, weight.shape[0]
    m = 0 if mixing is None else mixing.shape[0]
    dx = torch.empty_like(x)
    new = {"dtype": torch.float32, "device": x.device}
    if not dx.numel() or not k + m:
        return dx.zero_(), torch.zeros(k, n, **new), None if mixing is None else torch.zeros(m, n, **new)
    blocks = _padded(n), _padded(d), _padded(k), _padded(m)
    resident, warps, stages = _launch_options(n, d, k, m, gradient=True)
    programs = min(rows, resident * processors(x.device))
    parts = torch.empty(programs, k, n, **new)
    mixing_parts = None if mixing is None else torch.empty(programs, m, n, **new)
    _gradient[(programs,)](
        dp, dz, x, weight, mixing, dx, parts, mixing_parts, rows, n, d, k, m, *blocks, INTERPRETED,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dx, parts.sum(0), None if mixing_parts is None else mixing_parts.sum(0)
