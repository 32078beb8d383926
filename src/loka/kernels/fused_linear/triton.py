"""The fused layer in Triton, on Hopper and newer: one kernel forward, one kernel from dy to the quantized gradient."""

import torch
from torch import Tensor

from loka.formats import E4M3, E5M2, ROW, TENSOR, Block, QTensor, Spec
from loka.kernels.activation import ACTIVATIONS
from loka.kernels.backend import Verdict, no
from loka.kernels.dropout import Dropout, taken_apart
from loka.kernels.fused_linear.call import (
    NORMALIZED,
    DgradCall,
    DgradResult,
    FusedCall,
    FusedResult,
    GradientCall,
    GradientResult,
    Kept,
    check_amax,
    derived_from_output,
    dropped_in_output,
    kept_form,
    normalized_scale,
)
from loka.kernels.fused_linear.launch import Launch
from loka.kernels.op import invoke
from loka.kernels.prepared import Laid, with_layout
from loka.kernels.scaled_mm import triton as scaled_mm_triton
from loka.kernels.scaled_mm.call import MatmulCall
from loka.kernels.strides import one_number, unit_rows
from loka.kernels.triton_device import triton_runs_on

_GROUP = Block(1, 128)
# The kernels' codes for how forward writes z.
_KEEPS: dict[Kept, int] = {"nothing": 0, "y": 0, "normalized": 1, "scaled": 2, "bf16": 3}


def supports(call: FusedCall | GradientCall | DgradCall, device: torch.device) -> Verdict:
    """Support FP8 operands; outputs in 16 or 32 bits, FP8 with a given tensor scale, or FP8 with 1x128 scales.

    `fused_linear_gradient` also takes a dynamic tensor scale, `fused_linear_dgrad` only a given one.
    """
    if isinstance(call, GradientCall):
        return _supports_gradient(call, device)
    if isinstance(call, DgradCall):
        return _supports_dgrad(call, device)
    operands = scaled_mm_triton.supports(MatmulCall(call.m, call.k, call.n, call.a, call.b), device)
    if not operands:
        return operands
    if isinstance(call.out, Spec):
        return _supports_output(call.out)
    if call.out not in (torch.bfloat16, torch.float16, torch.float32):
        return no(f"writes bf16, fp16, fp32 or FP8, not {call.out}")
    return triton_runs_on(device)


def _supports_output(spec: Spec) -> Verdict:
    if spec.format not in (E4M3, E5M2) or spec.rounding != "nearest" or spec.scale == "e4m3":
        return no(f"writes e4m3 or e5m2 rounded to nearest, not {spec}")
    if (spec.block == TENSOR and spec.mode != "dynamic") or (spec.block == _GROUP and spec.mode == "dynamic"):
        return Verdict(True)
    if spec.block in (TENSOR, ROW):
        return no(f"an epilogue sees one tile and cannot know the amax {spec} needs; hint: a static scale, or 1x128")
    return no(f"output scales are static per tensor or dynamic per 1x128, not {spec}")


def _supports_gradient(call: GradientCall, device: torch.device) -> Verdict:
    for spec in (call.spec, call.spec_t):
        possible = _supports_output(spec)
        if not possible and (spec.block, spec.mode) != (TENSOR, "dynamic"):  # which takes a separate pass
            return possible
    if (call.spec.block, call.spec.mode) != (call.spec_t.block, call.spec_t.mode):
        return no(f"g and its transpose are scaled alike in one pass, not {call.spec} and {call.spec_t}")
    if call.spec.block == TENSOR and call.spec.mode == "dynamic" and call.spec.format != call.spec_t.format:
        return no(f"one dynamic scale serves both, so both have one format, not {call.spec} and {call.spec_t}")
    return triton_runs_on(device)


def _supports_dgrad(call: DgradCall, device: torch.device) -> Verdict:
    for spec in (call.g, call.w_t, call.spec):
        if spec.block != TENSOR:
            return no(f"one scale for each tensor in this step, not {spec}; hint: scaled_mm and fused_linear_gradient")
    if call.spec.mode == "dynamic":
        return no(f"an epilogue sees one tile and cannot know the amax {call.spec} needs; hint: a delayed scale")
    operands = scaled_mm_triton.supports(MatmulCall(call.m, call.k, call.n, call.g, call.w_t), device)
    return _supports_output(call.spec) if operands else operands


def prepare(weight: QTensor, a: Spec) -> QTensor:
    """Align rows to multiples of 128 bytes, or of 32 if they are short.

    With K an odd multiple of 16, rows otherwise start within 32-byte sectors, which a multiprocessor reads at two
    thirds of the rate.
    """
    return with_layout(weight, "fused_linear", a, _lay_out)


def _lay_out(weight: QTensor, a: Spec) -> Laid:
    rows, columns = weight.data.shape
    step = 128 if columns >= 1024 else 32
    if weight.data.stride(1) == 1 and weight.data.stride(0) % 32 == 0:
        return weight.data, weight.scale
    padded = torch.zeros(rows, -(-columns // step) * step, dtype=torch.uint8, device=weight.device)
    padded[:, :columns] = weight.data.view(torch.uint8)
    return padded.view(weight.data.dtype), weight.scale


def run(
    a: QTensor,
    b: QTensor,
    call: FusedCall,
    *,
    out_scale: Tensor | None = None,
    bias: Tensor | None = None,
    amax: Tensor | None = None,
    dropout: Dropout | None = None,
    launch: Launch | None = None,
) -> FusedResult:
    """See `loka.kernels.fused_linear`. One kernel, two if the launch splits K."""
    check_amax(amax, a.device)
    if a.shape[0] == 0 or b.shape[0] == 0 or a.shape[1] == 0:
        from loka.kernels.fused_linear import reference

        # nothing to compute: the reference defines the empty result
        return reference.run(a, b, call, out_scale=out_scale, bias=bias, amax=amax, dropout=dropout)
    from loka.kernels.fused_linear import triton_ops

    out, norm_block, activation, transpose = call.out, call.norm_block, call.activation, call.transpose
    spec = out if isinstance(out, Spec) else None
    given = None if spec is None else _given_scale(out_scale, spec)
    mode = 0 if spec is None else (2 if spec.block == _GROUP else 1)
    form = kept_form(norm_block, activation, out) if call.keep else "nothing"
    y, y_scale, y_t, yt_scale, z, rstd = invoke(
        triton_ops.fused_linear,
        scaled_mm_triton.padded(a), scaled_mm_triton.padded(b), scaled_mm_triton.dense_scale(a), scaled_mm_triton.dense_scale(b), None if bias is None else bias.contiguous(), given, amax,
        scaled_mm_triton.source(a.spec), scaled_mm_triton.source(b.spec), norm_block > 0, ACTIVATIONS.index(activation), call.slope,
        mode, spec.format.dtype if spec else out, spec is not None and spec.scale in ("pow2", "e8m0"), _KEEPS[form], transpose,
        None if launch is None else launch.numbers, *taken_apart(dropout),
    )  # fmt: skip
    if spec is None:
        kept = _wrap_kept(form, z, None, None)
        return FusedResult(y, z=kept, rstd=rstd if call.keep and norm_block else None)
    scale = given if given is not None and dropout is None else y_scale
    q = QTensor(y, scale, spec)
    kept = _wrap_kept(form, z, q, given)
    q_t = QTensor(y_t, yt_scale if given is None else scale, spec) if transpose else None
    return FusedResult(q, q_t, kept, rstd if call.keep and norm_block else None)


def _wrap_kept(form: Kept, z: Tensor, y: QTensor | None, scale: Tensor | None) -> QTensor | Tensor | None:
    """Return what the kernel kept of z, or its output y, as backward reads it."""
    if form == "normalized":
        return QTensor(z, torch.full((), normalized_scale(), device=z.device), NORMALIZED)
    if form == "scaled":
        assert y is not None
        assert scale is not None
        return QTensor(z, scale, y.spec)
    if form == "y":
        assert y is not None
        # the given scale is without dropout's factor
        return y if scale is None or scale is y.scale else QTensor(y.data, scale, y.spec)
    return z if form == "bf16" else None


def _backward_dropout(dropout: Dropout | None, norm_block: int, activation: str, z: QTensor | Tensor | None) -> tuple[Tensor | None, float, int, int]:  # fmt: skip
    """Return forward's dropout as op arguments, and how kernels get the mask: redrawn (1), or from zeros in y (2)."""
    drop = 0 if dropout is None else 2 if dropped_in_output(norm_block, activation, z) else 1
    return *taken_apart(dropout), drop


def _given_scale(scale: Tensor | None, spec: Spec) -> Tensor | None:
    """Return the given scale as a scalar, None for a dynamic spec; raise ValueError if it is missing or unexpected."""
    if (scale is None) != (spec.mode == "dynamic"):
        raise ValueError(f"{spec} {'needs a scale' if scale is None else 'makes its own scale'}")
    return None if scale is None else one_number(scale)


def gradient(
    dy: Tensor,
    z: QTensor | Tensor | None,
    rstd: Tensor | None,
    call: GradientCall,
    *,
    scale: Tensor | None = None,
    dropout: Dropout | None = None,
) -> GradientResult:
    """See `loka.kernels.fused_linear.fused_linear_gradient`. One kernel, two for a dynamic tensor scale."""
    if dy.numel() == 0:
        from loka.kernels.fused_linear import reference

        return reference.gradient(dy, z, rstd, call, scale=scale, dropout=dropout)
    from loka.kernels.fused_linear import triton_ops

    spec, spec_t, norm_block, activation = call.spec, call.spec_t, call.norm_block, call.activation
    given = _given_scale(scale, spec)
    g, g_scale, g_t, gt_scale, sums, amax = invoke(
        triton_ops.fused_linear_gradient,
        unit_rows(dy), *read_kept(z, norm_block), rstd, given, norm_block > 0, ACTIVATIONS.index(activation),
        kept_number(z, norm_block, activation), call.slope, call.bias, spec.block == _GROUP, spec.format.dtype, spec_t.format.dtype,
        spec.scale in ("pow2", "e8m0"), spec_t.scale in ("pow2", "e8m0"), *_backward_dropout(dropout, norm_block, activation, z),
    )  # fmt: skip
    whole = g_scale if given is None else given
    return GradientResult(
        QTensor(g, whole, spec),
        QTensor(g_t, gt_scale if spec.block == _GROUP else whole, spec_t),
        amax,
        sums if call.bias else None,
    )


def read_kept(z: QTensor | Tensor | None, norm_block: int) -> tuple[Tensor | None, Tensor | None]:
    """Return data and scale of what forward kept; after a norm the scale is a constant of the kernel."""
    if not isinstance(z, QTensor):
        return z, None
    return z.data, None if norm_block else z.scale


def kept_number(z: QTensor | Tensor | None, norm_block: int, activation: str) -> int:
    """Return the kernels' code for how backward reads z (`_Z_*` in `triton_gradient_kernels`)."""
    if z is None:
        return 4
    if not isinstance(z, QTensor):
        return 0
    if norm_block:
        return 1
    return 3 if derived_from_output(norm_block, activation, z) else 2


def dgrad(
    g: QTensor,
    w_t: QTensor,
    z: QTensor | Tensor | None,
    call: DgradCall,
    *,
    scale: Tensor,
    amax: Tensor | None = None,
    dropout: Dropout | None = None,
    launch: Launch | None = None,
) -> DgradResult:
    """See `loka.kernels.fused_linear.fused_linear_dgrad`. One kernel."""
    check_amax(amax, g.device)
    if g.shape[0] == 0 or w_t.shape[0] == 0 or g.shape[1] == 0:
        from loka.kernels.fused_linear import reference

        return reference.dgrad(g, w_t, z, call, scale=scale, amax=amax, dropout=dropout)
    from loka.kernels.fused_linear import triton_ops

    spec, activation = call.spec, call.activation
    given = one_number(scale)
    q, q_t, sums = invoke(
        triton_ops.fused_linear_dgrad,
        scaled_mm_triton.padded(g), scaled_mm_triton.padded(w_t), g.scale, w_t.scale, *read_kept(z, 0), given, amax,
        ACTIVATIONS.index(activation), kept_number(z, 0, activation), call.slope, spec.format.dtype, call.bias, None if launch is None else launch.numbers,
        *_backward_dropout(dropout, 0, activation, z),
    )  # fmt: skip
    return DgradResult(QTensor(q, given, spec), QTensor(q_t, given, spec), sums if call.bias else None)
