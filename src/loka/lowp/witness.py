"""Notice that a weight was changed where no version counter shows it.

`weight.data.copy_(...)` (the usual EMA snippet, many loaders, training loops without an optimizer), NumPy views and collectives move no counter, so whoever keeps a quantised weight
cannot ask. A witness keeps a little of what the weight held and compares bits, on some of the calls:

    few     a lattice of at most 8 x 8 elements: sees what writes all of a weight, for a copy of 64 elements
    sums    of the bits of every row and every column, as integers: exact in any order, sees any write but one that keeps them all, for two reads of the weight

On the CPU the few are compared in every call. On a GPU a comparison waits for the device, so it is made in the first calls and then in one of 64. The sums are compared in one of
64 calls on the CPU and one of 1,024 on a GPU. A captured CUDA graph asks nothing.
"""

import warnings

import torch
from torch import Tensor

LATTICE = 8  # sampled rows and columns
FEW_EVERY = {"cpu": 1}  # calls from one comparison of the few to the next, by device
SUMS_EVERY = {"cpu": 64}
FEW_ELSEWHERE, SUMS_ELSEWHERE = 64, 1024
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StaleWeightWarning(UserWarning):
    """A weight was changed through `.data`, or otherwise unseen, after it was quantised."""


class Witness:
    """What a weight held when it was quantised.

    Args:
        weight: [N, K], as it was read.

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
        """Whether the weight still is what it was, as far as this call looks. Never asked while a graph is captured or traced."""
        if (weight.device, weight.dtype) != self._place:  # moved or cast, which modules are told of
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
    """Say that a site ran on an old weight, and what happens from now on."""
    warnings.warn(
        f"{site or 'a converted linear'}: the weight was changed after it was quantised, by a write that nothing announces (`.data`, a NumPy view, a collective; any write to a frozen chain). "
        "Calls since then may have used the old one. From now on it is quantised in every forward; hint: loka.refresh(model) after such a change keeps it quantised once",
        StaleWeightWarning,
        stacklevel=2,
    )
