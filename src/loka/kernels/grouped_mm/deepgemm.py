"""DeepGEMM (the sgl-deep-gemm wheels): its contiguous grouped GEMM, 1x128 x 128x128 -> bf16, on Hopper.

DeepGEMM requires every expert's rows to start at a multiple of 128, so the rows are spread out before the GEMM and
collected after it: two copies that its own timings do not include. The padded number of rows has a static bound,
M + 128 E; rows between groups carry the index -1, which its kernel skips. Weights need no preparation.

With torch 2.11, sgl-deep-gemm 0.1.7 fails an assertion in every call; 0.1.2 and 0.1.4 work (NOTES.md, 2026-11-15).
"""

from typing import Any

import torch
from torch import Tensor

from loka.formats import E4M3, Block, QTensor
from loka.kernels.backend import Verdict, no
from loka.kernels.grouped_mm.call import GroupedCall, MoveCall, SwigluCall
from loka.kernels.op import fake_of, torch_op
from loka.kernels.scaled_mm.layout import float_scales, fp8_gpu, library

ALIGNMENT = 128
_BLOCKS = (Block(1, 128), Block(128, 128))


def supports(call: GroupedCall | SwigluCall | MoveCall, device: torch.device) -> Verdict:
    """Accept E4M3 operands with 1x128 x 128x128 scales, bf16 output, K a multiple of 128 and N of 64."""
    if not isinstance(call, GroupedCall) or call.swiglu:
        return no("has the grouped GEMM only: reference and triton do the steps around it")
    if call.a is None or call.b is None or not call.a.format == call.b.format == E4M3:
        return no(f"multiplies e4m3 only, not {call.in_dtype if call.a is None else call.a}")
    if (call.a.block, call.b.block) != _BLOCKS:
        return no(f"takes 1x128 x 128x128 scales, not {call.a.block} x {call.b.block}")
    if call.out_dtype != torch.bfloat16:
        return no(f"writes torch.bfloat16 only, not {call.out_dtype}")
    if call.k % 128 or call.n % 64:
        return no(f"wants K a multiple of 128 and N of 64, got {call.k} -> {call.n}")
    return float_scales(call.a, call.b) and fp8_gpu(device, (9, 0), only=9) and library("deep_gemm", "deepgemm")


def spread(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return each row's place, with groups starting at multiples of 128, and the expert of each place (-1 if empty)."""
    experts = offsets.shape[0] - 1
    counts = offsets[1:] - offsets[:-1]
    padded = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    starts = torch.cumsum(padded, 0) - padded
    index = torch.arange(rows, device=offsets.device, dtype=torch.int32)
    expert = torch.bucketize(index, offsets[1:].contiguous(), right=True)
    place = (starts[expert] + index - offsets[expert]).long()
    total = -(-rows // ALIGNMENT) * ALIGNMENT + experts * ALIGNMENT
    owner = torch.full((total,), -1, dtype=torch.int32, device=offsets.device)
    return place, owner.scatter(0, place, expert.to(torch.int32))


def run(x: QTensor, w: QTensor, offsets: Tensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """See `loka.kernels.grouped_mm.grouped_mm`. `fast_accum` is ignored."""
    if 0 in x.shape or 0 in w.shape:
        return x.data.new_zeros(x.shape[0], w.shape[1], dtype=out_dtype)
    place, owner = spread(offsets, x.shape[0])
    data = x.data.new_zeros(owner.shape[0], x.shape[1], dtype=torch.uint8)
    data[place] = x.data.view(torch.uint8)
    scale = x.scale.new_ones(owner.shape[0], x.scale.shape[1])
    scale[place] = x.scale
    out: Tensor = _gemm(data.view(x.data.dtype), scale, w.data.contiguous(), w.scale.contiguous(), owner)[place]
    return out


@torch_op("deepgemm_grouped_mm")
def _gemm(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, owner: Tensor) -> Tensor:
    import deep_gemm

    out = a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, scale_a), (b, scale_b), out, owner)
    return out


@fake_of(_gemm)
def _(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, owner: Tensor) -> Any:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)
