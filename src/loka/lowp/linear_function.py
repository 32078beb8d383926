"""The autograd function of a low-precision linear: x [M, K], weight [N, K] -> y [M, N], with three GEMMs.

Forward quantizes x and, if FP8 is saved for wgrad, x^T; backward quantizes dy and dy^T. The caller passes the quantized
weight (`loka.lowp.weight_cache`) and remembered scales. Both directions update the counters they are given on the
device; nothing here synchronizes with it.
"""

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.kernels import prepared, registry
from loka.kernels.prepared import Layout
from loka.kernels.scaled_mm import GemmWay, scaled_mm
from loka.kernels.scaled_mm.call import OUT_DTYPES
from loka.lowp.binding import LinearBinding
from loka.lowp.health import BACKWARD, quantization_error, record, sampled_error, turn_of
from loka.lowp.leaving import only_once
from loka.lowp.scaling import delayed_scale, find_amax
from loka.lowp.weight_cache import quantize_pair

_OTHER_INPUTS = 4  # binding, dtype, needs, layouts: the arguments of the autograd function that are not tensors

Layouts = tuple[Layout | None, Layout | None]  # the layouts of W and W^T
Parts = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class Given(NamedTuple):
    """The tensor arguments of the autograd function besides x and the weight; none has a gradient."""

    w: Tensor | None = None
    w_scale: Tensor | None = None
    w_laid: Tensor | None = None  # the scales in the backend's own layout, if it has one
    w_two: Tensor | None = None  # second level of the scales (NVFP4)
    wt: Tensor | None = None
    wt_scale: Tensor | None = None
    wt_laid: Tensor | None = None
    wt_two: Tensor | None = None
    x_scale: Tensor | None = None
    xt_scale: Tensor | None = None
    dy_largest: Tensor | None = None
    dy_pending: Tensor | None = None
    health: Tensor | None = None


def parts_of(q: QTensor | None) -> Parts:
    """Split a quantized operand into its tensors."""
    return (None, None, None, None) if q is None else (*prepared.parts_of(q), q.tensor_scale)


def _whole(parts: Parts, spec: Spec, shape: tuple[int, ...] = (), layout: Layout | None = None) -> QTensor:
    """Undo `parts_of`. A weight in a backend's layout needs its shape, since its data may be padded."""
    data, scale, laid, two = parts
    assert data is not None
    assert scale is not None
    if layout is not None:
        return prepared.assemble(data, scale, laid, spec, shape, layout)
    return QTensor(data, scale, spec, two)


def _gemm(a: QTensor, b: QTensor, bound: GemmWay, dtype: torch.dtype) -> Tensor:
    return scaled_mm(
        a, b, out_dtype=dtype, backend=bound.backend, fast_accum=bound.fast_accum, prefer=bound.preferred(dtype)
    )


def _gradient_dtype(
    shape: tuple[int, int, int], bound: GemmWay, dtype: torch.dtype, wanted: torch.dtype, device: torch.device
) -> torch.dtype:
    """Return the parameter's dtype if the backend can write it, so that a float32 gradient is not rounded."""
    if wanted == dtype or wanted not in OUT_DTYPES:
        return dtype
    if bound.backend == "auto":
        return wanted
    call = bound.call(*shape, wanted)
    return wanted if registry.backend("scaled_mm", bound.backend).supports(call, device) else dtype


class LinearFunction(torch.autograd.Function):
    """Autograd of x [M, K], weight [N, K] -> y [M, N] with three separate bindings."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        binding: LinearBinding,
        dtype: torch.dtype,
        needs: tuple[bool, bool],
        layouts: Layouts,
        *rest: Any,
    ) -> Tensor:
        """Return y, and save what the needed gradients require."""
        given = Given(*rest)
        fprop, dgrad, wgrad = binding.fprop, binding.dgrad, binding.wgrad
        keeps_fp8 = needs[1] and binding.saves_fp8
        x_t = None
        if fprop is None:
            y = torch.matmul(x.to(dtype), weight.to(dtype).T)
        else:
            transpose = wgrad.b if keeps_fp8 and wgrad is not None else None
            q, x_t = quantize_pair(x, fprop.a, transpose, binding.quantizer, given.x_scale, given.xt_scale)
            assert q is not None
            w = _whole(given[:4], fprop.b, weight.shape, layouts[0])
            y = _gemm(q, w, fprop, dtype)
        kept_x = x if needs[1] and not keeps_fp8 else None
        kept_weight = weight if needs[0] and (dgrad is None or given.health is not None) else None
        ctx.save_for_backward(
            kept_x, *parts_of(x_t), given.xt_scale, kept_weight, *given[4:8], given.dy_largest
        )  # fmt: skip
        # not saved tensors: every backward of this linear writes to them, which would fail autograd's version check
        ctx.pending, ctx.health = given.dy_pending, given.health
        ctx.binding, ctx.dtype, ctx.needs, ctx.types = binding, dtype, needs, (x.dtype, weight.dtype)
        ctx.transposed, ctx.layout = (weight.shape[1], weight.shape[0]), layouts[1]
        return y

    @staticmethod
    @only_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx and dW."""
        # A backward may run under autocast, which must be disabled, but not when it is traced: its products are in
        # ctx.dtype already, and dynamo, which traces a backward twice if it reads strides, would leave the context of
        # the first trace open.
        traced = torch.compiler.is_compiling()
        with contextlib.nullcontext() if traced else torch.autocast(grads[0].device.type, enabled=False):
            dx, dw = _differentiate(ctx, grads[0])
        return dx, dw, *([None] * (_OTHER_INPUTS + len(Given._fields)))


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return dx and dW; None if not needed."""
    x, *xt, xt_scale, weight, wt, wt_made, wt_laid, wt_two, largest = ctx.saved_tensors
    binding: LinearBinding = ctx.binding
    dgrad, wgrad = (binding.dgrad if ctx.needs[0] else None), (binding.wgrad if ctx.needs[1] else None)
    spec = None if dgrad is None else dgrad.a
    transpose = None if wgrad is None else wgrad.a
    scales = _dy_scales(dy, (spec, transpose), (largest, ctx.pending), 2.0**binding.scaling.margin)
    q, q_t = quantize_pair(dy, spec, transpose, binding.quantizer, *scales)
    dx = dw = None
    if ctx.needs[0]:
        dx = torch.matmul(dy.to(ctx.dtype), weight.to(ctx.dtype)) if dgrad is None or q is None else (
            _gemm(q, _whole((wt, wt_made, wt_laid, wt_two), dgrad.b, ctx.transposed, ctx.layout), dgrad, ctx.dtype)
        )  # fmt: skip
    if ctx.needs[1]:
        if wgrad is None or q_t is None:
            dw = torch.matmul(dy.to(ctx.dtype).T, x.to(ctx.dtype))
        else:
            if x is None:
                x_t: QTensor | None = _whole((xt[0], xt[1], None, xt[3]), wgrad.b)
            else:
                x_t = quantize_pair(x, None, wgrad.b, binding.quantizer, scale_t=xt_scale)[1]
            assert x_t is not None
            shape = (q_t.shape[0], q_t.shape[1], x_t.shape[0])
            dw = _gemm(q_t, x_t, wgrad, _gradient_dtype(shape, wgrad, ctx.dtype, ctx.types[1], dy.device))
    if ctx.health is not None:
        _record_backward(ctx.health, dy, q, q_t, dx, dw, weight)
    x_dtype, w_dtype = ctx.types
    return None if dx is None else dx.to(x_dtype), None if dw is None else dw.to(w_dtype)


def _dy_scales(
    dy: Tensor, specs: tuple[Spec | None, Spec | None], state: tuple[Tensor | None, ...], headroom: float
) -> tuple[Tensor | None, Tensor | None]:
    """Return the delayed scales of dy and dy^T, and raise the step's amax."""
    largest, pending = state
    if largest is None or pending is None:
        return None, None
    now = find_amax(dy)
    pending.copy_(torch.maximum(pending, now))
    return delayed_scale(specs[0], largest, now, headroom), delayed_scale(specs[1], largest, now, headroom)


def _record_backward(
    health: Tensor, dy: Tensor, q: QTensor | None, q_t: QTensor | None, dx: Tensor | None, dw: Tensor | None, weight: Tensor | None
) -> None:  # fmt: skip
    turn = turn_of(health, BACKWARD)
    error = torch.zeros_like(turn)
    if q is not None and dx is not None and weight is not None:
        error = sampled_error(dy, weight, dx, turn)
    elif q_t is not None:
        error = quantization_error(dy, q_t.dequantize().T, turn)
    record(health, BACKWARD, dy, None if dx is None else weight, (dx, dw), error)
