"""FBGEMM GenAI's CUTLASS kernels: the best row-scaled GEMM at M around 512 on an H200.

    tensor x tensor                    f8f8bf16             one scale: the product of both
    {row, tensor} x {row, tensor}      f8f8bf16_rowwise
    1x128 x 128x128                    f8f8bf16_groupwise   scales [K / 128, M] and [K / 128, N / 128]
    128x128 x 128x128                  f8f8bf16_blockwise

E4M3 in, bf16 out, built for compute capability 9.0. K and N are padded to 16, with block scales to 128. `prepare` does
that once for a weight and puts its scales in the kernel's order.
"""

from typing import Any

import torch
from torch import Tensor

from loka.formats import E4M3, ROW, TENSOR, Block, QTensor, Spec
from loka.kernels.backend import Verdict, no
from loka.kernels.op import fake_of, torch_op
from loka.kernels.prepared import Laid, laid_out, with_layout
from loka.kernels.scaled_mm.call import MatmulCall
from loka.kernels.scaled_mm.layout import aligned, cut, float_scales, fp8_gpu, library, row_scales, up, with_ones
from loka.kernels.strides import GRANULE

OUTER_MAJOR_SCALES = True

_MODULE = "fbgemm_gpu.experimental.gen_ai"
_GROUP, _SQUARE = Block(1, 128), Block(128, 128)
_KERNELS = {
    (TENSOR, TENSOR): "f8f8bf16",
    (ROW, ROW): "f8f8bf16_rowwise",
    (ROW, TENSOR): "f8f8bf16_rowwise",
    (TENSOR, ROW): "f8f8bf16_rowwise",
    (_GROUP, _SQUARE): "f8f8bf16_groupwise",
    (_SQUARE, _SQUARE): "f8f8bf16_blockwise",
}


def supports(call: MatmulCall, device: torch.device) -> Verdict:
    """Support E4M3 with the scale pairs above and bf16 output, on Hopper."""
    if not call.a.format == call.b.format == E4M3:
        return no(f"multiplies e4m3 only, not {call.a.format} @ {call.b.format}")
    if (call.a.block, call.b.block) not in _KERNELS:
        return no(f"has no kernel for {call.a.block} x {call.b.block} scales")
    if call.out_dtype != torch.bfloat16:
        return no(f"writes torch.bfloat16 only, not {call.out_dtype}")
    return float_scales(call.a, call.b) and fp8_gpu(device, (9, 0), only=9) and library(_MODULE, "fbgemm")


def prepare(weight: QTensor, a: Spec) -> QTensor:
    """Pad rows and columns; order the scales for the kernel that the scales of `a` select."""
    return with_layout(weight, "fbgemm", a, _lay_out) if (a.block, weight.spec.block) in _KERNELS else weight


def _lay_out(b: QTensor, a: Spec) -> Laid:
    granule = 128 if b.spec.block == _SQUARE else GRANULE
    columns, inner = up(b.shape[0], granule), up(b.shape[1], granule)
    if b.spec.block == _SQUARE:
        scale = (b.scale if a.block == _SQUARE else b.scale.t()).contiguous()
    else:
        scale = b.scale if a.block == b.spec.block == TENSOR else row_scales(b, columns)
    return aligned(b.data, columns, inner), scale


def run(a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """See `loka.kernels.scaled_mm`."""
    (m, k), n = a.shape, b.shape[0]
    if m == 0 or n == 0 or k == 0:
        return a.data.new_zeros(m, n, dtype=out_dtype)
    kernel = _KERNELS[a.spec.block, b.spec.block]
    w, scale_b = laid_out(b, "fbgemm", a.spec, _lay_out)
    rows = up(m, GRANULE) if kernel == "f8f8bf16_groupwise" else m  # its scales are loaded 16 bytes at a time along M
    if kernel == "f8f8bf16":
        scale_a = a.scale * scale_b
    elif kernel == "f8f8bf16_rowwise":
        scale_a, scale_b = row_scales(a, m).reshape(-1), scale_b.reshape(-1)
    elif kernel == "f8f8bf16_blockwise":
        scale_a = a.scale.contiguous()
    else:
        scale_a = with_ones(a.scale.t(), rows - m).contiguous()
    return cut(_gemm(aligned(a.data, rows, w.shape[1]), w, scale_a, scale_b, kernel, fast_accum), m, n)


@torch_op("fbgemm_scaled_mm")
def _gemm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, kernel: str, fast_accum: bool) -> Tensor:
    import fbgemm_gpu.experimental.gen_ai  # noqa: F401  (registers the ops)

    op = getattr(torch.ops.fbgemm, kernel)
    if kernel == "f8f8bf16":
        out: Tensor = op(a, b, scale_a, use_fast_accum=fast_accum)
    elif kernel == "f8f8bf16_rowwise":
        out = op(a, b, scale_a, scale_b, use_fast_accum=fast_accum)
    else:
        out = op(a, b, scale_a, scale_b)
    return out


@fake_of(_gemm)
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, kernel: str, fast_accum: bool) -> Any:
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)
