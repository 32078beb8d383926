"""Quantization in plain traceable torch, for compiled callers: Inductor fuses it with the producer and consumers of x.

    amax  = max over each block of |x|, finite values only            [M, K] viewed as [rows, r, columns, c]
    scale = max(amax / format_max, 2^-126), 1 where amax is 0
    q     = cast(clamp(x * (1 / scale))),   NaN and Inf as in the reference

There is no custom op, no data-dependent control flow and no copy of x. The transpose is quantized in x's layout, with
the block transposed, and transposed as FP8: half the bytes of transposing x. Rows of the results start at multiples of
16 elements, as in our kernels.

In eager mode the bits equal the reference's. Under Inductor a GPU divides approximately where torch does not, so a
scale may differ in its last bit, and an element between two codes may take the other one. In eager mode it is slow,
several passes over x, so `auto` never picks it: it must be asked for by name.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import E4M3, E5M2, TENSOR, QTensor, Spec, scale_from_amax, scale_shape
from loka.formats import quantize as reference_quantize
from loka.formats.quantize import smallest_scale
from loka.formats.spec import WHOLE
from loka.kernels.backend import YES, Verdict, no
from loka.kernels.quantize.call import QuantizeCall, check_scale

ALIGNED = 16
COMPILE_TO_TIME = True  # benchmarks time the compiled code
any_alignment = True  # x need not be aligned


def supports(call: QuantizeCall, device: torch.device) -> Verdict:
    """Support E4M3 and E5M2 rounded to nearest, one level of scales, any block, any device that torch compiles for."""
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
    """Quantize x [M, K], its transpose [K, M], or both. `generator` is ignored: nothing here is random."""
    x = x.detach()
    if spec is not None:
        check_scale(spec, scale, x.shape)
    if transpose is not None:
        check_scale(transpose, transpose_scale, (x.shape[1], x.shape[0]))
    if x.numel() == 0:
        q = None if spec is None else reference_quantize(x, spec, scale=scale)
        return q, None if transpose is None else reference_quantize(x.T.contiguous(), transpose, scale=transpose_scale)
    q = None if spec is None else QTensor(*_quantize(x, spec, scale), spec)
    if transpose is None:
        return q, None
    if q is not None and _shares_codes(spec, transpose, scale, transpose_scale):
        return q, QTensor(_transpose(q.data), q.scale, transpose)
    data, made = _quantize(x, transpose, transpose_scale, turned=True)
    return q, QTensor(_transpose(data), made, transpose)


def _shares_codes(spec: Spec | None, transpose: Spec, scale: Tensor | None, transpose_scale: Tensor | None) -> bool:
    """Return True if the quantized transpose is q transposed: both have the same single scale."""
    return spec == transpose and spec.block == TENSOR and scale is transpose_scale


def _quantize(x: Tensor, spec: Spec, scale: Tensor | None, *, turned: bool = False) -> tuple[Tensor, Tensor]:
    """Return FP8 data in x's layout, and its scales in the shape of `formats.scale_shape`.

    `turned`: the spec and the scales are those of the transpose. (A transposed spec cannot be made here: torch 2.11 does
    not compile the construction of one.)
    """
    m, k = x.shape
    high_block, wide_block = (spec.block.cols, spec.block.rows) if turned else (spec.block.rows, spec.block.cols)
    rows = m if high_block == WHOLE else min(high_block, m)
    columns = k if wide_block == WHOLE else min(wide_block, k)
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
        given = scale.detach().to(x.device, torch.float32)
        made = (given.t() if turned and given.dim() == 2 else given).reshape(high, 1, broad, 1)
    largest = spec.format.max
    scaled = (blocks * (1.0 / made.clamp(min=smallest_scale()))).clamp(-largest, largest)
    special = blocks if spec.format.has_inf else torch.full_like(blocks, torch.nan)
    values = torch.where(finite, scaled, special).reshape(wide.shape)
    values = values if turned else _pad_columns(values)
    if turned:
        made = made.reshape(high, broad).t()
    return values.to(spec.format.dtype)[:m, :k], made.reshape(scale_shape((k, m) if turned else (m, k), spec.block))


def _pad_columns(values: Tensor) -> Tensor:
    """Pad the columns to a multiple of 16, so that a GEMM reads the rows without a copy."""
    missing = -values.shape[1] % ALIGNED
    return F.pad(values, (0, missing)) if missing else values


def _transpose(data: Tensor) -> Tensor:
    """Return FP8 data [M, K] as [K, M], contiguous along M except for row padding."""
    missing = -data.shape[0] % ALIGNED
    if not missing:
        return data.t().contiguous()
    return F.pad(data.view(torch.uint8).t(), (0, missing)).view(data.dtype)[:, : data.shape[0]]


def transpose(data: Tensor) -> Tensor:
    """Return FP8 data [M, K] as [K, M], contiguous along M except for row padding."""
    return _transpose(data)
