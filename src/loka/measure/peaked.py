"""Operands of attention on which a wrong scale of the scores shows: the set `peaked` of the gate.

Where softmax has few keys, or scores near one another, a scale that is off by 2 % moves the result by less than the
rounding of 16-bit weights. Here one key of each query has a score of about `ABOVE`, the others of about 0, and its value
is zero, in half of the columns if values are keys. What is left is the sum over the other keys, all of them with weights
of about e^-ABOVE, which such a scale changes by 2 % of ABOVE, sixteen percent. Weights are rounded relative to their size,
and stay within the normal numbers of fp16, so correct kernels err on this set as on any other.
"""

import torch
from torch import Tensor

from loka.measure import inputs

NAME = "peaked"
ABOVE = 8.0  # the weights of the other keys are e^-8 = 3e-4; the smallest normal number of fp16 is 6e-5
REST = 0.25  # size of the other keys


def draw_queries(rows: int, d: int, *, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Draw queries whose products with the key of `make_key` are nearly equal: fixed signs, sizes from 0.5 to 1.5."""
    sizes = 1 + inputs.draw(rows, d, distribution="uniform", seed=seed, device=device) / 2
    return (sizes * _signs(d, device)).to(dtype)


def make_key(d: int, score: float, *, scale: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the key [d] whose scores are about `score`. Its right half is zero."""
    left = (d + 1) // 2
    key = _signs(d, device) * (score / (scale * left))
    key[left:] = 0
    return key.to(dtype)


def _signs(d: int, device: torch.device) -> Tensor:
    """Return signs that are as often + as -, and do not repeat in steps of any power of two."""
    at = torch.arange(d, device=device)
    return 1.0 - 2.0 * ((at * (at + 1) // 2) % 2)
