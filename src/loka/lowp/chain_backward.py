"""The backward of a chain: from dy to the gradients of its input and parameters. The maths is in `chain_function`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.kernels.fused_linear import NORM_BLOCK, NORMALIZED, FusedResult, fused_linear_dgrad
from loka.kernels.fused_linear import fused_linear_gradient as fused_gradient
from loka.kernels.norm_quantize import norm_gradient
from loka.kernels.scaled_mm import scaled_mm
from loka.lowp.chain_forward import Kept, quantize_found, raise_pending
from loka.lowp.chain_function import GIVEN_SPECS, GROUP_SPEC, STATIC_SPEC, TENSOR_SPEC, ChainTensors, Layout, Link


class Gradients(NamedTuple):
    """The gradients of the input, and of the parameters of every link."""

    x: Tensor | None
    weight: list[Tensor | None]
    bias: list[Tensor | None]
    norm_weight: list[Tensor | None]
    norm_bias: list[Tensor | None]


def run_backward(
    dy: Tensor, saved: Sequence[Any], layout: Layout, tensors: ChainTensors, *, needs_input: bool, needs_weight: Sequence[bool],
    show: Callable[[int, QTensor], None] | None = None,
) -> Gradients:  # fmt: skip
    """Compute the gradients of a chain.

    Args:
        dy: gradient of the chain's output, [M, N].
        saved: what `run_forward` saved: the fields of `Kept`, link by link.
        layout: of the forward.
        tensors: of the chain. Only the norms, the gradients' scales and pending magnitudes, and the seed are used.
        needs_input: whether the gradient of x is needed.
        needs_weight: the same for every link's weight.
        show: called as `show(at, g)` with the quantized gradient of every link, last link first.

    Returns:
        The gradients; None if not needed or not present.
    """
    count, width = len(layout.links), len(Kept._fields)
    kept = [Kept(*saved[width * i : width * (i + 1)]) for i in range(count)]
    none: list[Tensor | None] = [None] * count
    made = Gradients(None, none.copy(), none.copy(), none.copy(), none.copy())
    g, g_t = _enter(dy, count - 1, kept, layout, tensors, made)
    for at in reversed(range(count)):
        if show is not None:
            show(at, g)
        if needs_weight[at]:
            x_q = QTensor(kept[at].x_t, kept[at].x_t_scale, input_spec(at, layout))
            made.weight[at] = multiply(g_t, x_q, layout.weight_types[at], layout, exact=True)
        w_t = QTensor(kept[at].w_t, kept[at].w_t_scale, layout.precision.weight_t_spec)
        if at == 0:
            return made._replace(x=multiply(g, w_t, layout.dtype, layout) if needs_input else None)
        before, follows = (
            layout.links[at - 1],
            not layout.links[at - 1].plain or tensors.draw(at - 1, layout) is not None,
        )
        if before.norm == "none" and layout.delays_gradients and follows:
            g, g_t = _step_back(g, w_t, at - 1, kept, layout, tensors, made)
        else:
            g, g_t = _enter(multiply(g, w_t, layout.dtype, layout), at - 1, kept, layout, tensors, made)
    raise AssertionError("a chain has at least one link")


def input_spec(at: int, layout: Layout) -> Spec:
    """Return the spec of a link's quantized input in training."""
    given = layout.given_input if at == 0 else layout.primed or layout.links[at - 1].bounded
    return STATIC_SPEC if given else TENSOR_SPEC


def _kept_z(kept: Kept, link: Link) -> QTensor | Tensor | None:
    if kept.z is None or kept.z_scale is None:
        return kept.z
    return QTensor(kept.z, kept.z_scale, NORMALIZED if link.bounded else STATIC_SPEC)


def _step_back(
    g: QTensor, w_t: QTensor, at: int, kept: list[Kept], layout: Layout, tensors: ChainTensors, made: Gradients
) -> tuple[QTensor, QTensor]:
    """Compute g_{at} from g_{at+1} in one kernel: GEMM, derivative of the activation, FP8 both ways."""
    link, scale = layout.links[at], tensors.g_scale[at]
    assert scale is not None
    result = fused_linear_dgrad(
        g, w_t, _kept_z(kept[at], link), spec=layout.gradient_spec, scale=scale, activation=link.activation, slope=link.slope,
        bias=layout.bias_types[at] is not None, amax=tensors.g_pending[at], dropout=tensors.draw(at, layout), backend=layout.precision.fused_backend,
    )  # fmt: skip
    made.bias[at] = cast_to(result.bias, layout.bias_types[at])
    return result.g, result.g_t


def _enter(
    dy: Tensor, at: int, kept: list[Kept], layout: Layout, tensors: ChainTensors, made: Gradients
) -> tuple[QTensor, QTensor]:
    """Compute g of a link from the 16-bit gradient of its output, and the gradients of its bias and norm."""
    link, precision, biased = layout.links[at], layout.precision, layout.bias_types[at] is not None
    backend, draw = precision.quantize_backend, tensors.draw(at, layout)
    if link.norm in ("layer", "rms"):
        dx, dx_t = _norm_back(dy, at, kept[at], layout, tensors, made)
        if isinstance(dx, QTensor):
            assert dx_t is not None
            if biased:
                made.bias[at] = cast_to(_column_sums(dx), layout.bias_types[at])
            return dx, dx_t
        dy, draw = dx, None
    z = None if link.norm in ("layer", "rms") else _kept_z(kept[at], link)
    if z is None and draw is None:
        if biased:
            made.bias[at] = cast_to(dy.sum(0, dtype=torch.float32), layout.bias_types[at])
        spec = precision.gradient_spec
        g, g_t = quantize_found(dy, spec, backend)
        if not layout.delays_gradients:
            raise_pending(tensors.g_pending[at], dy)
        return _given(g, layout), _given(g_t, layout)
    scale = tensors.g_scale[at] if layout.delays_gradients else None
    spec = layout.gradient_spec
    result = fused_gradient(
        dy.contiguous(), FusedResult(dy, z=z, rstd=kept[at].rstd), spec=spec, spec_t=spec, scale=scale,
        norm_block=NORM_BLOCK if link.bounded else 0, activation=link.activation, slope=link.slope, bias=biased, dropout=draw,
        backend=precision.fused_backend,
    )  # fmt: skip
    made.bias[at] = cast_to(result.bias, layout.bias_types[at])
    pending = tensors.g_pending[at]
    if pending is not None:
        pending.copy_(torch.maximum(pending, result.amax))
    return result.g, result.g_t


def _given(q: QTensor, layout: Layout) -> QTensor:
    """Return the same values with the spec of this chain's other gradients."""
    return QTensor(q.data, q.scale, GIVEN_SPECS[layout.precision.gradient_format]) if layout.delays_gradients else q


def _norm_back(
    dy: Tensor, at: int, kept: Kept, layout: Layout, tensors: ChainTensors, made: Gradients
) -> tuple[Tensor | QTensor, QTensor | None]:
    """Run backward through an activation and a layer or rms norm; with delayed gradient scales, write FP8 both ways."""
    link = layout.links[at]
    assert kept.z is not None
    assert kept.rstd is not None
    weight, bias = tensors.norm_weight[at], tensors.norm_bias[at]
    fp8: dict[str, Any] = {}
    if layout.delays_gradients:
        fp8 = {"spec": layout.gradient_spec, "scale": tensors.g_scale[at], "amax": tensors.g_pending[at]}
    back = norm_gradient(
        dy.contiguous(), kept.z, kept.mean, kept.rstd, norm=link.norm, weight=weight, bias=bias, activation=link.activation, dropout=tensors.draw(at, layout), **fp8
    )  # fmt: skip
    made.norm_weight[at], made.norm_bias[at] = (
        cast_to(back.weight, _type_of(weight)),
        cast_to(back.bias, _type_of(bias)),
    )
    return back.dx, back.dx_t


def _column_sums(g: QTensor) -> Tensor:
    """Sum an FP8 gradient over rows: the gradient of a bias before a norm."""
    return g.data.float().sum(0) * g.scale


def _type_of(x: Tensor | None) -> torch.dtype | None:
    return None if x is None else x.dtype


def cast_to(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Cast a gradient to its parameter's dtype; None if either is None."""
    if gradient is None or dtype is None:
        return None
    return gradient if gradient.dtype == dtype else gradient.to(dtype)


def multiply(a: QTensor, b: QTensor, dtype: torch.dtype, layout: Layout, *, exact: bool = False) -> Tensor:
    """Return a [M, K] @ b [N, K]^T in `dtype`.

    If `a` has scales per group of 128 and `b` one scale, that is expanded to groups: libraries pair groups with groups.
    `exact` disables fast accumulation, for weight gradients, which are sums over the whole batch.
    """
    if a.spec.block == GROUP_SPEC.block and b.scale.dim() == 0:
        rows, columns = b.shape
        groups = b.scale.expand(-(-columns // GROUP_SPEC.block.cols), rows).T.contiguous()
        b = QTensor(b.data, groups, GROUP_SPEC)
    return scaled_mm(
        a,
        b,
        out_dtype=dtype,
        backend=layout.precision.gemm_backend,
        fast_accum=layout.precision.fast_accum and not exact,
    )
