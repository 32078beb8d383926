"""The Triton quantizer as one torch op, opaque to torch.compile. Specs are passed as their canonical strings."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from loka.formats import E5M2, ROW, TENSOR, Block, Spec, scale_shape
from loka.kernels.op import fake_of, torch_op
from loka.kernels.quantize import triton_kernels as kernels
from loka.kernels.quantize import triton_maxima_kernels as maxima

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
    if want_t is None and want.rows:  # needs no maxima beforehand
        return *kernels.quantize_rows(x, seed=seed, **want.options), None, None
    row, column = want is not None and want.rows, want_t is not None and want_t.rows
    tensor = any(w is not None and w.whole for w in (want, want_t))
    found = maxima.find_maxima(x, kernels.alignment(x), row=row, column=column, tensor=tensor)
    per_row, per_column = maxima.vector_scales(found, _scale_options(want), _scale_options(want_t))
    out = None if want is None else _output(want, x.shape, scale, per_row, x.device)
    if want_t is None:
        return kernels.quantize_tiles(x, out, found.tensor, seed), _made_scale(out, x.shape, want), None, None
    shape_t = (x.shape[1], x.shape[0])
    out_t = _output(want_t, shape_t, transpose_scale, per_column, x.device)
    q, qt = kernels.quantize_both(x, out, out_t, found.tensor, seed, backwards=row or column or tensor)
    made = None if want is None else _made_scale(out, x.shape, want)
    shared = want is not None and share_scale(want.spec, want_t.spec)
    return q, made, qt, None if shared else _made_scale(out_t, shape_t, want_t)


def _output(
    want: _Wanted, shape: tuple[int, ...], given: Tensor | None, vector: Tensor | None, device: torch.device
) -> kernels.Output:
    """Return how an output is written: with given scales, with those of `vector`, or with scales that the kernel makes."""
    source = want.source
    if given is not None:
        scale = given.to(device, torch.float32).contiguous()
    elif want.rows or want.whole:
        count, empty = shape[0] if want.rows else 1, 0 in shape  # no kernel runs for an empty x, whose scales are 1
        scale = vector if vector is not None else (torch.ones if empty else torch.empty)(count, device=device)
        source = kernels.PARTS if want.whole else source
    else:
        scale = kernels.block_scales(*shape, source, device)
    return kernels.Output(source, scale, **want.options)


def share_scale(spec: Spec, transpose: Spec) -> bool:
    """Return True if a matrix and its transpose have the same dynamic tensor scale."""
    whole = all(s.block == TENSOR and s.mode == "dynamic" for s in (spec, transpose))
    return whole and (spec.format == E5M2) == (transpose.format == E5M2) and _is_pow2(spec) == _is_pow2(transpose)


def _made_scale(out: kernels.Output, shape: tuple[int, ...], want: _Wanted) -> Tensor | None:
    """Return a dynamic scale in the shape of its spec, None for a given one."""
    if want.spec.mode != "dynamic":
        return None
    return out.scale.reshape(scale_shape(shape, want.spec.block)) if want.rows or want.whole else out.scale


def _scale_options(want: _Wanted | None) -> tuple[bool, bool]:
    return (False, False) if want is None else (want.options["e5m2"], want.options["pow2"])


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


transpose = torch_op("transpose_fp8")(kernels.transpose)


@fake_of(transpose)
def _(data):  # type: ignore[no-untyped-def]
    return kernels.aligned(data.shape[1], data.shape[0], data.dtype, data.device)
