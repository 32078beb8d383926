"""Quantisation in plain traceable torch, for a caller that is compiled: Inductor fuses it with what makes x, and with whatever else reads x.

    amax  = max over each block of |x|, finite values only            [M, K] seen as [rows, r, columns, c]
    scale = max(amax / format_max, 2^-126), 1 where amax is 0
    q     = cast(clamp(x * (1 / scale))),   NaN and Inf as the law has them

Nothing here is a custom op, depends on data, or copies x. The transpose is quantised as x lies, under the block turned round, and turned when it is FP8: half
the bytes of turning x. Rows of the results start at multiples of 16 elements, as in our kernels.

In eager the bits are the law's. Under Inductor a GPU divides approximately where torch does not, so a scale may differ in its last bit, and an element that lies between two
codes may take the other. Eager it is slow, several passes over x: `auto` never picks it, it is asked for by name.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import E4M3, E5M2, SMALLEST_SCALE, TENSOR, QTensor, Spec, scale_from_amax, scale_shape
from loka.formats import quantize as quantize_by_law
from loka.formats.spec import WHOLE
from loka.kernels.backend import YES, Verdict, no
from loka.kernels.quantize.call import QuantizeCall, check_scale

ALIGNED = 16
COMPILE_TO_TIME = True  # its speed is that of the compiled code
any_alignment = True  # x is read as it lies


def supports(call: QuantizeCall, device: torch.device) -> Verdict:
    """E4M3 and E5M2 rounded to nearest, one level of scales, any block, on any device that torch compiles for."""
    for spec in (call.spec, call.transpose):
        if spec is None:
            continue
        if spec.format not in (E4M3, E5M2):
            return no(f"writes e4m3 and e5m2, which are a cast; {spec.format} is not")
        if spec.rounding != "nearest":
            return no(f"a cast rounds to nearest, not {spec.rounding}")
        if spec.scale == "e4m3":
            return no("two-level scales are not implemented here")
    if call.in_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return no(f"reads bf16, fp16 and fp32, not {call.in_dtype}")
    return YES


def run(
    x: Tensor,
    spec: Spec | None,
    *,
    scale: Tensor | None = None,
    transpose: Spec | None = None,
    transpose_scale: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[QTensor | None, QTensor | None]:
    """Quantise x [M, K], its transpose [K, M], or both. `generator` is the interface's: nothing here is random."""
    x = x.detach()
    if spec is not None:
        check_scale(spec, scale, x.shape)
    if transpose is not None:
        check_scale(transpose, transpose_scale, (x.shape[1], x.shape[0]))
    if x.numel() == 0:
        q = None if spec is None else quantize_by_law(x, spec, scale=scale)
        return q, None if transpose is None else quantize_by_law(x.T.contiguous(), transpose, scale=transpose_scale)
    q = None if spec is None else QTensor(*_quantize(x, spec, scale), spec)
    if transpose is None:
        return q, None
    if q is not None and _same(spec, transpose, scale, transpose_scale):
        return q, QTensor(_turn(q.data), q.scale, transpose)
    turned = None if transpose_scale is None or transpose.block == TENSOR else transpose_scale.t()
    data, made = _quantize(x, transpose.transposed, transpose_scale if turned is None else turned, align=False)
    return q, QTensor(_turn(data), made if made.dim() == 0 else made.t(), transpose)


def _same(spec: Spec | None, transpose: Spec, scale: Tensor | None, transpose_scale: Tensor | None) -> bool:
    """Whether the transpose is q turned round: one scale for all, the same one."""
    return spec == transpose and spec.block == TENSOR and scale is transpose_scale


def _quantize(x: Tensor, spec: Spec, scale: Tensor | None, *, align: bool = True) -> tuple[Tensor, Tensor]:
    """FP8 as x lies, and its scales, shaped as formats.scale_shape has them."""
    m, k = x.shape
    rows = m if spec.block.rows == WHOLE else min(spec.block.rows, m)
    columns = k if spec.block.cols == WHOLE else min(spec.block.cols, k)
    wide = x.float()
    if m % rows or k % columns:
        wide = F.pad(wide, (0, -k % columns, 0, -m % rows))
    high, broad = wide.shape[0] // rows, wide.shape[1] // columns
    blocks = wide.reshape(high, rows, broad, columns)
    finite = blocks.abs() < torch.inf
    if scale is None:
        amax = torch.where(finite, blocks.abs(), 0.0).amax(dim=(1, 3), keepdim=True)
        made = scale_from_amax(amax, spec)
    else:
        made = scale.detach().to(x.device, torch.float32).reshape(high, 1, broad, 1)
    largest = spec.format.max
    scaled = (blocks * (1.0 / made.clamp(min=SMALLEST_SCALE))).clamp(-largest, largest)
    special = blocks if spec.format.has_inf else torch.full_like(blocks, torch.nan)
    values = torch.where(finite, scaled, special).reshape(wide.shape)
    values = _padded(values) if align else values
    return values.to(spec.format.dtype)[:m, :k], made.reshape(scale_shape(x.shape, spec.block))


def _padded(values: Tensor) -> Tensor:
    """Columns up to a multiple of 16: a GEMM reads such rows without a copy."""
    missing = -values.shape[1] % ALIGNED
    return F.pad(values, (0, missing)) if missing else values


def _turn(data: Tensor) -> Tensor:
    """FP8 [M, K] to [K, M], contiguous along M but for the padding of its rows."""
    missing = -data.shape[0] % ALIGNED
    if not missing:
        return data.t().contiguous()
    return F.pad(data.view(torch.uint8).t(), (0, missing)).view(data.dtype)[:, : data.shape[0]]


def transpose(data: Tensor) -> Tensor:
    """Bytes moved, not converted."""
    return _turn(data)
