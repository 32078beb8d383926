"""Norm + activation + quantize in Triton. Rows of up to 16384 columns, of any width if FP8 is written both ways."""

import torch
from torch import Tensor

from loka.formats import E4M3, E5M2, ROW, TENSOR, Block, QTensor, Spec
from loka.kernels.activation import ACTIVATIONS
from loka.kernels.backend import YES, Verdict, no
from loka.kernels.dropout import Dropout, taken_apart
from loka.kernels.norm_quantize.call import (
    EPS,
    NORMS,
    NormCall,
    NormGradient,
    NormGradientCall,
    NormResult,
)
from loka.kernels.op import invoke
from loka.kernels.quantize import quantize_both
from loka.kernels.strides import one_number, unit_rows
from loka.kernels.triton_device import triton_runs_on

WIDEST = 16384
_SOURCES = {TENSOR: 1, ROW: 2, Block(1, 128): 3}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_WIDER = (torch.bfloat16, torch.float16, torch.float32)


def supports(call: NormCall | NormGradientCall, device: torch.device) -> Verdict:
    """Support 16- and 32-bit, FP8 with a given tensor scale (also both ways) or with dynamic row or 1x128 scales."""
    both = call.transpose if isinstance(call, NormCall) else call.spec is not None
    shape = _supports_both(call) if both else _supports_width(call.k)
    return _supports_output(call.spec) and shape and _supports_input(call) and triton_runs_on(device)


def _supports_output(spec: Spec | None) -> Verdict:
    if spec is None:
        return YES
    if spec.format not in (E4M3, E5M2) or spec.rounding != "nearest" or spec.scale == "e4m3":
        return no(f"writes e4m3 or e5m2 rounded to nearest, not {spec}")
    if spec.block not in _SOURCES:
        return no(f"scales are per tensor, row or 1x128, not {spec.block}")
    if (spec.block == TENSOR) == (spec.mode == "dynamic"):
        return no(f"{spec}: a tensor's scale must be given (a row cannot know it); row and 1x128 scales are made here")
    return YES


def _supports_width(k: int) -> Verdict:
    if k > WIDEST:
        return no(f"a row must fit in registers: at most {WIDEST} wide, not {k}")
    return YES


def _supports_both(call: NormCall | NormGradientCall) -> Verdict:
    if call.norm == "block":
        return no("block norm is not written both ways here; hint: fused_linear has it in the GEMM's epilogue")
    if isinstance(call, NormCall) and call.heads:
        return no("products with vectors are not computed together with FP8 both ways")
    if call.residual:
        return no("a 16-bit residual stream is not written together with FP8 both ways")
    if isinstance(call, NormCall) and call.out_dtype is not None:
        return no(f"writes FP8 both ways, not together with {call.out_dtype}")
    return YES


def _supports_input(call: NormCall | NormGradientCall) -> Verdict:
    if call.k == 0:
        return no("a norm over nothing")
    if call.kept is not None and call.kept.format.dtype not in _FP8:
        return no(f"reads an x in e4m3 or e5m2, not {call.kept}")
    wider = call.in_dtype in _WIDER or (isinstance(call, NormCall) and call.kept is not None)
    return YES if wider else no(f"reads bf16, fp16 and fp32, not {call.in_dtype}")


def run(
    x: Tensor | QTensor,
    call: NormCall,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    dropout: Dropout | None = None,
    head: Tensor | None = None,
) -> NormResult:
    """See `loka.kernels.norm_quantize`."""
    spec, norm = call.spec, call.norm
    if spec is not None and (spec.mode == "dynamic") != (scale is None):
        raise ValueError(f"{spec} {'makes its own scale' if scale is not None else 'needs a scale'}")
    if x.shape[0] == 0:
        from loka.kernels.norm_quantize import reference

        # nothing to compute: the reference defines the empty result
        return reference.run(x, call, weight=weight, bias=bias, residual=residual, eps=eps, scale=scale, amax=amax, dropout=dropout, head=head)  # fmt: skip
    from loka.kernels.norm_quantize import triton_ops

    data, x_scale = _operands(x)
    w, b = _dense(weight), _dense(bias)
    options = NORMS.index(norm), ACTIVATIONS.index(call.activation), EPS[norm] if eps is None else eps
    if spec is not None and call.transpose:
        assert scale is not None  # `NormCall` requires a given scale for the transpose
        q, q_t, made, mean, rstd = invoke(
            triton_ops.norm_quantize_both, data, x_scale, w, b, scale, amax, *options, spec.format.dtype, *taken_apart(dropout)
        )  # fmt: skip
        given = one_number(scale) if dropout is None else made
        kept = mean if norm == "layer" else None
        return NormResult(QTensor(q, given, spec), None, x, kept, rstd, QTensor(q_t, given, spec))
    added = None if residual is None else unit_rows(residual)
    kind = torch.float8_e4m3fn if spec is None else spec.format.dtype
    source, pow2 = (0, False) if spec is None else (_SOURCES[spec.block], spec.scale in ("pow2", "e8m0"))
    q, made, h, y, mean, rstd, dots = invoke(
        triton_ops.norm_quantize, data, x_scale, added, w, b, scale, amax, *options, kind, source, pow2, call.out_dtype, *taken_apart(dropout), _dense(head)
    )  # fmt: skip
    return NormResult(
        None if spec is None else QTensor(q, made if scale is None or dropout is not None else one_number(scale), spec),
        None if call.out_dtype is None else y,
        x if residual is None else h,
        mean if norm == "layer" else None,
        rstd,
        dots=None if head is None else dots,
    )


def _dense(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _operands(x: Tensor | QTensor) -> tuple[Tensor, Tensor | None]:
    """Return data with unit stride along rows, and the scale of an FP8 tensor."""
    return (unit_rows(x.data), x.scale.contiguous()) if isinstance(x, QTensor) else (unit_rows(x), None)


def gradient(
    dy: Tensor,
    h: Tensor | QTensor,
    mean: Tensor | None,
    rstd: Tensor,
    call: NormGradientCall,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    dh: Tensor | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    dropout: Dropout | None = None,
) -> NormGradient:
    """See `loka.kernels.norm_quantize.norm_gradient`."""
    spec = call.spec
    if (spec is None) != (scale is None):
        raise ValueError(f"{spec} needs a scale" if spec else "a scale was given, and no spec to write dx in")
    if dy.shape[0] == 0:
        from loka.kernels.norm_quantize import reference

        return reference.gradient(dy, h, mean, rstd, call, weight=weight, bias=bias, dh=dh, scale=scale, amax=amax, dropout=dropout)  # fmt: skip
    from loka.kernels.norm_quantize import triton_ops

    data, h_scale = _operands(h)
    kept = unit_rows(dy), data, h_scale, _dense(weight), _dense(bias), mean, rstd
    options, draw = (NORMS.index(call.norm), ACTIVATIONS.index(call.activation)), taken_apart(dropout)
    if spec is None or scale is None:
        added = None if dh is None else unit_rows(dh)
        dx, dw, db = invoke(triton_ops.norm_gradient, *kept, added, amax, *options, *draw)
        return NormGradient(dx, None, None if weight is None else dw, None if bias is None else db)
    given = one_number(scale)
    if dy.shape[1] <= WIDEST and h_scale is None and data.dtype in (torch.bfloat16, torch.float16):
        # 16-bit dx first, then quantize both ways: one row fits in registers, the 16 rows that a transpose needs do
        # not. 91 us compared with 186 for 6144 x 3072 on an H200.
        whole, dw, db = invoke(triton_ops.norm_gradient, *kept, None, amax, *options, *draw)
        q, q_t = quantize_both(whole, spec, spec, scale=given, transpose_scale=given, backend="triton")
        return NormGradient(q, q_t, None if weight is None else dw, None if bias is None else db)
    dx, dx_t, dw, db = invoke(triton_ops.norm_gradient_both, *kept, scale, amax, *options, spec.format.dtype, *draw)
    return NormGradient(
        QTensor(dx, given, spec),
        QTensor(dx_t, given, spec),
        None if weight is None else dw,
        None if bias is None else db,
    )
