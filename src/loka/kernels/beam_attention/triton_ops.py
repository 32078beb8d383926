"""Triton beam attention as torch ops, so that torch.compile does not trace the launch code."""

import torch
from torch import Tensor

from loka.kernels.beam_attention import triton_kernels as kernels
from loka.kernels.beam_attention.triton_low_kernels import attend_low
from loka.kernels.beam_attention.triton_low_kernels import fits as fits
from loka.kernels.op import fake_of, torch_op
from loka.kernels.quantize.triton_kernels import aligned


@torch_op("beam_attention")
def beam_attention(q: Tensor, k: Tensor, v: Tensor | None, lengths: Tensor, scale: float) -> Tensor:
    """See `triton_kernels.attend`. If v is None, the keys are also the values."""
    return kernels.attend(q, k, k if v is None else v, lengths, scale, v is None)


@fake_of(beam_attention)
def _(q, k, v, lengths, scale):  # type: ignore[no-untyped-def]
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch_op("beam_attention_low")
def beam_attention_low(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """See `triton_low_kernels.attend_low`."""
    return attend_low(q, k, v, lengths, scale)


@fake_of(beam_attention_low)
def _(q, k, v, lengths, scale):  # type: ignore[no-untyped-def]
    return torch.empty_like(q, memory_format=torch.contiguous_format)


ancestor_attention = torch_op("ancestor_attention", mutates=("keys", "values"))(kernels.ancestors)


@fake_of(ancestor_attention)
def _(q, k, v, keys, values, table, scale, keep, fp8, pow2):  # type: ignore[no-untyped-def]
    requests, beams, heads, d = q.shape
    if not fp8:
        return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(0, dtype=torch.float32)
    rows = requests * beams
    return aligned(rows, heads * d, torch.float8_e4m3fn, q.device), q.new_empty(rows, 1, dtype=torch.float32)
