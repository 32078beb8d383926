"""The forward of a chain: quantize its input and weights, run every layer, and save FP8 tensors for backward.

The maths is in `chain_function`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from loka.formats import ROW, TENSOR, QTensor, Spec, block_amax, scale_from_amax
from loka.kernels.fused_linear import NORM_BLOCK, NORMALIZED, fused_linear
from loka.kernels.norm_quantize import norm_quantize
from loka.kernels.quantize import quantize, quantize_both
from loka.kernels.scaled_mm import scaled_mm
from loka.lowp.chain_function import GIVEN_SPECS, ROW_SPEC, STATIC_SPEC, TENSOR_SPEC, ChainTensors, Layout
from loka.lowp.scaling import find_amax


class Kept(NamedTuple):
    """The tensors that one link saves for backward."""

    x_t: Tensor
    x_t_scale: Tensor
    w_t: Tensor
    w_t_scale: Tensor
    z: Tensor | None = None
    z_scale: Tensor | None = None
    rstd: Tensor | None = None
    mean: Tensor | None = None


def quantize_input(x: Tensor, scale: Tensor | None, layout: Layout, *, rows: bool = True) -> QTensor:
    """Quantize x_0 without gradients: with its scale if known, otherwise with one scale per row.

    A compiler can fuse row scales with what computes the row. `rows=False` uses one scale for the tensor, as
    `quantize_input_both` does, so that activation checkpointing, which runs the forward twice, gets the same result.
    """
    backend = layout.precision.quantize_backend
    if backend == "auto" and torch.compiler.is_compiling():
        # Plain torch, which the compiler fuses with what computes x. Then x is never written or rounded in 16-bit, so
        # some values become the FP8 number next to that of the eager chain.
        backend = "compiled"
    if layout.given_input:
        return quantize(x, STATIC_SPEC, scale=scale, backend=backend)
    return quantize(x, ROW_SPEC if rows else TENSOR_SPEC, backend=backend)


def quantize_input_both(x: Tensor, scale: Tensor | None, layout: Layout) -> tuple[QTensor, QTensor]:
    """Quantize x_0 and its transpose, for training."""
    backend = layout.precision.quantize_backend
    if not layout.given_input:
        return quantize_found(x, TENSOR_SPEC, backend)
    return quantize_both(x, STATIC_SPEC, STATIC_SPEC, scale=scale, transpose_scale=scale, backend=backend)


def quantize_found(x: Tensor, spec: Spec, backend: str) -> tuple[QTensor, QTensor]:
    """Quantize x and x^T with a dynamic spec.

    When compiling, a tensor scale is computed so that the compiler can fuse it.
    """
    if spec.block != TENSOR or not torch.compiler.is_compiling() or x.numel() == 0:
        return quantize_both(x, spec, spec, backend=backend)
    # Reduce rows first: that reduction has the loops of what computes the rows, so it is fused and needs no extra read.
    scale = scale_from_amax(block_amax(x, ROW).amax(), spec)
    given = GIVEN_SPECS[spec.format.name]
    return quantize_both(x, given, given, scale=scale, transpose_scale=scale, backend=backend)


def run_plain(a: QTensor, w: QTensor, bias: Tensor | None, layout: Layout) -> Tensor:
    """Run a linear with nothing after it: the library's GEMM."""
    precision = layout.precision
    return scaled_mm(
        a, w, out_dtype=layout.dtype, backend=precision.gemm_backend, fast_accum=precision.fast_accum, bias=bias
    )


class Step(NamedTuple):
    """The result of one link: FP8 (in training also transposed) or 16-bit, and z, rstd and mean for backward."""

    a: QTensor | None
    a_t: QTensor | None
    y: Tensor | None
    z: QTensor | Tensor | None = None
    rstd: Tensor | None = None
    mean: Tensor | None = None


def run_link(a: QTensor, w: QTensor, at: int, layout: Layout, tensors: ChainTensors, *, training: bool) -> Step:
    """Run one layer. The last one writes 16-bit, the others FP8 for the next.

    Args:
        a: the input, [M, K].
        w: the weight, [N, K].
        at: the index of the link in the chain.
        layout: of the chain.
        tensors: of the chain. `pending`, from which delayed scales come, is written to.
        training: whether a backward follows, which needs z and the transpose of the output.
    """
    link, last = layout.links[at], at == len(layout.links) - 1
    bias, draw, backend = tensors.bias[at], tensors.draw(at, layout), layout.precision.fused_backend
    if link.plain and draw is None and (last or not layout.primed):
        y = run_plain(a, w, bias, layout)
        if last:
            return Step(None, None, y)
        raise_pending(tensors.pending[at], y)
        return _quantize_step(y, layout, training=training, z=None)
    if not last and link.norm in ("layer", "rms"):
        # add the bias in the GEMM: what follows is a kernel of ours, with which a compiler cannot fuse an addition
        if bias is None or (w.shape[0] % 16 == 0 and layout.precision.gemm_backend in ("auto", "torch")):
            h = run_plain(a, w, bias, layout)
        else:
            alone = fused_linear(a, w, out=layout.dtype, bias=bias, norm_block=0, activation="none", backend=backend)
            h = _as_tensor(alone.y)
        return _run_normed(h, at, layout, tensors, training=training)
    given: dict[str, Any] = {
        "bias": bias,
        "norm_block": NORM_BLOCK if link.bounded else 0,
        "activation": link.activation,
        "slope": link.slope,
        "dropout": draw,
        "backend": backend,
    }
    if last:
        result = fused_linear(a, w, out=layout.dtype, keep=training, **given)
        return Step(None, None, _as_tensor(result.y), result.z, result.rstd)
    scale, pending = tensors.scale[at], tensors.pending[at]
    if link.bounded:
        result = fused_linear(a, w, out=NORMALIZED, out_scale=scale, keep=training, transpose=training, **given)
        return Step(_as_q(result.y), result.y_t, None, result.z, result.rstd)
    if layout.primed:
        result = fused_linear(
            a, w, out=STATIC_SPEC, out_scale=scale, keep=training, transpose=training, amax=pending, **given
        )
        return Step(_as_q(result.y), result.y_t, None, result.z)
    result = fused_linear(a, w, out=layout.dtype, keep=True, amax=pending, **given)
    return _quantize_step(_as_tensor(result.y), layout, training=training, z=result.z)


def _run_normed(h: Tensor, at: int, layout: Layout, tensors: ChainTensors, *, training: bool) -> Step:
    """Normalize, activate and quantize the 16-bit output of a GEMM."""
    link = layout.links[at]
    norm: dict[str, Any] = {
        "norm": link.norm,
        "activation": link.activation,
        "weight": tensors.norm_weight[at],
        "bias": tensors.norm_bias[at],
        "eps": link.eps,
        "amax": tensors.pending[at],
        "dropout": tensors.draw(at, layout),
    }
    if layout.primed:
        made = norm_quantize(h, STATIC_SPEC, scale=tensors.scale[at], transpose=training, **norm)
        return Step(made.q, made.q_t, None, h, made.rstd, made.mean)
    made = norm_quantize(h, None, out_dtype=layout.dtype, **norm)
    assert made.y is not None
    step = _quantize_step(made.y, layout, training=training, z=h)
    return step._replace(rstd=made.rstd, mean=made.mean)


def _quantize_step(y: Tensor, layout: Layout, *, training: bool, z: QTensor | Tensor | None) -> Step:
    backend = layout.precision.quantize_backend
    if not training:
        return Step(quantize(y, TENSOR_SPEC, backend=backend), None, None)
    a, a_t = quantize_both(y, TENSOR_SPEC, TENSOR_SPEC, backend=backend)
    return Step(a, a_t, None, z)


def raise_pending(pending: Tensor | None, x: Tensor) -> None:
    """Raise `pending` to the largest magnitude of x, if it is collected."""
    if pending is not None:
        pending.copy_(torch.maximum(pending, find_amax(x)))


def _as_q(y: QTensor | Tensor) -> QTensor:
    assert isinstance(y, QTensor)
    return y


def _as_tensor(y: QTensor | Tensor) -> Tensor:
    assert isinstance(y, Tensor)
    return y


def run_forward(a: QTensor, a_t: QTensor, layout: Layout, tensors: ChainTensors) -> tuple[Tensor, list[Tensor | None]]:
    """Run a chain on its quantized input `a` with transpose `a_t`.

    Return the output and the fields of `Kept` per link.
    """
    saved: list[Tensor | None] = []
    y: Tensor | None = None
    for at in range(len(layout.links)):
        weight = tensors.weight[at]
        assert weight is not None
        w, w_t = _quantize_weight(weight, layout)
        step = run_link(a, w, at, layout, tensors, training=True)
        z, z_scale = (step.z.data, step.z.scale) if isinstance(step.z, QTensor) else (step.z, None)
        saved += [a_t.data, a_t.scale, w_t.data, w_t.scale, z, z_scale, step.rstd, step.mean]
        y = step.y
        if step.a is not None:
            assert step.a_t is not None
            a, a_t = step.a, step.a_t
    assert y is not None
    return y, saved


def _quantize_weight(weight: Tensor, layout: Layout) -> tuple[QTensor, QTensor]:
    """Quantize W and W^T."""
    precision = layout.precision
    return quantize_both(weight, TENSOR_SPEC, precision.weight_t_spec, backend=precision.quantize_backend)
