"""Triton: grouped GEMM in FP8 (1x128 x 128x128, row x row), bf16, fp16 and fp32, with SwiGLU in its epilogue; sorting,
gathering and combining.

Rows that are no multiple of 16 bytes long are padded: those of weights once, if `prepare` was called.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import E4M3, E5M2, ROW, TENSOR, Block, QTensor, Spec
from loka.kernels.backend import YES, Verdict, no
from loka.kernels.grouped_mm.call import GroupedCall, MoveCall, Permutation, SwigluCall
from loka.kernels.op import invoke
from loka.kernels.prepared import Laid, laid_out, with_layout
from loka.kernels.strides import unit_rows
from loka.kernels.triton_device import triton_runs_on

_GROUP, _SQUARE = Block(1, 128), Block(128, 128)
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST_ROW = 16384
_MOST_EXPERTS = 256


def supports(call: GroupedCall | SwigluCall | MoveCall, device: torch.device) -> Verdict:
    """Accept FP8 with row x row or 1x128 x 128x128 scales, and bf16, fp16 and fp32.

    SwiGLU results are quantized 1x128; `swiglu_quantize`, whose kernel sees whole rows, also quantizes per row.
    """
    if isinstance(call, SwigluCall):
        answer = _can_swiglu(call)
    elif isinstance(call, MoveCall):
        answer = (
            YES if call.experts <= _MOST_EXPERTS else no(f"sorts up to {_MOST_EXPERTS} experts, not {call.experts}")
        )
    else:
        answer = _can_multiply(call)
    return answer and triton_runs_on(device)


def _can_multiply(call: GroupedCall) -> Verdict:
    if call.experts > _MOST_EXPERTS:
        return no(f"multiplies up to {_MOST_EXPERTS} experts, not {call.experts}")
    if call.a is None or call.b is None:
        if call.in_dtype not in _PLAIN:
            return no(f"multiplies bf16, fp16, fp32 and FP8, not {call.in_dtype}")
        if call.in_dtype == torch.bfloat16 and _interpreted():
            return no("Triton's interpreter multiplies bf16 by its bit patterns; test in fp16 or fp32")
    else:
        if {call.a.format, call.b.format} - {E4M3, E5M2}:
            return no(f"multiplies e4m3 and e5m2, not {call.a.format} @ {call.b.format}")
        if (call.a.block, call.b.block) not in ((ROW, ROW), (_GROUP, _SQUARE)):
            return no(f"takes row x row or 1x128 x 128x128 scales, not {call.a.block} x {call.b.block}")
        if "e4m3" in (call.a.scale, call.b.scale):
            return no("two-level scales are not implemented here")
        if call.swiglu and call.b.block == _SQUARE and (call.n // 2) % 128:
            return no(f"gate and up must be whole 128-wide blocks under 128x128 scales, got {call.n // 2} columns each")
    if call.swiglu and call.out is not None:
        return _can_write(call.out, (_GROUP,))
    return YES


def _can_write(spec: Spec, blocks: tuple[Block, ...]) -> Verdict:
    if spec.format != E4M3 or spec.block not in blocks:
        return no(f"quantizes to e4m3 under {', '.join(map(str, blocks))}, not {spec}")
    if spec.mode != "dynamic" or spec.rounding != "nearest" or spec.scale == "e4m3":
        return no(f"quantizes with dynamic scales of one level, rounding to nearest, not {spec}")
    return YES


def _can_swiglu(call: SwigluCall) -> Verdict:
    if call.in_dtype not in _PLAIN:
        return no(f"reads bf16, fp16 and fp32, not {call.in_dtype}")
    if call.spec is None:
        return YES
    if call.spec.block == ROW and call.f > _WIDEST_ROW:
        return no(f"scales rows of up to {_WIDEST_ROW}, not {call.f}")
    return _can_write(call.spec, (_GROUP, ROW))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _interpreted() -> bool:
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)


def _padded(data: Tensor) -> Tensor:
    """Return data with unit stride along K and rows at multiples of 16 bytes, as TMA requires, zero-padded beyond K."""
    per = 16 // data.element_size()
    if data.stride(-1) == 1 and data.stride(-2) % per == 0 and (data.dim() == 2 or data.is_contiguous()):
        return data
    missing = -data.shape[-1] % per
    if not missing:
        return data.contiguous()
    kind = torch.uint8 if data.element_size() == 1 else data.dtype
    return F.pad(data.contiguous().view(kind), (0, missing)).view(data.dtype)


def _operands(x: QTensor | Tensor, w: QTensor | Tensor) -> tuple[Any, ...]:
    """Return both operands' data, padded alike along K, their scales, and the kernel's code for the kind of scales."""
    if not isinstance(x, QTensor):
        assert isinstance(w, Tensor)
        return _padded(x), _padded(w), None, None, 0
    assert isinstance(w, QTensor)
    rows = x.spec.block == ROW
    data, sw = laid_out(w, "triton", x.spec, _lay_out)
    return _padded(x.data), data, x.scale.contiguous() if rows else x.scale, sw, 2 if rows else 3


def prepare(weight: QTensor, a: Spec) -> QTensor:
    """Pad rows to multiples of 16 bytes."""
    return with_layout(weight, "triton", a, _lay_out)


def _lay_out(w: QTensor, a: Spec) -> Laid:
    return _padded(w.data), w.scale.contiguous() if a.block == ROW else w.scale


def run(
    x: QTensor | Tensor, w: QTensor | Tensor, offsets: Tensor, *, out_dtype: torch.dtype, fast_accum: bool = False
) -> Tensor:
    """See `loka.kernels.grouped_mm.grouped_mm`."""
    if 0 in x.shape or 0 in w.shape:
        return (x.data if isinstance(x, QTensor) else x).new_zeros(x.shape[0], w.shape[1], dtype=out_dtype)
    from loka.kernels.grouped_mm import triton_ops

    a, b, sx, sw, scales = _operands(x, w)
    out: Tensor = invoke(triton_ops.grouped_mm, a, b, sx, sw, offsets, scales, not fast_accum, out_dtype)
    return out


def run_swiglu(
    x: QTensor | Tensor,
    w: QTensor | Tensor,
    offsets: Tensor,
    *,
    spec: Spec | None,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
) -> QTensor | Tensor:
    """See `loka.kernels.grouped_mm.grouped_swiglu`. SwiGLU is applied to the float32 accumulators."""
    if 0 in x.shape or 0 in w.shape:
        from loka.kernels.grouped_mm import reference

        return reference.run_swiglu(x, w, offsets, spec=spec, out_dtype=out_dtype)
    from loka.kernels.grouped_mm import triton_ops

    a, b, sx, sw, scales = _operands(x, w)
    pow2 = spec is not None and spec.scale != "f32"
    out, scale = invoke(
        triton_ops.grouped_swiglu, a, b, sx, sw, offsets, scales, not fast_accum, spec is not None, pow2, out_dtype
    )
    return out if spec is None else QTensor(out, scale, spec)


def swiglu(h: Tensor, spec: Spec | None) -> QTensor | Tensor:
    """See `loka.kernels.grouped_mm.swiglu_quantize`."""
    from loka.kernels.grouped_mm import triton_ops

    h = unit_rows(h)
    whole = spec is not None and spec.block == ROW
    out, scale = invoke(triton_ops.swiglu, h, spec is not None, whole, spec is not None and spec.scale != "f32")
    return out if spec is None else QTensor(out, scale, spec)


def permute(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """order, offsets, inverse."""
    from loka.kernels.grouped_mm import triton_ops

    result: tuple[Tensor, Tensor, Tensor] = invoke(triton_ops.permute, ids.contiguous(), experts)
    return result


def gather(x: QTensor | Tensor, permutation: Permutation) -> QTensor | Tensor:
    """See `loka.kernels.grouped_mm.gather`."""
    from loka.kernels.grouped_mm import triton_ops

    if not isinstance(x, QTensor):
        rows: Tensor = invoke(triton_ops.gather, unit_rows(x), None, permutation.order, permutation.top)[0]
        return rows
    if x.spec.block == TENSOR:
        data, _ = invoke(triton_ops.gather, unit_rows(x.data), None, permutation.order, permutation.top)
        return QTensor(data, x.scale, x.spec)
    if x.spec.block.rows != 1:
        raise ValueError(f"rows of {x.spec} share scales with their neighbours: quantize per row, 1x128 or per tensor")
    data, scale = invoke(triton_ops.gather, unit_rows(x.data), x.scale, permutation.order, permutation.top)
    return QTensor(data, scale, x.spec)


def combine(y: Tensor, permutation: Permutation, weights: Tensor, add: Tensor | None) -> Tensor:
    """See `loka.kernels.grouped_mm.combine`."""
    from loka.kernels.grouped_mm import triton_ops

    weights = unit_rows(weights)
    add = None if add is None else unit_rows(add)
    out: Tensor = invoke(triton_ops.combine, unit_rows(y), permutation.inverse, weights, add)
    return out
