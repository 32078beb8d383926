"""PyTorch's own grouped GEMMs (CUTLASS): bf16, and FP8 with row scales on Hopper.

    torch.nn.functional.grouped_mm     bf16 in and out, compute capability 9.0 and newer for the fast kernel
    torch._scaled_grouped_mm           E4M3 x E4M3, scales of x [M] and of w [E, N], one per row, bf16 out, 9.x

Requirements, from the source of torch 2.11: `offs` are the ends of the groups (int32, without the leading 0), w is
column-major [E, K, N], rows start at multiples of 16 bytes. Other widths are refused, so weights need no preparation.
This backend has the GEMM only; sorting, SwiGLU and combining are left to other backends.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import E4M3, ROW, QTensor
from loka.kernels.backend import Verdict, no
from loka.kernels.grouped_mm.call import GroupedCall, MoveCall, SwigluCall
from loka.kernels.scaled_mm.layout import float_scales, fp8_gpu


def supports(call: GroupedCall | SwigluCall | MoveCall, device: torch.device) -> Verdict:
    """Accept bf16, or E4M3 with row scales, with bf16 output."""
    if not isinstance(call, GroupedCall):
        return no("has the grouped GEMM only: reference and triton do the steps around it")
    if call.swiglu:
        return no("its GEMM has no epilogue: use grouped_mm and swiglu_quantize")
    if call.out_dtype != torch.bfloat16:
        return no(f"writes torch.bfloat16 only, not {call.out_dtype}")
    if call.a is None or call.b is None:
        if call.in_dtype != torch.bfloat16:
            return no(f"multiplies bf16 or e4m3, not {call.in_dtype}")
        if call.k % 8 or call.n % 8:
            return no(f"wants widths that are multiples of 8 in bf16, got {call.k} -> {call.n}")
        return fp8_gpu(device, (9, 0))
    if not call.a.format == call.b.format == E4M3 or (call.a.block, call.b.block) != (ROW, ROW):
        return no(f"multiplies e4m3 with row scales, not {call.a} @ {call.b}")
    if call.k % 16 or call.n % 16:
        return no(f"wants widths that are multiples of 16 in FP8, got {call.k} -> {call.n}")
    return float_scales(call.a, call.b) and fp8_gpu(device, (9, 0), only=9)


def run(
    x: QTensor | Tensor, w: QTensor | Tensor, offsets: Tensor, *, out_dtype: torch.dtype, fast_accum: bool = False
) -> Tensor:
    """See `loka.kernels.grouped_mm.grouped_mm`."""
    if 0 in x.shape or 0 in w.shape:
        return (x.data if isinstance(x, QTensor) else x).new_zeros(x.shape[0], w.shape[1], dtype=out_dtype)
    ends = offsets[1:]
    if not isinstance(x, QTensor):
        assert isinstance(w, Tensor)
        return F.grouped_mm(x.contiguous(), w.contiguous().transpose(1, 2), offs=ends)
    assert isinstance(w, QTensor)
    return torch._scaled_grouped_mm(
        x.data.contiguous(), w.data.contiguous().transpose(1, 2), x.scale.reshape(-1), w.scale.flatten(1),
        offs=ends, out_dtype=out_dtype, use_fast_accum=fast_accum,
    )  # fmt: skip
