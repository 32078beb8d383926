"""The Triton quantizer as one torch op, opaque to torch.compile. Specs are passed as their canonical strings."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from loka.formats import E5M2, ROW, TENSOR, Block, Spec, scale_shape
from loka.kernels.op import fake_of, torch_op
from loka.kernels.quantize import triton_kernels as kernels

_SOURCES = {
    TENSOR: kernels.SCALAR,
    ROW: kernels.VECTOR,
    Block(1, 128): kernels.GROUPED,
    Block(128, 128): kernels.SQUARE,
}


class _Wanted(NamedTuple):
    """A spec as the kernels take it."""

    spec: Spec
    source: int
    options: dict[str, bool]
    rows: bool  # dynamic scale per row
    whole: bool  # dynamic scale for the tensor


def _is_pow2(spec: Spec) -> bool:
    return spec.scale in ("pow2", "e8m0")


@lru_cache
def _wanted(text: str) -> _Wanted | None:
    """Parse a spec; cached, because every call of the op passes its specs as text."""
    if not text:
        return None
    spec = Spec.parse(text)
    options = {
        "e5m2": spec.format == E5M2,
        "pow2": _is_pow2(spec),
        "stochastic": spec.rounding == "stochastic",
    }
    dynamic = spec.mode == "dynamic"
    return _Wanted(spec, _SOURCES[spec.block], options, dynamic and spec.block == ROW, dynamic and spec.block == TENSOR)


@torch_op("quantize")
def quantize(
    x: Tensor, spec: str, scale: Tensor | None, transpose: str, transpose_scale: Tensor | None, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, scale, qt, t_scale.

    An op's outputs may alias neither its inputs nor one another. So outputs with an empty spec, given scales, and a
    t_scale that equals the scale (`share_scale`) are absent.
    """
    want, want_t = _wanted(spec), _wanted(transpose)
    if want_t is None:
        return *_quantize_alone(x, want, scale, seed), None, None
    shape_t = (x.shape[1], x.shape[0])
    if want is not None and _rows_come_first(x, want, want_t):
        return _rows_then_transpose(x, want, want_t, transpose_scale, seed)
    scale, transpose_scale = _global_scales(x, want, scale, want_t, transpose_scale)
    if want is None:
        qt, t_made = kernels.quantize_transposed(x, source=want_t.source, scale=transpose_scale, seed=seed, **want_t.options)  # fmt: skip
        return None, None, qt, _made_scale(t_made, shape_t, want_t)
    o, o_t = want.options, want_t.options
    q, made, qt, t_made = kernels.quantize_both(
        x, source=want.source, scale=scale, t_source=want_t.source, t_scale=transpose_scale, seed=seed, **o,
        t_e5m2=o_t["e5m2"], t_pow2=o_t["pow2"], t_stochastic=o_t["stochastic"],
    )  # fmt: skip
    shared = want.whole and share_scale(want.spec, want_t.spec)
    return q, _made_scale(made, x.shape, want), qt, None if shared else _made_scale(t_made, shape_t, want_t)


def share_scale(spec: Spec, transpose: Spec) -> bool:
    """Return True if a matrix and its transpose have the same dynamic tensor scale."""
    whole = all(s.block == TENSOR and s.mode == "dynamic" for s in (spec, transpose))
    return whole and (spec.format == E5M2) == (transpose.format == E5M2) and _is_pow2(spec) == _is_pow2(transpose)


def _rows_come_first(x: Tensor, want: _Wanted, want_t: _Wanted) -> bool:
    """Return True if two passes suffice: rows, with column maxima if the transpose needs them, then the transpose."""
    return want.rows and not want_t.whole and not (want_t.rows and x.shape[1] > kernels.WIDEST_ROW)


def _rows_then_transpose(
    x: Tensor, want: _Wanted, want_t: _Wanted, scale_t: Tensor | None, seed: int
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    options, shape_t = want_t.options, (x.shape[1], x.shape[0])
    if want_t.rows:
        q, made, scale_t = kernels.quantize_rows_and_columns(
            x, seed=seed, t_e5m2=options["e5m2"], t_pow2=options["pow2"], **want.options
        )
    else:
        q, made = kernels.quantize_rows(x, seed=seed, **want.options)
        scale_t = None if scale_t is None else scale_t.to(x.device, torch.float32).contiguous()
    qt, t_made = kernels.quantize_transposed(
        x, source=want_t.source, scale=scale_t, seed=seed, backwards=True, **options
    )
    return q, _made_scale(made, x.shape, want), qt, _made_scale(t_made, shape_t, want_t)


def _quantize_alone(x: Tensor, want: _Wanted, scale: Tensor | None, seed: int) -> tuple[Tensor, Tensor | None]:
    if want.rows:
        return kernels.quantize_rows(x, seed=seed, **want.options)
    scale, _ = _global_scales(x, want, scale, None, None)
    q, made = kernels.quantize_tiles(x, source=want.source, scale=scale, seed=seed, **want.options)
    return q, _made_scale(made, x.shape, want)


def _made_scale(scale: Tensor, shape: tuple[int, ...], want: _Wanted) -> Tensor | None:
    """Return a dynamic scale in the shape of its spec, None for a given one."""
    if want.spec.mode != "dynamic":
        return None
    return scale.reshape(scale_shape(shape, want.spec.block)) if want.rows or want.whole else scale


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
    return q, kernels.block_scales(*shape, _SOURCES[spec.block], x.device)


def _nothing(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(0, dtype=torch.float32), x.new_empty(0, dtype=torch.float32)


def _global_scales(
    x: Tensor, want: _Wanted | None, scale: Tensor | None, want_t: _Wanted | None, scale_t: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the scales that need all of x, from one more read of it, and given ones as contiguous float32."""
    row, column = want is not None and want.rows, want_t is not None and want_t.rows
    whole, whole_t = want is not None and want.whole, want_t is not None and want_t.whole
    scale = None if scale is None else scale.to(x.device, torch.float32).contiguous()
    scale_t = None if scale_t is None else scale_t.to(x.device, torch.float32).contiguous()
    tensor = whole or whole_t
    if not (row or column or tensor):
        return scale, scale_t
    owners = [want] * row + [want_t] * column + [want if whole else want_t] * tensor
    made = kernels.global_scales(
        x, row=row, column=column, tensor=tensor, options=[_scale_options(owner) for owner in owners]
    )
    total = made.pop() if tensor else None
    if row or whole:
        scale = made.pop(0) if row else total
    if column or whole_t:
        scale_t = made.pop() if column else total
        if whole_t and whole and _scale_options(want) != _scale_options(want_t):
            scale_t = kernels.global_scales(x, row=False, column=False, tensor=True, options=[_scale_options(want_t)])[
                0
            ]
    return scale, scale_t


def _scale_options(want: _Wanted) -> tuple[bool, bool]:
    return want.options["e5m2"], want.options["pow2"]


transpose = torch_op("transpose_fp8")(kernels.transpose)


@fake_of(transpose)
def _(data):  # type: ignore[no-untyped-def]
    return kernels.aligned(data.shape[1], data.shape[0], data.dtype, data.device)
