"""torchao's only GEMM of its own: a Triton kernel for 1x128 x 128x128 scales, bf16 output.

Its other float8 paths call `torch._scaled_mm`, the kernels of our `torch` backend. This kernel tunes 48 configurations
on the first call of every (K, N, power of two of M): expect tens of seconds per new shape. Columns are padded to 16,
those of a weight once, by `prepare`.
"""

from typing import Any

import torch
from torch import Tensor

from loka.formats import E4M3, Block, QTensor, Spec
from loka.kernels.backend import Verdict, no
from loka.kernels.op import fake_of, torch_op
from loka.kernels.prepared import Laid, laid_out, with_layout
from loka.kernels.scaled_mm.call import MatmulCall
from loka.kernels.scaled_mm.layout import aligned, cut, float_scales, fp8_gpu, library, up
from loka.kernels.strides import GRANULE

_MODULE = "torchao.kernel.blockwise_quantization"
_BLOCKS = (Block(1, 128), Block(128, 128))


def supports(call: MatmulCall, device: torch.device) -> Verdict:
    """Support E4M3 with 1x128 x 128x128 scales and bf16 output."""
    if not call.a.format == call.b.format == E4M3:
        return no(f"multiplies e4m3 only, not {call.a.format} @ {call.b.format}")
    if (call.a.block, call.b.block) != _BLOCKS:
        return no(
            f"has a kernel of its own for 1x128 x 128x128 only; for {call.a.block} x {call.b.block} it calls torch's"
        )
    if call.out_dtype != torch.bfloat16:
        return no(f"writes torch.bfloat16 only, not {call.out_dtype}")
    return float_scales(call.a, call.b) and fp8_gpu(device) and library(_MODULE, "torchao")


def prepare(weight: QTensor, a: Spec) -> QTensor:
    """Pad the columns to a multiple of 16."""
    return with_layout(weight, "torchao", a, _lay_out) if (a.block, weight.spec.block) == _BLOCKS else weight


def _lay_out(b: QTensor, a: Spec) -> Laid:
    return aligned(b.data, b.shape[0], up(b.shape[1], GRANULE)), b.scale.contiguous()


def run(a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """See `loka.kernels.scaled_mm`."""
    (m, k), n = a.shape, b.shape[0]
    if m == 0 or n == 0 or k == 0:
        return a.data.new_zeros(m, n, dtype=out_dtype)
    w, scale_b = laid_out(b, "torchao", a.spec, _lay_out)
    return cut(_gemm(aligned(a.data, m, w.shape[1]), a.scale.contiguous(), w, scale_b), m, n)


@torch_op("torchao_scaled_mm")
def _gemm(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    from torchao.kernel.blockwise_quantization import blockwise_fp8_gemm

    out: Tensor = blockwise_fp8_gemm(a, scale_a, b, scale_b, 128)
    return out


@fake_of(_gemm)
def _(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Any:
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)
