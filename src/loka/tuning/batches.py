"""Keep the first batches of an iterable, and notice batches that are no new data.

Choices are made on the first half and verified on the second, so the halves must not hold the same examples. An
iterable that starts over (`itertools.cycle`) is cut where it does. It is recognized by the first batch alone: an
iterable that shuffles before it starts over is not.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from loka.units.example import tensors_in
from loka.units.undisturbed import same_randomness

MOST = 64  # batches to keep at most


def keep_batches(batches: Iterable[Any]) -> tuple[list[Any], list[str]]:
    """Return the first batches of an iterable, up to where it starts over, and notes for the record.

    Raises:
        ValueError: a batch was overwritten while later ones were read, or has a tensor with a graph.
    """
    kept, versions = [], []
    with same_randomness():  # a loader that shuffles draws from the generators of the process
        for batch in islice(iter(batches), MOST):
            kept.append(batch)
            versions.append(versions_of(list(tensors_in(batch))))
    for index, (batch, before) in enumerate(zip(kept, versions, strict=True)):
        if any(t.grad_fn is not None for t in tensors_in(batch)):
            raise ValueError(
                f"batch {index} has a tensor that was computed with gradients, and backward through it works only "
                "once; hint: .detach() it, or compute it in the step"
            )
        if versions_of(list(tensors_in(batch))) != before:
            raise ValueError(
                f"batch {index} was overwritten while later batches were read, so all of them would be the same data; "
                "hint: yield new tensors, or clones"
            )
    again = next((index for index in range(1, len(kept)) if _are_alike(kept[index], kept[0])), None)
    if again is None:
        return kept, []
    if again == 1:
        return kept, [
            (
                "batches 0 and 1 are the same: what is chosen on one half of the batches may not be verified on other "
                "data, and intervals are too narrow"
            )
        ]
    return kept[:again], [f"batch {again} is batch 0 again, so only the first {again} batches are used"]


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the version counter of every tensor, which changes when it is written to; 0 for inference tensors."""
    return [0 if t.is_inference() else t._version for t in tensors]


def _are_alike(batch: Any, other: Any) -> bool:
    """Check whether two batches hold the same values. Objects of other libraries are compared by identity."""
    (leaves, spec), (others, like) = pytree.tree_flatten(batch), pytree.tree_flatten(other)
    return (
        spec == like and any(isinstance(leaf, Tensor) for leaf in leaves) and all(map(_have_same_value, leaves, others))
    )


def _have_same_value(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        plain = a.layout == b.layout == torch.strided and a.device == b.device and a.dtype == b.dtype
        return plain and torch.equal(a, b)
    return isinstance(a, (str, bytes, int, float)) and type(a) is type(b) and a == b
