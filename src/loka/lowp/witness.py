"""Detect that a weight was changed without moving its version counter.

`weight.data.copy_(...)` (the usual EMA snippet, many loaders, training loops without an optimizer), NumPy views and
collectives do not move the counter. A witness keeps a little of the weight's contents and compares bits in some calls:

    few     a lattice of at most 8 x 8 elements: detects writes to the whole weight, for a copy of 64 elements
    sums    of the bits of every row and column, as integers, so exact in any order: detects any write that does not
            preserve all of them, for two reads of the weight

On the CPU the few are compared in every call. On a GPU a comparison synchronizes with the device, so it is made in the
first calls and then in one of 64. The sums are compared in one of 64 calls on the CPU and one of 1,024 on a GPU. A
captured CUDA graph compares nothing.
"""

import warnings

import torch
from torch import Tensor

LATTICE = 8  # sampled rows and columns
FEW_EVERY = {"cpu": 1}  # compare once in so many calls, by device
SUMS_EVERY = {"cpu": 64}
FEW_ELSEWHERE, SUMS_ELSEWHERE = 64, 1024
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StaleWeightWarning(UserWarning):
    """A weight was changed through `.data`, or otherwise unseen, after it was quantized."""


class Witness:
    """A fingerprint of a weight at the time it was quantized.

    Args:
        weight: [N, K].

    Example:
        >>> witness = Witness(layer.weight)
        >>> layer.weight.data.mul_(2)
        >>> witness.agrees(layer.weight)
        False
    """

    def __init__(self, weight: Tensor) -> None:
        self._take(weight)

    def _take(self, weight: Tensor) -> None:
        self._few, self._sums = _few(weight), _sums(weight)
        self._place, self._calls = (weight.device, weight.dtype), 0

    def agrees(self, weight: Tensor) -> bool:
        """Check whether the weight is unchanged, as far as this call compares it.

        Must not be called while a graph is captured or traced.
        """
        if (weight.device, weight.dtype) != self._place:  # moved or cast, which modules handle in `_apply`
            self._take(weight)
        self._calls += 1
        kind = weight.device.type
        every = FEW_EVERY.get(kind, FEW_ELSEWHERE)
        if self._calls % SUMS_EVERY.get(kind, SUMS_ELSEWHERE) == 0:
            return torch.equal(_sums(weight), self._sums)
        if self._calls % every == 0 or (self._calls < every and self._calls & (self._calls - 1) == 0):
            return torch.equal(_few(weight), self._few)
        return True


def _bits(weight: Tensor) -> Tensor:
    return weight.view(_BITS[weight.element_size()])


@torch.no_grad()
def _few(weight: Tensor) -> Tensor:
    n, k = weight.shape
    lattice = weight.detach()[:: max(-(-n // LATTICE), 1), :: max(-(-k // LATTICE), 1)]
    return _bits(lattice.clone(memory_format=torch.contiguous_format))


@torch.no_grad()
def _sums(weight: Tensor) -> Tensor:
    bits = _bits(weight.detach().contiguous())
    return torch.cat([bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)])


def warn_stale(site: str) -> None:
    """Warn that a site ran on an old weight, and say what happens from now on."""
    warnings.warn(
        f"{site or 'a converted linear'}: the weight was changed after it was quantized, by a write that moves no "
        "version counter (`.data`, a NumPy view, a collective) or any write to a frozen chain. Calls since then may "
        "have used the old weight. From now on it is quantized in every forward; "
        "hint: call loka.refresh(model) after such a change to keep it quantized once",
        StaleWeightWarning,
        stacklevel=2,
    )
