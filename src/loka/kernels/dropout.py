"""Dropout as our kernels draw it: which elements are kept is a function of (seed, stream, row, column), so that backward, another kernel or a test draws the same.

    y = x * kept / (1 - p)

    k0, k1  = philox(key = seed, counter = (row, stream))             64 bits for each row: far from free, and made once a row
    w       = (k0 + column * 2^32 / golden ratio) * A                 a word of 32 bits times one of 31, for each element
    h       = (high(w) ^ low(w) ^ k1) * B                             folded to 32 bits, and times an odd number modulo 2^32
    kept    = h >= p 2^32                                             as signed numbers, against p 2^32 - 2^31: the same share

The seed is a tensor on the device, drawn from torch's generator once for a call of a chain: torch.manual_seed decides it, activation checkpointing draws it again, and a CUDA graph has a
new one in every replay. The stream is the place of the layer in the chain.

Philox for each element would take some fifty instructions in the epilogue of a GEMM, more than all else there; its four words for four neighbours would have to change threads. Here an
element takes seven or eight. Rows have 64 random bits of their own, so that no two rows share their draws, shifted or not; within a row a counter runs through the mix. Over 2048 rows of 8192
columns the power at every frequency, the correlation of a row with itself at every lag and its sum have the mean and the spread that independent draws have, for p from 0.02 to 0.8.

A value in FP8 with a given scale is not multiplied: kept / (1 - p) is a choice between zero and the same code, and 1 / (1 - p) goes into the scale of the tensor. So the largest magnitudes, the
scales that come from them and what saturates are those of the layer without dropout, whatever p is in this step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from loka.formats.philox import philox

WORD = 0xFFFFFFFF
STRIDE, FIRST, SECOND = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


class Dropout(NamedTuple):
    """One draw.

    Args:
        p: the share that is dropped, 0 <= p < 1.
        seed: one int64 on the device of what is dropped.
        stream: tells layers apart that share a seed.
    """

    p: float
    seed: Tensor
    stream: int = 0


def check_p(p: float, where: str = "dropout") -> float:
    """p itself, or ValueError: all dropped has no 1 / (1 - p)."""
    if not 0.0 <= p < 1.0:
        raise ValueError(
            f"{where}: p is {p}, a chain draws with 0 <= p < 1; hint: loka.revert(model) runs the module itself"
        )
    return p


def factor_of(p: float) -> float:
    """What the kept ones are multiplied by."""
    return 1.0 / (1.0 - p)


def threshold_of(p: float) -> int:
    """p as the kernels compare it: kept where the hash, a signed word, is not below."""
    return min(round(p * 2**32), WORD) - 2**31


def keep_mask(dropout: Dropout, rows: int | Tensor, columns: int) -> Tensor:
    """Which elements are kept.

    Args:
        dropout: the draw.
        rows: how many, or the numbers of some, int64 [n].
        columns: how many.

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
    """x [M, N] with zeros where it is dropped, not yet multiplied by 1 / (1 - p). What is not finite stays so, as in torch."""
    return x if dropout is None else x * keep_mask(dropout, x.shape[0], x.shape[1]).to(x.dtype)


def draws(dropout: Dropout | None, device: torch.device) -> bool:
    """Whether there is a draw; ValueError for one that cannot be made."""
    if dropout is None:
        return False
    check_p(dropout.p)
    seed = dropout.seed
    if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != device:
        raise ValueError(
            f"the seed of a dropout is one int64 on {device}, got {tuple(seed.shape)} of {seed.dtype} on {seed.device}"
        )
    return True


# A draw as an op takes it, as its launcher has it, and as a kernel takes it.


def taken_apart(dropout: Dropout | None) -> tuple[Tensor | None, float, int]:
    """Seed, p and stream."""
    return (None, 0.0, 0) if dropout is None else (dropout.seed, dropout.p, dropout.stream)


def draw_from(seed: Tensor | None, p: float, stream: int) -> Dropout | None:
    """The inverse."""
    return None if seed is None else Dropout(p, seed, stream)


def draw_arguments(dropout: Dropout | None) -> tuple[Tensor | None, int, float, int]:
    """Seed, threshold, factor and stream."""
    if dropout is None:
        return None, 0, 1.0, 0
    return dropout.seed, threshold_of(dropout.p), factor_of(dropout.p), dropout.stream
