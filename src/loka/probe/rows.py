"""Choose rows of a tensor for a look, and copy them without copying the whole tensor."""

import torch
from torch import Tensor

CLUSTER = 8  # rows sampled per example


def choose_rows(count: int, wanted: int, generator: torch.Generator) -> Tensor | None:
    """Choose one row from each of `wanted` equal parts of the batch, in order; None for all rows."""
    if count <= wanted:
        return None
    places = (torch.arange(wanted) + torch.rand(wanted, generator=generator, dtype=torch.float64)) * (count / wanted)
    return places.long().clamp(max=count - 1)


def choose_clusters(examples: int, per: int, wanted: int, generator: torch.Generator) -> tuple[Tensor | None, int]:
    """Choose about `wanted` rows from examples of `per` rows each, several consecutive entries per example.

    Returns the rows (None for all) and the number per example: enough to see how rows of an example are correlated, few
    enough to cover many examples.
    """
    if examples * per <= wanted or per <= 1:
        return choose_rows(examples * per, wanted, generator), max(per, 1)
    together = min(per, max(1, min(CLUSTER, wanted // 2), -(-wanted // examples)))
    chosen = choose_rows(examples, max(1, wanted // together), generator)
    chosen = torch.arange(examples) if chosen is None else chosen
    parts = torch.arange(together) + torch.rand(len(chosen), together, generator=generator, dtype=torch.float64)
    inside = (parts * (per / together)).long().clamp(max=per - 1)
    return (chosen[:, None] * per + inside).reshape(-1), together


def take_rows(tensor: Tensor, channel: int, index: Tensor | None) -> Tensor:
    """Copy some rows [*, channels]. All dimensions but the channel dimension are flattened into rows."""
    if channel == -2:
        tensor = tensor.transpose(-1, -2)
    if index is None:
        return tensor.reshape(-1, tensor.shape[-1]).clone()
    if tensor.is_contiguous():
        return tensor.reshape(-1, tensor.shape[-1])[index.to(tensor.device, non_blocking=True)]
    # Not a reshape, which would copy the whole tensor.
    places = torch.unravel_index(index, tensor.shape[:-1])
    return tensor[tuple(place.to(tensor.device, non_blocking=True) for place in places)]


def take_example(right: Tensor, generator: torch.Generator) -> Tensor:
    """Copy one random matrix [N, K] of a batch."""
    flat = right.reshape(-1, *right.shape[-2:])
    return flat[int(torch.randint(flat.shape[0], (), generator=generator))].clone()
