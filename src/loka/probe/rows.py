"""Which rows of a tensor a look takes, and how, without copying the tensor."""

import torch
from torch import Tensor

CLUSTER = 8  # rows of one example that are looked at together


def choose_rows(count: int, wanted: int, generator: torch.Generator) -> Tensor | None:
    """One row from each of `wanted` equal parts of the batch, in order; None for all of them."""
    if count <= wanted:
        return None
    places = (torch.arange(wanted) + torch.rand(wanted, generator=generator, dtype=torch.float64)) * (count / wanted)
    return places.long().clamp(max=count - 1)


def choose_clusters(examples: int, per: int, wanted: int, generator: torch.Generator) -> tuple[Tensor | None, int]:
    """About `wanted` rows of examples that have `per` rows each, some rows of an example next to each other.

    Returns the rows (None for all) and how many lie together: enough to see how the rows of an example hang together, few enough to see many examples.
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
    """A copy of some rows [*, channels]; rows are what is left of the tensor besides its channel dimension."""
    if channel == -2:
        tensor = tensor.transpose(-1, -2)
    if index is None:
        return tensor.reshape(-1, tensor.shape[-1]).clone()
    if tensor.is_contiguous():
        return tensor.reshape(-1, tensor.shape[-1])[index.to(tensor.device, non_blocking=True)]
    # Not a reshape, which would copy all of it to give a few rows.
    places = torch.unravel_index(index, tensor.shape[:-1])
    return tensor[tuple(place.to(tensor.device, non_blocking=True) for place in places)]


def take_example(right: Tensor, generator: torch.Generator) -> Tensor:
    """A copy of one matrix [N, K] of a batch of them."""
    flat = right.reshape(-1, *right.shape[-2:])
    return flat[int(torch.randint(flat.shape[0], (), generator=generator))].clone()
