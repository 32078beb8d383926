"""Dropout as a function of (seed, stream, row, column), so that backward, other kernels and tests draw the same mask.

    y = x * kept / (1 - p)

    k0, k1  = philox(key = seed, counter = (row, stream))     64 random bits per row: expensive, so once per row
    w       = (k0 + column * 2^32 / golden ratio) * A         a 32-bit word times a 31-bit one, per element
    h       = (high(w) ^ low(w) ^ k1) * B                     folded to 32 bits, times an odd number modulo 2^32
    kept    = h >= p 2^32                                     compared as signed words with p 2^32 - 2^31

The seed is a tensor on the device, drawn from torch's generator once per call of a chain. So torch.manual_seed
determines it, activation checkpointing draws the same seed again, and every replay of a CUDA graph gets a new one. The
stream is the index of the layer in the chain.

Philox per element would take some fifty instructions in the epilogue of a GEMM, more than everything else there, and
its four words for four neighbors would have to move between threads. Here an element takes seven or eight. Each row has
64 random bits of its own, so no two rows share their draws, shifted or not; within a row a counter runs through the
mix. Over 2048 rows of 8192 columns, the power at every frequency, the autocorrelation of a row at every lag and its sum
have the mean and the spread of independent draws, for p from 0.02 to 0.8.

FP8 values with a given scale are not multiplied by 1 / (1 - p): a code is kept or becomes zero, and the factor goes
into the tensor's scale. So the amax, the scales derived from it and saturation are those of the layer without dropout,
whatever p is in this step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from loka.formats.philox import philox

WORD = 0xFFFFFFFF
STRIDE, FIRST, SECOND = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


class Dropout(NamedTuple):
    """The parameters of one dropout mask.

    Args:
        p: the fraction that is dropped, 0 <= p < 1.
        seed: one int64, on the device of the tensor that is dropped.
        stream: distinguishes layers that share a seed.
    """

    p: float
    seed: Tensor
    stream: int = 0


def check_p(p: float, where: str = "dropout") -> float:
    """Return p, or raise ValueError. p = 1 is not supported: 1 / (1 - p) would be infinite."""
    if not 0.0 <= p < 1.0:
        raise ValueError(
            f"{where}: p is {p}, a chain draws with 0 <= p < 1; hint: loka.revert(model) runs the module itself"
        )
    return p


def factor_of(p: float) -> float:
    """Return the factor 1 / (1 - p) of the kept elements."""
    return 1.0 / (1.0 - p)


def threshold_of(p: float) -> int:
    """Return p as a signed 32-bit threshold: an element is kept if its hash is not below it."""
    return min(round(p * 2**32), WORD) - 2**31


def keep_mask(dropout: Dropout, rows: int | Tensor, columns: int) -> Tensor:
    """Return the mask of kept elements.

    Args:
        dropout: the parameters of the mask.
        rows: the number of rows, or the indices of some rows, int64 [n].
        columns: the number of columns.

    Returns:
        bool [rows, columns].

    Example:
        >>> keep_mask(Dropout(0.25, torch.tensor([7])), 1000, 64).float().mean()  # about 0.75
    """
    seed = dropout.seed.reshape(())
    at = torch.arange(rows, device=seed.device) if isinstance(rows, int) else rows
    zero = torch.zeros_like(at)
    k0, k1, _, _ = philox(at & WORD, zero + dropout.stream, zero, 0, (seed & WORD, (seed >> 32) & WORD))
    wide = ((k0[:, None] + torch.arange(columns, device=seed.device) * STRIDE) & WORD) * FIRST  # below 2^63
    h = (((wide >> 32) ^ wide ^ k1[:, None]) & WORD) * SECOND & WORD
    return (h ^ 2**31) >= threshold_of(dropout.p) + 2**31


def dropped(x: Tensor, dropout: Dropout | None) -> Tensor:
    """Return x [M, N] with dropped elements set to 0, not yet multiplied by 1 / (1 - p).

    A dropped NaN or Inf becomes NaN, as in torch.
    """
    return x if dropout is None else x * keep_mask(dropout, x.shape[0], x.shape[1]).to(x.dtype)


def draws(dropout: Dropout | None, device: torch.device) -> bool:
    """Return whether dropout applies; raise ValueError if its parameters are invalid."""
    if dropout is None:
        return False
    check_p(dropout.p)
    seed = dropout.seed
    if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != device:
        raise ValueError(
            f"a dropout seed is one int64 on {device}, got {tuple(seed.shape)} of {seed.dtype} on {seed.device}"
        )
    return True


# The same parameters as arguments of a torch op, and as arguments of a Triton kernel.


def taken_apart(dropout: Dropout | None) -> tuple[Tensor | None, float, int]:
    """Return (seed, p, stream), as a torch op takes them."""
    return (None, 0.0, 0) if dropout is None else (dropout.seed, dropout.p, dropout.stream)


def draw_numbers(p: float, stream: int, *, draw: bool) -> tuple[int, float, int]:
    """Return (threshold, factor, stream), as a Triton kernel takes them after the seed. `draw`: there is a seed."""
    return (threshold_of(p), factor_of(p), stream) if draw else (0, 1.0, 0)
