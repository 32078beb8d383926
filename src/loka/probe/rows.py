"""Which rows of a tensor a look takes, and how, without copying the tensor."""

import torch
from torch import Tensor


def choose_rows(count: int, wanted: int, generator: torch.Generator) -> Tensor | None:
    """One row from each of `wanted` equal parts of the batch, in order; None for all of them."""
    if count <= wanted:
        return None
    places = (torch.arange(wanted) + torch.rand(wanted, generator=generator, dtype=torch.float64)) * (count / wanted)
    return places.long().clamp(max=count - 1)


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
