"""PyTorch's own kernels (`torch.nn.functional.scaled_mm`): cuBLASLt, and CUTLASS for row scales that cuBLASLt lacks.

    tensor x tensor, {row, tensor} x {row, tensor}     compute capability 8.9 and newer
    1x128 x 128x128, 128x128 x 1x128, 1x128 x 1x128    9.x only (cuBLASLt 12.9)

With one row-scaled operand, a tensor scale of the other is repeated per row, which changes nothing. The library
requires (read in its source, 2.11 and 2.13): K and N multiples of 16, b column-major; 1x128 scales with the outer
dimension contiguous; 128x128 scales with K / 128 contiguous and padded to a multiple of 4. The older `torch._scaled_mm`
does not check that padding and is silently wrong if (K / 128) % 4 != 0, so only `run_packaged` uses it, and not for
block scales. The fake implementation requires K and the rows of the 128x128 operand to be multiples of 128 where eager
accepts 16. So blockwise operands are padded to 128, and rows under 1x128 scales to 16, since the leading dimension of
the scales must be 16-byte aligned.

`prepare` does all of that once for a weight; activations are padded or reordered in each call that needs it.

cuBLASLt refuses two E5M2 operands, and any E5M2 operand under 128x128 scales (seen on an H200, torch 2.11). Block
scales move the sum to float32 every 128 products, so fast accumulation is not requested there.
"""

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from loka.formats import E4M3, E5M2, ROW, TENSOR, Block, QTensor, Spec
from loka.kernels.backend import Verdict, no
from loka.kernels.prepared import Laid, laid_out, with_layout
from loka.kernels.scaled_mm.call import MatmulCall
from loka.kernels.scaled_mm.layout import aligned, cut, float_scales, fp8_gpu, outer_major, row_scales, up, with_ones
from loka.kernels.strides import GRANULE

OUTER_MAJOR_SCALES = True  # 1x128 scales arrive without a copy when their rows are contiguous

_GROUP, _SQUARE = Block(1, 128), Block(128, 128)
_WHOLE_ROWS = (TENSOR, ROW)
_BLOCKWISE = ((_GROUP, _SQUARE), (_SQUARE, _GROUP), (_GROUP, _GROUP))


def supports(call: MatmulCall, device: torch.device) -> Verdict:
    """Support the FP8 formats and scale pairs that the library has kernels for, on GPUs that have them."""
    formats = (call.a.format, call.b.format)
    if not set(formats) <= {E4M3, E5M2}:
        return no(f"multiplies e4m3 and e5m2, not {call.a.format} @ {call.b.format}")
    if formats == (E5M2, E5M2):
        return no("cuBLASLt does not multiply two e5m2 operands")
    scales = float_scales(call.a, call.b)
    if not scales:
        return scales
    blocks = (call.a.block, call.b.block)
    if blocks in _BLOCKWISE:
        if _SQUARE in blocks and formats != (E4M3, E4M3):
            return no(f"multiplies e4m3 only under 128x128 scales, not {call.a.format} @ {call.b.format}")
        return fp8_gpu(device, (9, 0), only=9)
    if not set(blocks) <= set(_WHOLE_ROWS):
        return no(f"has no kernel for {call.a.block} x {call.b.block} scales")
    gpu = fp8_gpu(device)
    if gpu and blocks != (TENSOR, TENSOR) and call.out_dtype == torch.float32 and not fp8_gpu(device, only=9):
        return no("row scales run on CUTLASS on this GPU, which writes bf16 and fp16 only")
    return gpu


def prepare(weight: QTensor, a: Spec) -> QTensor:
    """Pad rows and columns, and put the scales in the library's order; one per row if `a` has row scales."""
    if (a.block, weight.spec.block) in _BLOCKWISE or {a.block, weight.spec.block} <= set(_WHOLE_ROWS):
        return with_layout(weight, "torch", a, lay_out)
    return weight


def lay_out(b: QTensor, a: Spec) -> Laid:
    """Return the padded data of a weight and its scales in the library's order, for operands of Spec `a`."""
    if b.spec.block in (_GROUP, _SQUARE):
        return _lay_out_blocks(b)
    columns = up(b.shape[0], GRANULE)
    scale = b.scale if a.block == b.spec.block == TENSOR else row_scales(b, columns)
    return aligned(b.data, columns, up(b.shape[1], GRANULE)), scale


def adds_bias(call: MatmulCall) -> bool:
    """Return whether cuBLASLt adds a bias in its epilogue: 16-bit output, tensor scales, N that needs no padding."""
    return (
        call.a.block == call.b.block == TENSOR
        and call.n % GRANULE == 0
        and call.out_dtype in (torch.bfloat16, torch.float16)
        and min(call.m, call.n, call.k) > 0
    )


def run(
    a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False, bias: Tensor | None = None
) -> Tensor:
    """See `loka.kernels.scaled_mm`. `bias` is allowed only if `adds_bias`."""
    (m, k), n = a.shape, b.shape[0]
    if m == 0 or n == 0 or k == 0:
        return a.data.new_zeros(m, n, dtype=out_dtype)
    w, scale_b = laid_out(b, "torch", a.spec, lay_out)
    if (a.spec.block, b.spec.block) in _BLOCKWISE:
        x, scale_a = _lay_out_blocks(a)
        scales = *_block_scales(scale_a, a.spec), *_block_scales(scale_b, b.spec)
        return cut(_scaled_mm(x, w.t(), *scales, out_dtype, False), m, n)
    if a.spec.block == b.spec.block == TENSOR:
        kind, scale_a = ScalingType.TensorWise, a.scale
    else:
        kind, scale_a, scale_b = ScalingType.RowWise, row_scales(a, m), scale_b.reshape(1, -1)
    x = aligned(a.data, m, w.shape[1])
    return cut(_scaled_mm(x, w.t(), scale_a, kind, scale_b, kind, out_dtype, fast_accum, bias), m, n)


def run_packaged(a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """Like `run`, for an AOTInductor package: uses the older op `_scaled_mm` where that is correct.

    The older op has a C entry point, while the newer one, whose scales are lists, is called through an interpreter.
    """
    (m, k), n = a.shape, b.shape[0]
    # not min(), which would bound a dynamic m by n or k
    if (a.spec.block, b.spec.block) in _BLOCKWISE or m == 0 or n == 0 or k == 0:
        return run(a, b, out_dtype=out_dtype, fast_accum=fast_accum)
    w, scale_b = laid_out(b, "torch", a.spec, lay_out)
    x = aligned(a.data, m, w.shape[1])
    multiply = torch.ops.aten._scaled_mm.default
    if a.spec.block == b.spec.block == TENSOR:
        return cut(multiply(x, w.t(), a.scale, scale_b, None, None, out_dtype, fast_accum), m, n)
    scale_a, scale_b = row_scales(a, m), scale_b.reshape(1, -1)
    if out_dtype == torch.float32:
        # with row scales some GPUs write 16-bit output only; a float32 result can be scaled afterwards instead
        one = torch.ones((), device=x.device)
        return cut(multiply(x, w.t(), one, one, None, None, out_dtype, fast_accum) * scale_a * scale_b, m, n)
    return cut(multiply(x, w.t(), scale_a, scale_b, None, None, out_dtype, fast_accum), m, n)


def _scaled_mm(
    x: Tensor, w: Tensor, scale_a: Tensor, kind_a: ScalingType, scale_b: Tensor, kind_b: ScalingType,
    out_dtype: torch.dtype, fast_accum: bool, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Call the op directly: torch 2.11 cannot trace the Python function around it."""
    out: Tensor = torch.ops.aten._scaled_mm_v2.default(
        x, w, [scale_a], [kind_a.value], [], [scale_b], [kind_b.value], [], bias, out_dtype, [], fast_accum
    )
    return out


def _lay_out_blocks(q: QTensor) -> Laid:
    """Return data padded to whole blocks of K, and its block scales as cuBLASLt stores them."""
    inner = up(q.shape[1], 128)
    if q.spec.block == _GROUP:
        rows = up(q.shape[0], GRANULE)
        return aligned(q.data, rows, inner), outer_major(q.scale, rows)
    steps = q.scale.shape[1]
    return aligned(q.data, up(q.shape[0], 128), inner), with_ones(q.scale, up(steps, 4) - steps).contiguous()


def _block_scales(scale: Tensor, spec: Spec) -> tuple[Tensor, ScalingType]:
    if spec.block == _GROUP:
        return scale, ScalingType.BlockWise1x128
    return scale.t(), ScalingType.BlockWise128x128
