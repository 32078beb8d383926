"""The Triton attentions of beams as torch ops, so that torch.compile sees a call and not Python."""

import torch
from torch import Tensor

from loka.kernels.beam_attention import triton_kernels as kernels


@torch.library.custom_op("loka::beam_attention", mutates_args=())
def beam_attention(q: Tensor, k: Tensor, v: Tensor | None, lengths: Tensor, scale: float) -> Tensor:
    """v None: the values are the keys."""
    return kernels.attend(q, k, k if v is None else v, lengths, scale, v is None)


@beam_attention.register_fake
def _(q, k, v, lengths, scale):  # type: ignore[no-untyped-def]
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.custom_op("loka::ancestor_attention", mutates_args=())
def ancestor_attention(q: Tensor, k: Tensor, v: Tensor, ancestors: Tensor, scale: float) -> Tensor:
    """See `triton_kernels.ancestors`."""
    return kernels.ancestors(q, k, v, ancestors, scale)


@ancestor_attention.register_fake
def _(q, k, v, ancestors, scale):  # type: ignore[no-untyped-def]
    return torch.empty_like(q, memory_format=torch.contiguous_format)
