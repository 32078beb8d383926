"""The Triton quantizer as one torch op, opaque to torch.compile. Specs are passed as their canonical strings."""

import torch
from torch import Tensor

from loka.formats import ROW, TENSOR, Spec, scale_shape
from loka.kernels.op import fake_of, torch_op
from loka.kernels.quantize import triton_kernels as kernels
from loka.kernels.quantize.triton_plan import SOURCES, plan_of, share_scale


@torch_op("quantize")
def quantize(
    x: Tensor, spec: str, scale: Tensor | None, transpose: str, transpose_scale: Tensor | None, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, scale, qt, t_scale.

    An op's outputs may alias neither its inputs nor one another. So outputs with an empty spec, given scales, and a
    t_scale that equals the scale (`share_scale`) are absent.
    """
    near = x.data_ptr() & 3 == 0
    # a seed is another in every call: plans with one are not cached
    plan = (plan_of.__wrapped__ if seed else plan_of)(
        x.shape, x.stride(0), x.dtype, x.device, near, spec, transpose, seed
    )
    make_q, make_scale, make_qt, make_t_scale, shared, maxima, reduce, write, operands = plan
    q, made = make_q and make_q(), make_scale and make_scale()
    qt, t_made = make_qt and make_qt(), make_t_scale and make_t_scale()
    if write is None:  # nothing to quantize, and scales of nothing are 1
        return q, None if made is None else made.fill_(1.0), qt, None if t_made is None else t_made.fill_(1.0)
    s = made if scale is None else _ready(scale, x)
    st = (made if shared else t_made) if transpose_scale is None else _ready(transpose_scale, x)
    parts = None
    if maxima is not None:
        make_row, make_column, make_parts, _, find = maxima
        row, column, parts = make_row and make_row(), make_column and make_column(), make_parts and make_parts()
        find(x, row, column, parts)
        if reduce is not None:
            reduce(row, None if row is None else s, column, None if column is None else st)
    write(*operands((x, q, s, qt, st, parts)))
    return q, made, qt, t_made


def _ready(scale: Tensor, x: Tensor) -> Tensor:
    """Return given scales as the kernels read them, copied only if needed."""
    if scale.dtype is torch.float32 and scale.is_contiguous() and scale.device == x.device:
        return scale
    return scale.to(x.device, torch.float32).contiguous()


@fake_of(quantize)
def _(x, spec, scale, transpose, transpose_scale, seed):  # type: ignore[no-untyped-def]
    plain = _fake(x, x.shape, Spec.parse(spec)) if spec else _nothing(x)
    transposed = _fake(x, (x.shape[1], x.shape[0]), Spec.parse(transpose)) if transpose else _nothing(x)
    if spec and transpose and share_scale(Spec.parse(spec), Spec.parse(transpose)):
        transposed = transposed[0], x.new_empty(0, dtype=torch.float32)
    return *plain, *transposed


def _fake(x: Tensor, shape: tuple[int, ...], spec: Spec) -> tuple[Tensor, Tensor]:
    q = kernels.aligned(*shape, spec.format.dtype, x.device)
    if spec.mode != "dynamic":
        return q, x.new_empty(0, dtype=torch.float32)
    if spec.block in (TENSOR, ROW):
        return q, x.new_empty(scale_shape(shape, spec.block), dtype=torch.float32)
    return q, kernels.block_scales(*shape, SOURCES[spec.block], x.device)


def _nothing(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(0, dtype=torch.float32), x.new_empty(0, dtype=torch.float32)


transpose = torch_op("transpose_fp8")(kernels.transpose)


@fake_of(transpose)
def _(data):  # type: ignore[no-untyped-def]
    return kernels.aligned(data.shape[1], data.shape[0], data.dtype, data.device)
